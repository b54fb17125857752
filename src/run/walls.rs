//! Builds the second wall: restrictions that a process imposes on itself and can never lift.
//!
//! The process that starts the command imposes them in this order: no core dumps; capabilities are
//! dropped; no_new_privs, so that no program gives any back; the filter on system calls; Landlock.
//! All of its children inherit them.
//!
//! Outside a user namespace of its own the command always keeps no capability at all, because each
//! would be power over the files of the host.
//!
//! In a view Landlock repeats what the mounts say, but by file instead of by path. So it also holds
//! where no path is used: for an inherited host file, a signal, an abstract socket. Without a view
//! Landlock is the only wall and must hide the secrets too. It can only allow, so all paths except
//! the secrets are allowed, directory by directory.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, LandlockStatus, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use nix::sys::prctl;
use nix::sys::resource::{Resource, setrlimit};
use serde::{Deserialize, Serialize};

use super::net::Net;
use super::spec::{Accept, Spec};
use super::{filter, layout};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sys::{capabilities, process};

/// Capabilities that root keeps in the user namespace of a view: over its files and processes, not
/// over the machine.
const KEPT_BY_ROOT: u64 = capabilities::CHOWN
    | capabilities::DAC_OVERRIDE
    | capabilities::FOWNER
    | capabilities::FSETID
    | capabilities::KILL
    | capabilities::SETGID
    | capabilities::SETUID
    | capabilities::SETFCAP
    | capabilities::NET_BIND_SERVICE
    | capabilities::SYS_CHROOT;

/// The newest Landlock version that this code supports.
const NEWEST: ABI = ABI::V9;

/// The walls that stand around a command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Walls {
    /// The view, if there are namespaces.
    pub view: Option<ViewWall>,
    /// The version of Landlock, if the kernel has it.
    pub landlock: Option<u32>,
}

/// Properties of a view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ViewWall {
    /// /proc shows only the processes of the command.
    pub own_proc: bool,
    /// The command has a network namespace of its own: a loopback and no route.
    pub own_net: bool,
}

impl Walls {
    /// The walls that stand and those that are missing, in one line for people.
    pub fn line(&self) -> String {
        let mut stand = Vec::new();
        let mut missing = Vec::new();
        match &self.view {
            Some(view) => {
                let net = if view.own_net { ", net" } else { "" };
                stand.push(format!(
                    "a view of its own (user, mount, pid, ipc, uts{net} namespaces)"
                ));
                if !view.own_proc {
                    missing.push(
                        "the list of processes outside can be read: no new /proc is allowed here",
                    );
                }
            }
            None => {
                missing.push("no namespaces: processes, sockets and /tmp are shared with the host")
            }
        }
        match self.landlock {
            Some(version) => stand.push(format!("Landlock {version}")),
            None => missing
                .push("no Landlock in this kernel, or not allowed here (it needs Linux 5.19)"),
        }
        stand.push("a system call filter, no new privileges".to_owned());
        let mut line = format!("confined by {}", stand.join(", "));
        for what in missing {
            line.push_str("; but ");
            line.push_str(what);
        }
        line
    }
}

/// Imposes the second wall on this process. Returns the version of Landlock, or None if the caller
/// accepts its absence and the kernel lacks it.
///
/// # Errors
/// The kernel refuses a restriction, or lacks Landlock and the caller relies on it.
pub(super) fn impose(spec: &Spec, in_view: bool) -> Result<Option<u32>> {
    // Opened before the rights to open them are given up below.
    let rules = if in_view { rules_of_view(spec) } else { rules_without_view(spec) };
    // A kernel without keyrings, or one that refuses a new one, leaves no key to protect.
    if let Err(error) = process::new_session_keyring() {
        log::debug!("leave the session keyring: {error}");
    }
    setrlimit(Resource::RLIMIT_CORE, 0, 0)
        .map_err(io::Error::from)
        .attempt(|| "disable core dumps")?;
    drop_capabilities(in_view)?;
    prctl::set_no_new_privs().map_err(io::Error::from).attempt(|| "set no_new_privs")?;
    // The command must not read the memory of this process or reach the host through its open
    // files.
    prctl::set_dumpable(false)
        .map_err(io::Error::from)
        .attempt(|| "protect this process from its children")?;
    filter::apply(&spec.allow)?;
    let landlock = restrict(rules)
        .map_err(|error| Error::new(Kind::Failed, "put up Landlock", error.to_string()))?;
    if landlock.is_none() && spec.accept != Accept::View {
        let why = "this kernel has no Landlock, or does not allow it here (it needs Linux 5.19)";
        let hint = "--walls=view runs the command without it";
        return Err(Error::new(Kind::Failed, "put up Landlock", why).hint(hint));
    }
    Ok(landlock)
}

