//! What the command is shown of the host, as a list of steps; pure.
//!
//! The view is the host, read-only, with things laid over it. Steps are taken from the root downwards, so what is laid over
//! a directory never hides what was laid inside it, and what is shown inside something hidden is shown. At one path the
//! more explicit wish wins.

use std::path::{Path, PathBuf};

use super::talk::Spec;

/// One thing that is laid over the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// An empty directory that everybody may write to.
    Private,
    /// An empty directory, in which things can be put while the view is made.
    Empty,
    /// The few devices that programs need.
    Devices,
    /// Nothing: an empty directory for a directory, an empty file for anything else; if it exists.
    Hidden,
    /// The store's directory with the control socket alone.
    Store,
    /// What the host has there.
    Shown,
    /// What the host has there, writable.
    Writable,
    /// The sandbox.
    Tree,
}

/// The steps in order, and what has to be hidden in the sandbox itself when it is served.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Where what is laid.
    pub steps: Vec<(PathBuf, Step)>,
    /// Hidden paths at or below the base.
    pub inside: Vec<PathBuf>,
}

/// Directories that are replaced, and by what. Sockets of the host's services are in `/run`: a read-only mount does not keep
/// anybody from connecting to them.
const REPLACED: &[(&str, Step)] = &[
    ("/dev", Step::Devices),
    ("/dev/shm", Step::Private),
    ("/run", Step::Empty),
    ("/var/run", Step::Empty),
    ("/tmp", Step::Private),
    ("/var/tmp", Step::Private),
];

/// What is not to be seen in the end. Only [`Spec::shown`] shows what is hidden in it; what is named itself is wished for; and
/// nothing shows what is withheld, nor stores.
pub fn hidden(spec: &Spec) -> Vec<PathBuf> {
    let is_shown = |path: &Path| spec.shown.iter().any(|shown| path.starts_with(shown));
    let is_named =
        |path: &Path| spec.bound.iter().chain(&spec.writable).any(|named| path == Path::new(named));
    let by_default = spec.hidden.iter().map(PathBuf::from).filter(|path| !is_shown(path) && !is_named(path));
    by_default.chain(spec.withheld.iter().chain(&spec.stores).map(PathBuf::from)).collect()
}

/// What of that lies in the sandbox.
pub fn hidden_inside(spec: &Spec) -> Vec<PathBuf> {
    let mut hidden = hidden(spec);
    hidden.retain(|path| path.starts_with(&spec.base));
    hidden
}

