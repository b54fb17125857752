//! The place of a program: a mount, a directory outside of it, and an environment without our
//! variables.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard};

use crate::harness::{Live, assert_same, snapshot};

/// How long a program with all its steps may take. Builds and installations are slow on a busy
/// machine.
const LIMIT: Duration = Duration::from_secs(400);
/// How long one step may take, in seconds for timeout(1).
const STEP: &str = "200";
/// The user `nobody`.
const ORDINARY_USER: u32 = 65534;

/// Held for reading while a test has a mount. `jailfs run` creates a mount namespace, in which
/// existing mounts stay while it runs, even if they are unmounted elsewhere. So it must start when
/// there are none.
pub static MOUNTS: RwLock<()> = RwLock::new(());

/// The user that runs a program. All mounts are root's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum User {
    Root,
    Ordinary,
}

/// A program and its place.
pub struct Place {
    name: &'static str,
    user: User,
    pub live: Live,
    // Declared after the mount, so that it is dropped after it.
    _mounts: RwLockReadGuard<'static, ()>,
}

impl Place {
    /// A mount of an empty base that belongs to the user.
    pub fn new(name: &'static str, user: User, options: &[&'static str]) -> Place {
        let mounts = MOUNTS.read();
        let live = Live::with_limit("", options, LIMIT);
        let place = Place { name, user, live, _mounts: mounts };
        std::fs::set_permissions(place.live.outside(), PermissionsExt::from_mode(0o755)).unwrap();
        prepare(place.live.outside());
        user.owns(&place.live.mnt);
        user.owns(&place.out());
        place
    }

    /// A directory outside of the mount for the program.
    pub fn out(&self) -> PathBuf {
        self.live.outside().join("out")
    }

    /// Runs a step of the program; it must succeed.
    #[track_caller]
    pub fn step(&self, step: &str) -> String {
        succeed(&mut self.begin(step), &format!("{}: {step}", self.name))
    }

    /// A step of the program that is not started yet.
    pub fn begin(&self, step: &str) -> Command {
        let mut command = self.user.command("timeout");
        command.args(["-k", "1", STEP, "bash"]).args(words(self.live.outside(), self.name, step));
        environment(&mut command, self.live.outside());
        command.current_dir(&self.live.mnt).stdin(Stdio::null());
        command
    }

    /// Makes a checkpoint. Returns a snapshot of the tree.
    pub fn checkpoint(&self, name: &str) -> Vec<String> {
        self.live.checkpoint(name);
        self.live.snapshot()
    }

    /// Restores a checkpoint and compares it with its snapshot.
    #[track_caller]
    pub fn restore(&self, name: &str, wanted: &[String]) {
        self.live.restore(name);
        self.is(&format!("the restored checkpoint '{name}'"), wanted);
    }

    #[track_caller]
    pub fn is(&self, what: &str, wanted: &[String]) {
        assert_same(wanted, &self.live.snapshot(), &format!("{}: {what}", self.name));
    }

    /// Applies the tree to the base. They must be equal in all that an apply keeps, and the mount
    /// then shows only the base. Returns a snapshot of the base.
    #[track_caller]
    pub fn apply(&mut self) -> Vec<String> {
        self.live.applied = true;
        self.live.jailfs(&["apply", "--protected", "--privileges"]);
        let (wanted, base) = (self.live.snapshot(), snapshot(&self.live.base, true));
        assert_same(&portable(&wanted), &portable(&base), &format!("{}: the base", self.name));
        assert_eq!(self.live.jailfs(&["diff", "base", "@"]), "");
        // Reading the base changes the access times of its links, and a mount keeps those that it
        // cached.
        self.live.remount();
        base
    }
}

impl User {
    /// A command of this user.
    pub fn command(self, program: &str) -> Command {
        if self == User::Root {
            return Command::new(program);
        }
        let mut command = Command::new("setpriv");
        let id = ORDINARY_USER.to_string();
        command.args(["--reuid", &id, "--regid", &id, "--clear-groups", program]);
        command
    }

    /// Changes the owner of a path to this user.
    pub fn owns(self, path: &Path) {
        if self == User::Ordinary {
            chown(path, Some(ORDINARY_USER), Some(ORDINARY_USER)).unwrap();
        }
    }
}

/// Copies the scripts to where every user can read them, and creates the directories `out` and
/// `home`.
pub fn prepare(outside: &Path) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let programs = outside.join("programs");
    for made in [&programs, &outside.join("out"), &outside.join("home")] {
        std::fs::create_dir(made).unwrap();
    }
    for entry in std::fs::read_dir(source.join("tests/programs")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), programs.join(entry.file_name())).unwrap();
    }
    for (from, name) in [("tests/common/snapshot.py", "snapshot.py"), ("Cargo.lock", "Cargo.lock")]
    {
        std::fs::copy(source.join(from), programs.join(name)).unwrap();
    }
}

/// The arguments after `bash` for a step of a program.
pub fn words(outside: &Path, name: &str, step: &str) -> [PathBuf; 3] {
    let programs = outside.join("programs");
    [programs.join("step.sh"), programs.join(format!("{name}.sh")), step.into()]
}

/// Removes the variables of cargo, of the tests and of jailfs from an environment, and adds those
/// that the scripts use.
pub fn environment(command: &mut Command, outside: &Path) {
    // cargo and rustup are in the home of the user who runs the tests.
    let real = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
    for (name, place) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
        command
            .env(name, std::env::var_os(name).unwrap_or_else(|| real.join(place).into_os_string()));
    }
    for name in
        ["CARGO_TARGET_DIR", "RUSTFLAGS", "MAKEFLAGS", "JAILFS_SANDBOX", "JAILFS_ROOT", "TMPDIR"]
    {
        command.env_remove(name);
    }
    let programs = outside.join("programs");
    command.env("SNAPSHOT", programs.join("snapshot.py")).env("LOCK", programs.join("Cargo.lock"));
    command
        .env("PROGRAMS", programs)
        .env("OUT", outside.join("out"))
        .env("HOME", outside.join("home"));
}

/// Runs a command; it must succeed. Returns its standard output.
#[track_caller]
pub fn succeed(command: &mut Command, what: &str) -> String {
    let output = command.output().unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let from = err.lines().count().saturating_sub(60);
    let end: Vec<&str> = err.lines().skip(from).collect();
    assert!(output.status.success(), "{what}: {}\n{out}\n{}", output.status, end.join("\n"));
    out.into_owned()
}

/// The parts of a snapshot that another filesystem keeps as well: no inode numbers, no times except
/// mtime, no sizes of directories.
fn portable(lines: &[String]) -> Vec<String> {
    let kept = |line: &String| {
        let mode = line.split(" uid=").next().and_then(|start| start.rsplit(' ').next());
        let directory = mode.is_some_and(|mode| mode.len() == 5 && mode.starts_with('4'));
        let host = |word: &str| {
            let begins = ["ino=", "ctime=", "atime="].iter().any(|begin| word.starts_with(begin));
            begins || directory && word.starts_with("size=")
        };
        line.split(' ').filter(|word| !host(word)).collect::<Vec<_>>().join(" ")
    };
    lines.iter().map(kept).collect()
}
