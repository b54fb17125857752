//! The directories of a test, and how it runs the program.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

/// The path of the program.
pub const JAILFS: &str = env!("CARGO_BIN_EXE_jailfs");
/// The time limit of a command, in seconds for timeout(1).
const PATIENCE: &str = "60";
/// The time limit of a test.
const TEST_PATIENCE: Duration = Duration::from_secs(240);

/// A base with some files, an empty mount point and a home.
pub struct Place {
    dir: Option<tempfile::TempDir>,
    done: Arc<AtomicBool>,
}

/// The exit status of a command, and its output.
#[derive(Debug)]
pub struct Said {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Place {
    pub fn new() -> Place {
        let dir = tempfile::Builder::new()
            .prefix("jailfs-cli-")
            .tempdir()
            .expect("a directory for the test");
        let place = Place { dir: Some(dir), done: Arc::default() };
        watch(place.root().to_owned(), Arc::clone(&place.done));
        for made in ["base/sub", "mnt", "home"] {
            fs::create_dir_all(place.at(made)).expect("make a directory");
        }
        place.write("base/a", "one\n");
        place.write("base/del", "del\n");
        place.write("base/sub/b", "x\ny\nz\n");
        place
    }

    pub fn root(&self) -> &Path {
        self.dir.as_ref().expect("the directory exists as long as the place").path()
    }

    pub fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.root().join(path)
    }

    pub fn write(&self, path: impl AsRef<Path>, text: impl AsRef<[u8]>) {
        fs::write(self.at(path), text).expect("write a file");
    }

    pub fn read(&self, path: impl AsRef<Path>) -> String {
        fs::read_to_string(self.at(path)).expect("read a file")
    }

    /// A directory beside the base that a command in a sandbox may write.
    pub fn make_out(&self) {
        fs::create_dir_all(self.at("out")).expect("make a directory");
    }

    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.at(path).symlink_metadata().is_ok()
    }

    /// A program in the directory `dir` of the place, with its home and no other variable of jailfs
    /// in its environment.
    pub fn command(&self, dir: &str, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("timeout");
        command
            .args(["-k", "1", PATIENCE])
            .arg(program)
            .current_dir(self.at(dir))
            .stdin(Stdio::null());
        self.environment(&mut command);
        command
    }

    pub fn environment(&self, command: &mut Command) {
        command.env("HOME", self.at("home"));
        for name in
            ["XDG_STATE_HOME", "XDG_RUNTIME_DIR", "JAILFS_SANDBOX", "JAILFS_ROOT", "JAILFS_LOG"]
        {
            command.env_remove(name);
        }
        command.env("JAILFS", JAILFS);
    }

    /// `jailfs ARGUMENTS` in the directory `dir`.
    pub fn call<A: AsRef<OsStr>>(&self, dir: &str, arguments: impl IntoIterator<Item = A>) -> Said {
        said(self.command(dir, JAILFS).args(arguments))
    }

    /// `jailfs LINE` in the directory `dir`; the arguments in the line are separated by spaces.
    pub fn say(&self, dir: &str, line: &str) -> Said {
        self.call(dir, line.split_whitespace())
    }

    /// As [`Place::say`], for a command that must succeed. Returns its standard output.
    pub fn ok(&self, dir: &str, line: &str) -> String {
        let said = self.say(dir, line);
        assert_eq!(said.code, 0, "jailfs {line}: {said:?}");
        said.out
    }

    /// As [`Place::say`], for a command that must fail with this code. Returns its standard error.
    pub fn fails(&self, dir: &str, line: &str, code: i32) -> String {
        let said = self.say(dir, line);
        assert_eq!(said.code, code, "jailfs {line}: {said:?}");
        let text = &said.err;
        assert!(text.contains("error: "), "jailfs {line}: {text}");
        text.clone()
    }

    /// As [`Place::ok`], with `--json`: every line parsed.
    pub fn json(&self, dir: &str, line: &str) -> Vec<Value> {
        parse(&self.ok(dir, &format!("{line} --json")))
    }

    /// A shell script in the directory `dir`, with the program as `$JAILFS`.
    pub fn sh(&self, dir: &str, script: &str) -> Said {
        said(self.command(dir, "sh").args(["-ec", script]))
    }

    /// `jailfs run OPTIONS -- sh -c SCRIPT` in the base.
    pub fn run(&self, options: &str, script: &str) -> Said {
        let words = std::iter::once("run")
            .chain(options.split_whitespace())
            .chain(["--", "sh", "-c", script]);
        self.call("base", words)
    }

    /// The exit code of [`Place::run`] without options.
    pub fn run_code(&self, script: &str) -> i32 {
        self.run("", script).code
    }

    pub fn mount(&self) {
        self.ok("", "mount base mnt");
    }

    pub fn umount(&self) {
        self.ok("", "umount mnt");
    }

    /// The process that serves the mount at `mnt`.
    pub fn daemon(&self) -> i32 {
        let pid = self.json("mnt", "status")[0]["pid"].as_i64().expect("a process");
        i32::try_from(pid).expect("a number of a process")
    }

    /// Whether something is mounted at a path of the place.
    pub fn is_mounted(&self, path: &str) -> bool {
        mounts_below(&self.at(path)).contains(&self.at(path))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.done.store(true, Ordering::SeqCst);
        let Some(dir) = self.dir.take() else { return };
        take_away(dir.path());
        if !mounts_below(dir.path()).is_empty() {
            // The directory cannot be removed while it is mounted: that would remove the content of
            // the mount.
            let kept = dir.keep();
            eprintln!("a mount is left below {}", kept.display());
        }
    }
}

/// Runs a command to its end.
pub fn said(command: &mut Command) -> Said {
    let output = command.output().expect("start a program");
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("the output is UTF-8");
    let killed =
        std::os::unix::process::ExitStatusExt::signal(&output.status).map(|signal| 128 + signal);
    let code = output.status.code().or(killed).expect("it has ended");
    Said { code, out: text(&output.stdout), err: text(&output.stderr) }
}

/// Every line as one JSON object with a type.
pub fn parse(text: &str) -> Vec<Value> {
    let objects: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    assert!(objects.iter().all(|object| object["type"].is_string()), "{text}");
    objects
}

/// Waits for a condition.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "timed out waiting until {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process lives, and is no zombie.
pub fn lives(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

pub fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).expect("send a signal");
}

/// An argument of bytes that need not be UTF-8.
pub fn word(bytes: &[u8]) -> OsString {
    OsStr::from_bytes(bytes).to_owned()
}

fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let all = jailfs::internals::sys::mountinfo::read().expect("/proc is mounted");
    let points = all.into_iter().map(|entry| PathBuf::from(OsStr::from_bytes(&entry.mount_point)));
    points.filter(|point| point.starts_with(path)).collect()
}

/// Detaches every mount below a directory, the innermost first.
fn take_away(path: &Path) {
    for point in mounts_below(path).iter().rev() {
        if let Err(error) = jailfs::internals::sys::mount::unmount(point, true) {
            eprintln!("unmount {}: {error}", point.display());
        }
    }
}

/// Ends the process, and the mounts of the test, if the test does not end in time.
fn watch(root: PathBuf, done: Arc<AtomicBool>) {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    std::thread::spawn(move || {
        let start = Instant::now();
        while start.elapsed() < TEST_PATIENCE {
            if done.load(Ordering::SeqCst) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        eprintln!("{name} hangs: its mounts are taken away");
        take_away(&root);
        std::process::abort();
    });
}