/// Plans the view. `real` tells the path without links of a directory to replace, if it exists.
pub fn layout(spec: &Spec, real: impl Fn(&Path) -> Option<PathBuf>) -> Layout {
    let base = PathBuf::from(&spec.base);
    let mut wishes: Vec<(PathBuf, Step)> = Vec::new();
    for (path, step) in REPLACED {
        // In the view /dev/shm is made new, whatever the host has there.
        let found = if path.starts_with("/dev") { Some(path.into()) } else { real(Path::new(path)) };
        wishes.extend(found.map(|path| (path, *step)));
    }
    let hidden = hidden(spec);
    let named = spec.shown.iter().chain(&spec.bound).map(|path| (PathBuf::from(path), Step::Shown));
    let named = named.chain(spec.writable.iter().map(|path| (path.into(), Step::Writable)));
    wishes.extend(named.filter(|(path, _)| !hidden.contains(path)));
    wishes.extend(hidden.into_iter().map(|path| (path, Step::Hidden)));
    wishes.push((PathBuf::from(&spec.store), Step::Store));
    wishes.push((PathBuf::from(&spec.program), Step::Shown));
    // The sandbox covers what lies in it, and hides its own secrets.
    let mut steps = wishes;
    steps.retain(|(path, _)| !path.starts_with(&base));
    steps.push((base, Step::Tree));
    // By depth, and at one path the more explicit wish last: it is the one that is kept.
    steps.sort_by(|(a, what), (b, other)| depth(a).cmp(&depth(b)).then(a.cmp(b)).then(what.cmp(other)));
    steps.reverse();
    steps.dedup_by(|(earlier, _), (later, _)| earlier == later);
    steps.reverse();
    Layout { steps, inside: hidden_inside(spec) }
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

    fn at(layout: &Layout, path: &str) -> Option<(usize, Step)> {
        let found: Vec<_> =
            layout.steps.iter().enumerate().filter(|(_, (there, _))| there == Path::new(path)).collect();
        assert!(found.len() < 2, "{path} is laid twice: {:?}", layout.steps);
        found.first().map(|(at, (_, step))| (*at, *step))
    }

    #[test]
    fn the_sandbox_is_laid_over_what_replaces_the_host_around_it() {
        for base in ["/tmp/x", "/run/user/1000/x", "/dev/shm/x", "/var/tmp/deep/er/x"] {
            let layout = plan(&spec(base));
            let tree = at(&layout, base).unwrap();
            assert_eq!(tree.1, Step::Tree);
            for above in Path::new(base).ancestors().skip(1) {
                if let Some(step) = at(&layout, above.to_str().unwrap()) {
                    assert!(step.0 < tree.0, "{base}: {:?}", layout.steps);
                }
            }
        }
        assert_eq!(at(&plan(&spec("/r")), "/run").unwrap().1, Step::Empty);
    }

    #[test]
    fn a_base_that_is_or_contains_what_is_replaced_covers_it() {
        let layout = plan(&spec("/tmp"));
        assert_eq!(at(&layout, "/tmp").unwrap().1, Step::Tree);
        let layout = plan(&spec("/var"));
        assert_eq!(at(&layout, "/var/tmp"), None);
        let home = Spec { hidden: vec!["/home/u/.ssh".into(), "/etc/shadow".into()], ..spec("/home/u") };
        let layout = plan(&home);
        assert_eq!(layout.inside, [PathBuf::from("/home/u/.ssh")]);
        assert_eq!(at(&layout, "/home/u/.ssh"), None);
        assert_eq!(at(&layout, "/etc/shadow").unwrap().1, Step::Hidden);
    }

    #[test]
    fn what_is_asked_for_is_shown_and_nothing_beside_it() {
        let wishes = Spec {
            hidden: vec!["/h/.ssh".into(), "/h/.aws".into(), "/h/.kube".into()],
            shown: vec!["/h/.ssh".into(), "/h/.aws/config".into()],
            writable: vec!["/h".into(), "/tmp".into(), "/h/.kube".into()],
            ..spec("/h/repo")
        };
        let layout = plan(&wishes);
        assert_eq!(at(&layout, "/h/.ssh").unwrap().1, Step::Shown);
        let (hidden, shown) = (at(&layout, "/h/.aws").unwrap(), at(&layout, "/h/.aws/config").unwrap());
        assert!(hidden.1 == Step::Hidden && shown.1 == Step::Shown && hidden.0 < shown.0);
        assert_eq!(at(&layout, "/tmp").unwrap().1, Step::Writable);
        assert_eq!(at(&layout, "/h/.kube").unwrap().1, Step::Writable);
        assert!(at(&layout, "/h").unwrap().0 < hidden.0, "a writable home still hides its secrets");
        let everything = Spec { shown: vec!["/h".into()], ..wishes };
        assert_eq!(at(&plan(&everything), "/h/.aws"), None);
    }

    #[test]
    fn only_what_is_shown_shows_what_is_hidden_in_it_and_nothing_what_is_withheld() {
        let home = Spec {
            hidden: vec!["/h/.ssh".into(), "/h/.aws".into()],
            withheld: vec!["/h/own".into(), "/h/.ssh/id".into()],
            stores: vec!["/h/state".into()],
            bound: vec!["/h".into(), "/h/.aws".into(), "/h/own".into(), "/h/state".into()],
            ..spec("/r")
        };
        let layout = plan(&home);
        for path in ["/h/.ssh", "/h/own", "/h/.ssh/id", "/h/state"] {
            assert_eq!(at(&layout, path).unwrap().1, Step::Hidden, "{path}");
        }
        assert_eq!(at(&layout, "/h/.aws").unwrap().1, Step::Shown);
        assert_eq!(hidden_inside(&Spec { base: "/h/own".into(), ..home.clone() }), [Path::new("/h/own")]);
        let shown = Spec { shown: vec!["/h".into(), "/h/own".into()], ..home };
        let layout = plan(&shown);
        assert_eq!((at(&layout, "/h/.ssh"), at(&layout, "/h/state").unwrap().1), (None, Step::Hidden));
        for path in ["/h/own", "/h/.ssh/id"] {
            assert_eq!(at(&layout, path).unwrap().1, Step::Hidden, "{path}");
        }
    }

    #[test]
    fn stores_are_hidden_and_the_own_one_shows_its_socket() {
        let layout = plan(&Spec { stores: vec!["/state".into()], ..spec("/r") });
        let (all, own) = (at(&layout, "/state").unwrap(), at(&layout, "/state/s").unwrap());
        assert!(all.1 == Step::Hidden && own.1 == Step::Store && all.0 < own.0);
    }
}