fn drop_capabilities(in_view: bool) -> Result<()> {
    let attempt = || "drop capabilities";
    let keep = if in_view && nix::unistd::geteuid().is_root() { KEPT_BY_ROOT } else { 0 };
    match capabilities::keep_only(keep) {
        // A process that cannot limit its bounding set cannot gain from it either, because of
        // no_new_privs.
        Err(error) if error.raw_os_error() == Some(nix::libc::EPERM) => {
            capabilities::limit(keep).attempt(attempt)
        }
        other => other.attempt(attempt),
    }
}

/// A path, and the access allowed at and below it.
type Allowed = (PathBuf, BitFlags<AccessFs>);

fn read_access() -> BitFlags<AccessFs> {
    AccessFs::Execute | AccessFs::ReadFile | AccessFs::ReadDir
}

fn all_access() -> BitFlags<AccessFs> {
    AccessFs::from_all(NEWEST)
}

fn device_access() -> BitFlags<AccessFs> {
    AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::IoctlDev
}

fn proc_access() -> BitFlags<AccessFs> {
    AccessFs::WriteFile | AccessFs::Truncate
}

fn rules_of_view(spec: &Spec) -> Vec<Allowed> {
    let mut rules: Vec<Allowed> = vec![
        ("/".into(), read_access()),
        ("/proc".into(), proc_access()),
        ("/dev".into(), device_access()),
        (PathBuf::from(&spec.base), all_access()),
        (PathBuf::from(&spec.store), AccessFs::ResolveUnix.into()),
    ];
    rules.extend(["/tmp", "/var/tmp", "/dev/shm"].map(|path| (path.into(), all_access())));
    rules.extend(spec.writable.iter().map(|path| (path.into(), all_access())));
    let named = spec.shown.iter().chain(&spec.bound);
    rules.extend(named.map(|path| (path.into(), AccessFs::ResolveUnix.into())));
    rules
}

fn rules_without_view(spec: &Spec) -> Vec<Allowed> {
    let mut hidden = layout::hidden(spec);
    hidden.push(PathBuf::from(&spec.store));
    let mut rules = Vec::new();
    allow_except(Path::new("/"), read_access(), &hidden, &mut rules);
    rules.push(("/proc".into(), proc_access()));
    for device in ["null", "zero", "full", "random", "urandom", "tty", "ptmx", "pts"] {
        rules.push((Path::new("/dev").join(device), device_access()));
    }
    rules.push(("/dev/shm".into(), all_access()));
    if let Some((mount, scratch)) = &spec.elsewhere {
        rules.extend([mount, scratch].map(|path| (path.into(), all_access())));
    }
    for path in &spec.writable {
        allow_except(Path::new(path), all_access(), &hidden, &mut rules);
    }
    for path in spec.shown.iter().chain(&spec.bound) {
        allow_except(Path::new(path), read_access() | AccessFs::ResolveUnix, &hidden, &mut rules);
    }
    rules.push((
        PathBuf::from(&spec.store).join(crate::control::SOCKET),
        AccessFs::ResolveUnix | AccessFs::WriteFile,
    ));
    rules
}

