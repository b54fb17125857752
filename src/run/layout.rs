//! Plans what the command sees of the host, as a list of mounts. Pure.
//!
//! The view is the host, read-only, with mounts over it. The list is ordered from the root
//! downwards. So a mount over a directory never hides a later one inside it, and a path that is
//! shown inside a hidden one is visible. If several mounts are wanted at one path, the more
//! explicit one wins.

use std::path::{Path, PathBuf};

use super::spec::Spec;
use crate::control;

/// The mount at a path of the view. The variants are ordered from the least to the most explicit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MountKind {
    /// An empty directory that every user may write.
    Private,
    /// An empty directory, read-only once the view is complete.
    Empty,
    /// The few devices that programs need.
    Devices,
    /// Nothing, if the path exists: an empty directory over a directory, an empty file over
    /// anything else.
    Hidden,
    /// The store's directory with the control socket alone.
    Store,
    /// The host's own file or directory.
    Shown,
    /// The host's own file or directory, writable.
    Writable,
    /// The sandbox.
    Tree,
}

/// The plan of a view.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The mounts in order.
    pub mounts: Vec<(PathBuf, MountKind)>,
    /// Hidden paths at or below the base. They are hidden once the sandbox is served.
    pub inside: Vec<PathBuf>,
}

/// Directories that are replaced. `/run` has the sockets of the host's services, and a read-only
/// mount does not prevent a connection to them.
const REPLACED: &[(&str, MountKind)] = &[
    ("/dev", MountKind::Devices),
    ("/dev/shm", MountKind::Private),
    ("/run", MountKind::Empty),
    ("/var/run", MountKind::Empty),
    ("/tmp", MountKind::Private),
    ("/var/tmp", MountKind::Private),
];

/// The paths that the command must not see. [`Spec::shown`] lifts the hiding at and below a path,
/// the other options only at the path itself. No option shows withheld paths or stores. The control
/// socket of the sandbox itself, which is among the sockets of the host, is not hidden.
pub fn hidden(spec: &Spec) -> Vec<PathBuf> {
    let own_socket = Path::new(&spec.store).join(control::SOCKET);
    let is_shown = |path: &Path| spec.shown.iter().any(|shown| path.starts_with(shown));
    let is_named =
        |path: &Path| spec.bound.iter().chain(&spec.writable).any(|named| path == Path::new(named));
    let by_default = spec.hidden.iter().map(PathBuf::from);
    let by_default =
        by_default.filter(|path| !is_shown(path) && !is_named(path) && *path != own_socket);
    by_default.chain(spec.withheld.iter().chain(&spec.stores).map(PathBuf::from)).collect()
}

/// The hidden paths that lie in the sandbox.
pub fn hidden_inside(spec: &Spec) -> Vec<PathBuf> {
    let mut hidden = hidden(spec);
    hidden.retain(|path| path.starts_with(&spec.base));
    hidden
}

/// Plans the view. `real` returns the resolved path of a directory to replace, if it exists.
pub fn layout(spec: &Spec, real: impl Fn(&Path) -> Option<PathBuf>) -> Layout {
    let base = PathBuf::from(&spec.base);
    let mut wanted: Vec<(PathBuf, MountKind)> = Vec::new();
    for (path, kind) in REPLACED {
        // The view makes /dev/shm anew, whatever the host has there.
        let found =
            if path.starts_with("/dev") { Some(path.into()) } else { real(Path::new(path)) };
        wanted.extend(found.map(|path| (path, *kind)));
    }
    let hidden = hidden(spec);
    let named =
        spec.shown.iter().chain(&spec.bound).map(|path| (PathBuf::from(path), MountKind::Shown));
    let named = named.chain(spec.writable.iter().map(|path| (path.into(), MountKind::Writable)));
    wanted.extend(named.filter(|(path, _)| !hidden.contains(path)));
    wanted.extend(hidden.into_iter().map(|path| (path, MountKind::Hidden)));
    wanted.push((PathBuf::from(&spec.store), MountKind::Store));
    wanted.push((PathBuf::from(&spec.program), MountKind::Shown));
    // The sandbox covers everything below the base, and hides its own secrets later.
    let mut mounts = wanted;
    mounts.retain(|(path, _)| !path.starts_with(&base));
    mounts.push((base, MountKind::Tree));
    // By depth. At one path the most explicit mount is sorted last, and is the one that is kept.
    mounts.sort_by(|(a, what), (b, other)| {
        depth(a).cmp(&depth(b)).then(a.cmp(b)).then(what.cmp(other))
    });
    mounts.reverse();
    mounts.dedup_by(|(earlier, _), (later, _)| earlier == later);
    mounts.reverse();
    Layout { mounts, inside: hidden_inside(spec) }
}