/// Allows `access` at and below `dir` except for the hidden paths. A directory above a hidden path
/// gets no rule itself, because the rule would also hold below it; so it can be neither listed nor
/// written. Only its other entries are allowed.
fn allow_except(
    dir: &Path,
    access: BitFlags<AccessFs>,
    hidden: &[PathBuf],
    rules: &mut Vec<Allowed>,
) {
    if hidden.iter().any(|path| dir == path) {
        return;
    }
    if !hidden.iter().any(|path| path.starts_with(dir)) {
        rules.push((dir.to_owned(), access));
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        // A symlink needs no rule: Landlock checks the file that it leads to.
        if entry.file_type().is_ok_and(|kind| !kind.is_symlink()) {
            allow_except(&path, access, hidden, rules);
        }
    }
}

fn restrict(rules: Vec<Allowed>) -> std::result::Result<Option<u32>, RulesetError> {
    // Without this right no file could be moved to another directory. A kernel without it gets no
    // Landlock.
    let movable = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let Ok(ruleset) = movable.handle_access(AccessFs::Refer) else { return Ok(None) };
    let ruleset = ruleset
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all_access())?
        .scope(Scope::from_all(NEWEST))?
        .create()?
        .set_compatibility(CompatLevel::BestEffort);
    let status = rules.into_iter().try_fold(ruleset, allow)?.restrict_self()?;
    Ok(match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, _)
        | (_, LandlockStatus::NotEnabled | LandlockStatus::NotImplemented) => None,
        (_, LandlockStatus::Available { effective_abi, kernel_abi }) => {
            let version = kernel_abi.unwrap_or(effective_abi as i32);
            u32::try_from(version).ok()
        }
    })
}

fn allow(
    ruleset: RulesetCreated,
    (path, access): Allowed,
) -> std::result::Result<RulesetCreated, RulesetError> {
    // A missing path needs no rule.
    let Ok(held) = PathFd::new(&path) else { return Ok(ruleset) };
    let is_dir = fs::metadata(&path).is_ok_and(|about| about.is_dir());
    let access = if is_dir { access } else { access & AccessFs::from_file(NEWEST) };
    if access.is_empty() { Ok(ruleset) } else { ruleset.add_rule(PathBeneath::new(held, access)) }
}

/// The text that tells the command about its sandbox.
pub fn readme(base: &Path, writable: &[PathBuf], hidden: &[PathBuf], net: &Net) -> String {
    let list = |paths: &[PathBuf]| {
        let lines = paths.iter().map(|path| format!("  {}\n", path.display()));
        lines.collect::<String>()
    };
    let or_none = |text: String| if text.is_empty() { "  (nothing)\n".to_owned() } else { text };
    let scratch = ["/tmp", "/var/tmp", "/dev/shm"].map(PathBuf::from);
    format!(
        "You are in a sandbox of 'jailfs run'.\n\n\
         Writable, and not visible outside until it is applied:\n  {}\n\
         Writable, private, and removed when the command ends:\n{}\
         Writable as on the host (--bind-rw):\n{}\n\
         Everything else is read-only. A refusal there is 'Read-only file system' \
         or 'Permission denied';\n\
         the caller of 'jailfs run' can allow a directory with --bind-rw DIR.\n\n\
         Hidden: shown empty, or absent. The caller of 'jailfs run' can show a path with \
         --show PATH:\n{}\n\
         Also hidden: /run with the sockets of services, devices, other processes, and the \
         stores of jailfs.\n\
         Mounting, gaining privileges, and signals to processes outside are refused.\n\n\
         {}\n\
         'jailfs checkpoint', 'restore', 'diff', 'status' and 'discard' work here; \
         'apply' does not.\n",
        base.display(),
        list(&scratch),
        or_none(list(writable)),
        or_none(list(hidden)),
        net.about(),
    )
}