fn depth(path: &Path) -> usize {
    path.components().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(base: &str) -> Spec {
        Spec {
            base: base.into(),
            store: "/state/s".into(),
            program: "/usr/bin/jailfs".into(),
            ..Spec::default()
        }
    }

    fn plan(spec: &Spec) -> Layout {
        layout(spec, |path| match path.to_str() {
            Some("/var/run") => Some("/run".into()),
            _ => Some(path.to_owned()),
        })
    }

    fn at(layout: &Layout, path: &str) -> Option<(usize, MountKind)> {
        let found: Vec<_> = layout
            .mounts
            .iter()
            .enumerate()
            .filter(|(_, (there, _))| there == Path::new(path))
            .collect();
        assert!(found.len() < 2, "{path} is mounted twice: {:?}", layout.mounts);
        found.first().map(|(at, (_, step))| (*at, *step))
    }

    #[test]
    fn the_sandbox_is_mounted_over_the_replaced_directories_above_it() {
        for base in ["/tmp/x", "/run/user/1000/x", "/dev/shm/x", "/var/tmp/deep/er/x"] {
            let layout = plan(&spec(base));
            let tree = at(&layout, base).unwrap();
            assert_eq!(tree.1, MountKind::Tree);
            for above in Path::new(base).ancestors().skip(1) {
                if let Some(above) = at(&layout, above.to_str().unwrap()) {
                    assert!(above.0 < tree.0, "{base}: {:?}", layout.mounts);
                }
            }
        }
        assert_eq!(at(&plan(&spec("/r")), "/run").unwrap().1, MountKind::Empty);
    }

    #[test]
    fn a_base_covers_replaced_directories_at_and_below_it() {
        let layout = plan(&spec("/tmp"));
        assert_eq!(at(&layout, "/tmp").unwrap().1, MountKind::Tree);
        let layout = plan(&spec("/var"));
        assert_eq!(at(&layout, "/var/tmp"), None);
        let home =
            Spec { hidden: vec!["/home/u/.ssh".into(), "/etc/shadow".into()], ..spec("/home/u") };
        let layout = plan(&home);
        assert_eq!(layout.inside, [PathBuf::from("/home/u/.ssh")]);
        assert_eq!(at(&layout, "/home/u/.ssh"), None);
        assert_eq!(at(&layout, "/etc/shadow").unwrap().1, MountKind::Hidden);
    }

    #[test]
    fn a_named_path_is_shown_and_its_siblings_stay_hidden() {
        let wanted = Spec {
            hidden: vec!["/h/.ssh".into(), "/h/.aws".into(), "/h/.kube".into()],
            shown: vec!["/h/.ssh".into(), "/h/.aws/config".into()],
            writable: vec!["/h".into(), "/tmp".into(), "/h/.kube".into()],
            ..spec("/h/repo")
        };
        let layout = plan(&wanted);
        assert_eq!(at(&layout, "/h/.ssh").unwrap().1, MountKind::Shown);
        let (hidden, shown) =
            (at(&layout, "/h/.aws").unwrap(), at(&layout, "/h/.aws/config").unwrap());
        assert!(hidden.1 == MountKind::Hidden && shown.1 == MountKind::Shown && hidden.0 < shown.0);
        assert_eq!(at(&layout, "/tmp").unwrap().1, MountKind::Writable);
        assert_eq!(at(&layout, "/h/.kube").unwrap().1, MountKind::Writable);
        assert!(at(&layout, "/h").unwrap().0 < hidden.0, "a writable home still hides its secrets");
        let everything = Spec { shown: vec!["/h".into()], ..wanted };
        assert_eq!(at(&plan(&everything), "/h/.aws"), None);
    }

    #[test]
    fn show_lifts_hiding_below_a_path_but_never_shows_withheld_paths() {
        let home = Spec {
            hidden: vec!["/h/.ssh".into(), "/h/.aws".into()],
            withheld: vec!["/h/own".into(), "/h/.ssh/id".into()],
            stores: vec!["/h/state".into()],
            bound: vec!["/h".into(), "/h/.aws".into(), "/h/own".into(), "/h/state".into()],
            ..spec("/r")
        };
        let layout = plan(&home);
        for path in ["/h/.ssh", "/h/own", "/h/.ssh/id", "/h/state"] {
            assert_eq!(at(&layout, path).unwrap().1, MountKind::Hidden, "{path}");
        }
        assert_eq!(at(&layout, "/h/.aws").unwrap().1, MountKind::Shown);
        assert_eq!(
            hidden_inside(&Spec { base: "/h/own".into(), ..home.clone() }),
            [Path::new("/h/own")]
        );
        let shown = Spec { shown: vec!["/h".into(), "/h/own".into()], ..home };
        let layout = plan(&shown);
        assert_eq!(
            (at(&layout, "/h/.ssh"), at(&layout, "/h/state").unwrap().1),
            (None, MountKind::Hidden)
        );
        for path in ["/h/own", "/h/.ssh/id"] {
            assert_eq!(at(&layout, path).unwrap().1, MountKind::Hidden, "{path}");
        }
    }

    #[test]
    fn stores_are_hidden_and_the_sandbox_store_shows_its_socket() {
        let layout = plan(&Spec { stores: vec!["/state".into()], ..spec("/r") });
        let (all, own) = (at(&layout, "/state").unwrap(), at(&layout, "/state/s").unwrap());
        assert!(all.1 == MountKind::Hidden && own.1 == MountKind::Store && all.0 < own.0);
        let hidden = vec!["/state/s/control".into(), "/state/other/control".into()];
        let layout = plan(&Spec { hidden, ..spec("/r") });
        assert_eq!(at(&layout, "/state/s/control"), None);
        assert_eq!(at(&layout, "/state/other/control").unwrap().1, MountKind::Hidden);
    }
}