/// Variables that name sockets of the host, which are hidden. Without the variable a program
/// notices at once.
const SOCKETS: &[&str] = &[
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "SSH_AUTH_SOCK",
    "GPG_AGENT_INFO",
    "WAYLAND_DISPLAY",
];
/// Variables that `--env-clear` keeps, besides `LC_*`.
const PLAIN: &[&str] = &["HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TERM", "TZ", "USER"];

/// Whether the command gets a variable of the caller. `shown` are the paths that the caller shows
/// or binds.
pub fn keeps_variable(name: &OsStr, value: &OsStr, clear: bool, shown: &[PathBuf]) -> bool {
    let text = name.to_str().unwrap_or_default();
    if clear {
        return PLAIN.contains(&text) || text.starts_with("LC_");
    }
    if !SOCKETS.contains(&text) {
        return true;
    }
    let value = value.to_str().unwrap_or_default();
    let path = value.split(['=', ',', ';', ':']).find(|part| part.starts_with('/')).map(Path::new);
    path.is_some_and(|path| {
        shown.iter().any(|shown| path.starts_with(shown) || shown.starts_with(path))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_names_the_walls_that_stand_and_those_that_are_missing() {
        let view = ViewWall { own_proc: true, own_net: true };
        let all = Walls { view: Some(view.clone()), landlock: Some(7) };
        assert_eq!(
            all.line(),
            "confined by a view of its own (user, mount, pid, ipc, uts, net namespaces), \
             Landlock 7, a system call filter, no new privileges"
        );
        let old = Walls { view: Some(ViewWall { own_proc: false, ..view }), landlock: None };
        assert_eq!(old.line().matches("; but ").count(), 2);
        let alone = Walls { view: None, landlock: Some(4) };
        assert_eq!(
            alone.line(),
            "confined by Landlock 4, a system call filter, no new privileges; but no \
             namespaces: processes, sockets and /tmp are shared with the host"
        );
    }

    #[test]
    fn every_path_except_the_secrets_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        for made in ["a/b", "a/secret", "c"] {
            fs::create_dir_all(dir.path().join(made)).unwrap();
        }
        std::os::unix::fs::symlink("a/secret", dir.path().join("link")).unwrap();
        let mut rules = Vec::new();
        allow_except(dir.path(), read_access(), &[dir.path().join("a/secret")], &mut rules);
        let mut allowed: Vec<_> = rules.into_iter().map(|(path, _)| path).collect();
        allowed.sort();
        assert_eq!(allowed, [dir.path().join("a/b"), dir.path().join("c")]);
    }

    #[test]
    fn variables_that_name_hidden_sockets_are_dropped() {
        let keeps = |name: &str, value: &str, clear, shown: &[PathBuf]| {
            keeps_variable(OsStr::new(name), OsStr::new(value), clear, shown)
        };
        assert!(keeps("TOKEN", "x", false, &[]) && !keeps("TOKEN", "x", true, &[]));
        assert!(keeps("PATH", "/bin", true, &[]) && keeps("LC_ALL", "C", true, &[]));
        assert!(!keeps("SSH_AUTH_SOCK", "/tmp/ssh-1/agent", false, &[]));
        assert!(keeps("SSH_AUTH_SOCK", "/tmp/ssh-1/agent", false, &["/tmp/ssh-1".into()]));
        assert!(keeps(
            "DBUS_SESSION_BUS_ADDRESS",
            "unix:path=/run/user/1/bus",
            false,
            &["/run/user/1/bus".into()]
        ));
        assert!(keeps("XDG_RUNTIME_DIR", "/run/user/1", false, &["/run/user/1/bus".into()]));
    }

    #[test]
    fn the_readme_names_the_writable_and_hidden_paths() {
        let text = readme(Path::new("/repo"), &[], &["/root/.ssh".into()], &Net::None);
        for part in [
            "  /repo\n",
            "  (nothing)\n",
            "  /root/.ssh\n",
            "--show PATH",
            "--bind-rw DIR",
            "--net none",
        ] {
            assert!(text.contains(part), "{part}");
        }
    }
}
