//! Runs the real binary with a real mount, and processes that work in it.
//!
//! A [`Live`] is one base, one store and one mount point. When it is dropped, also by a panic, it
//! unmounts and compares the base with its state before: only an apply may change a byte or a time
//! of it. A [`Puppet`] is a python process that runs the lines it is given. It lets a test hold
//! descriptors, mappings and working directories across a restore. After [`LIMIT`], or the test's
//! own limit, a watchdog kills the daemon and the puppets, so that a hang becomes a failure.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;

/// The time limit of a test that does not set its own.
const LIMIT: Duration = Duration::from_secs(100);
/// A program that prints every node of a tree.
const SNAPSHOT: &str = include_str!("snapshot.py");
/// The program of a puppet.
const PUPPET: &str = include_str!("puppet.py");

/// A base, a store and a mount.
pub struct Live {
    dir: tempfile::TempDir,
    pub base: PathBuf,
    pub mnt: PathBuf,
    pub store: PathBuf,
    base_before: Vec<String>,
    /// More arguments for `mount`.
    pub options: Vec<&'static str>,
    /// The failpoint at which the daemon is killed or fails (`JAILFS_FAILPOINTS`).
    pub steps: String,
    /// Whether an apply may have changed the base.
    pub applied: bool,
    mounted: bool,
    pid: u32,
    watched: Arc<Watched>,
}

/// The processes that the watchdog kills.
#[derive(Default)]
struct Watched {
    processes: Mutex<Vec<Watchee>>,
    over: AtomicBool,
}

/// A process that the watchdog kills.
struct Watchee {
    pid: u32,
    begun: u64,
}

impl Watched {
    fn add(&self, pid: u32) {
        let watchee = begun_at(pid).map(|begun| Watchee { pid, begun });
        self.processes.lock().unwrap().extend(watchee);
    }
}

impl Live {
    /// Makes a base by running a shell script in it, and mounts it.
    pub fn new(script: &str) -> Live {
        Live::with_options(script, &[])
    }

    /// The same, with more arguments for `mount`.
    pub fn with_options(script: &str, options: &[&'static str]) -> Live {
        Live::with_limit(script, options, LIMIT)
    }

    /// The same, with a time limit for the test.
    pub fn with_limit(script: &str, options: &[&'static str], limit: Duration) -> Live {
        let dir = tempfile::tempdir().unwrap();
        let path = jailfs::internals::sys::path::resolve(dir.path()).unwrap();
        let (base, mnt, store) = (path.join("base"), path.join("mnt"), path.join("store"));
        std::fs::create_dir(&base).unwrap();
        std::fs::create_dir(&mnt).unwrap();
        shell(&base, script);
        let base_before = snapshot(&base, true);
        let watched = Arc::new(Watched::default());
        let options = options.to_vec();
        let mut live = Live {
            dir,
            base,
            mnt,
            store,
            base_before,
            options,
            steps: String::new(),
            applied: false,
            mounted: false,
            pid: 0,
            watched,
        };
        live.watch(limit);
        live.mount();
        live
    }

    /// Mounts the base with the existing store.
    pub fn mount(&mut self) {
        let output = self.try_mount();
        assert!(output.status.success(), "mount: {}", text(&output));
        self.mounted = true;
        self.pid = self.daemon();
        self.watched.add(self.pid);
    }

    /// Mounts with steps that kill the daemon without a request, and waits until it no longer locks
    /// the store. It may end before the client has its answer.
    pub fn mount_until_killed(&mut self) {
        let output = self.try_mount();
        let is_killed = text(&output).contains("the daemon died (signal: 9");
        assert!(output.status.success() || is_killed, "mount: {}", text(&output));
        let mut lock = std::fs::File::options().read(true).open(self.store.join("lock")).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            match Flock::lock(lock, FlockArg::LockExclusiveNonblock) {
                Ok(_) => return,
                Err((file, _)) => lock = file,
            }
            assert!(Instant::now() < end, "{} killed no daemon", self.steps);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn try_mount(&self) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("mount").args([&self.base, &self.mnt]);
        command.arg("--store").arg(&self.store).args(threads()).args(&self.options);
        command.env("JAILFS_FAILPOINTS", &self.steps).current_dir("/").output().unwrap()
    }

    /// Unmounts; fails if anything is in use.
    pub fn umount(&mut self) {
        let output = self.try_umount();
        assert!(output.status.success(), "umount: {}", text(&output));
        self.mounted = false;
    }

    fn try_umount(&self) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("umount").arg(&self.mnt).current_dir("/").output().unwrap()
    }

    /// Unmounts when the store may have failed: a daemon that reports an error is killed.
    pub fn umount_or_kill(&mut self) {
        if !self.try_umount().status.success() && living_thread(self.pid).is_some() {
            kill(self.pid(), Signal::SIGKILL).unwrap();
            self.wait_until_dead();
        }
        // A dead mount would block the next mount.
        let mnt = self.mnt.display().to_string();
        shell(
            Path::new("/"),
            &format!("if grep -q ' {mnt} ' /proc/self/mounts; then umount -l {mnt}; fi"),
        );
        self.mounted = false;
    }

    /// Unmounts and mounts again.
    pub fn remount(&mut self) {
        self.umount();
        self.mount();
    }

    /// Kills the daemon, as the OOM killer would, and mounts again over the dead mount.
    pub fn kill_and_mount(&mut self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.wait_until_dead();
        self.mount();
    }

    /// The process of the daemon.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.pid as i32)
    }

    /// Waits for the end of a killed daemon. The signal may still be on its way, and all threads
    /// must end first. Then the kernel reports that the mount has no server.
    pub fn wait_until_dead(&self) {
        let gone = Instant::now() + Duration::from_secs(10);
        while let Some(thread) = living_thread(self.pid) {
            if Instant::now() > gone {
                // Otherwise a request to the mount would wait for ever.
                let _aborted = nix::mount::umount2(&self.mnt, nix::mount::MntFlags::MNT_FORCE);
                panic!("the daemon outlives SIGKILL: {thread}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // A request that arrives while the kernel closes the connection gets this error.
        let error = loop {
            match statvfs(&self.mnt).unwrap_err() {
                Errno::ECONNABORTED if Instant::now() < gone => {}
                errno => break errno,
            }
        };
        assert_eq!(error, Errno::ENOTCONN);
    }

    fn daemon(&self) -> u32 {
        let status = self.json(&["status"]);
        status[0]["pid"].as_u64().unwrap() as u32
    }

    /// Runs `jailfs -C MNT` with these arguments; it must succeed.
    pub fn jailfs(&self, words: &[&str]) -> String {
        let output = self.try_jailfs(words);
        assert!(output.status.success(), "jailfs {words:?}: {}", text(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The same, whether or not it succeeds.
    pub fn try_jailfs(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("-C").arg(&self.mnt).args(words).current_dir("/").output().unwrap()
    }

    /// The output of a command with `--json`.
    pub fn json(&self, words: &[&str]) -> Vec<serde_json::Value> {
        let said = self.jailfs(&[words, &["--json"]].concat());
        said.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub fn checkpoint(&self, name: &str) {
        self.jailfs(&["checkpoint", name]);
    }

    pub fn restore(&self, name: &str) {
        self.jailfs(&["restore", name]);
    }

    /// Runs a shell script in the mount; it must succeed.
    pub fn sh(&self, script: &str) -> String {
        shell(&self.mnt, script)
    }

    /// The content of a file of the mount.
    pub fn read(&self, path: &str) -> String {
        let path = self.mnt.join(path);
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub fn exists(&self, path: &str) -> bool {
        self.mnt.join(path).symlink_metadata().is_ok()
    }

    /// Everything that can be seen of the tree in the mount.
    pub fn snapshot(&self) -> Vec<String> {
        snapshot(&self.mnt, false)
    }

    /// A process whose working directory is in the mount.
    pub fn puppet(&self, dir: &str) -> Puppet {
        let puppet = Puppet::start(&self.mnt.join(dir));
        self.watched.add(puppet.child.id());
        puppet
    }

    /// A directory outside of the base, the store and the mount, for the files of a test.
    pub fn outside(&self) -> &Path {
        self.dir.path()
    }

    fn watch(&self, limit: Duration) {
        let watched = Arc::clone(&self.watched);
        std::thread::spawn(move || {
            let end = Instant::now() + limit;
            while Instant::now() < end {
                if watched.over.load(Ordering::Relaxed) {
                    return;
                }
                std::thread::sleep(Duration::from_millis(100));
            }
            eprintln!("the test takes longer than {limit:?}: its daemon and processes are killed");
            for Watchee { pid, begun } in watched.processes.lock().unwrap().drain(..) {
                // Another process may have its pid by now.
                if begun_at(pid) == Some(begun)
                    && let Err(error) = kill(Pid::from_raw(pid as i32), Signal::SIGKILL)
                {
                    eprintln!("kill {pid}: {error}");
                }
            }
        });
    }

    /// Asserts that these files are in the base as the mount shows them.
    #[track_caller]
    pub fn check_applied(&self, paths: &[&str]) {
        for path in paths {
            assert_eq!(
                std::fs::read(self.base.join(path)).ok(),
                std::fs::read(self.mnt.join(path)).ok(),
                "{path}"
            );
        }
    }

    /// Asserts that the base is as it was before.
    pub fn check_base(&self) {
        if !self.applied {
            assert_same(&self.base_before, &snapshot(&self.base, true), "the base");
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.watched.over.store(true, Ordering::Relaxed);
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.store.join("daemon.log")).unwrap_or_default();
            let tail: Vec<&str> = log.lines().rev().take(20).collect();
            eprintln!("the end of the daemon's log, last line first:\n{}", tail.join("\n"));
            // A mount that is still in use is detached.
            let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
            drop(command.arg("umount").arg("--lazy").arg(&self.mnt).current_dir("/").output());
            return;
        }
        if self.mounted {
            let output = self.try_umount();
            if !output.status.success() {
                let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
                drop(command.arg("umount").arg("--lazy").arg(&self.mnt).current_dir("/").output());
                panic!("umount: {}", text(&output));
            }
        }
        self.check_base();
    }
}

fn checked(command: &mut Command, what: &str) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{what}: {}", text(&output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The start time of a process, in ticks since boot (proc_pid_stat(5), field 22).
fn begun_at(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may contain spaces and parentheses.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// The kernel's report on a thread of a process that has not ended.
fn living_thread(pid: u32) -> Option<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let stats =
        tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.into_iter().find(|stat| !stat.contains(") Z") && !stat.contains(") X"))
}

/// The output of a program, for messages.
pub fn text(output: &Output) -> String {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}{err}", output.status)
}

/// Runs a shell script in a directory; it must succeed.
pub fn shell(dir: &Path, script: &str) -> String {
    checked(Command::new("sh").arg("-euc").arg(script).current_dir(dir), script)
}

/// Everything that can be seen of a tree, one line for each node. With `quietly` no access time
/// changes.
pub fn snapshot(root: &Path, quietly: bool) -> Vec<String> {
    let mut command = Command::new("python3");
    command.args(["-I", "-S", "-c", SNAPSHOT]).arg(root).arg(if quietly { "quietly" } else { "" });
    checked(command.current_dir("/"), "snapshot").lines().map(str::to_owned).collect()
}

/// Compares two snapshots and shows only what differs.
#[track_caller]
pub fn assert_same(wanted: &[String], found: &[String], what: &str) {
    if wanted == found {
        return;
    }
    let missing: Vec<_> = wanted.iter().filter(|line| !found.contains(line)).collect();
    let extra: Vec<_> = found.iter().filter(|line| !wanted.contains(line)).collect();
    panic!("{what} is not what it was.\nwas: {missing:#?}\nis: {extra:#?}");
}

/// A process that runs the lines it is given.
pub struct Puppet {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Puppet {
    pub fn start(dir: &Path) -> Puppet {
        let mut command = Command::new("python3");
        let command = command.args(["-I", "-S", "-u", "-c", PUPPET]).current_dir(dir);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut puppet = Puppet { child, stdin, stdout };
        puppet.run("None");
        puppet
    }

    /// Starts a line; [`Puppet::answer`] returns the result.
    pub fn begin(&mut self, code: &str) {
        let line = serde_json::to_string(code).unwrap();
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Waits for the line that was started.
    #[track_caller]
    pub fn answer(&mut self) -> Result<String, String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        if line.is_empty() {
            panic!("the process died: {:?}", self.child.wait());
        }
        let (ok, said): (bool, String) = serde_json::from_str(&line).unwrap();
        if ok { Ok(said) } else { Err(said) }
    }

    /// Runs a line that must succeed. Returns the value of an expression as python's `repr`.
    #[track_caller]
    pub fn run(&mut self, code: &str) -> String {
        self.begin(code);
        self.answer().unwrap_or_else(|error| panic!("{code}: {error}"))
    }

    /// Runs a line that must fail. Returns the name of the errno.
    #[track_caller]
    pub fn fail(&mut self, code: &str) -> String {
        self.begin(code);
        match self.answer() {
            Ok(said) => panic!("{code} should fail, and gives {said}"),
            Err(error) => error,
        }
    }

    /// Asserts the value of an expression.
    #[track_caller]
    pub fn gives(&mut self, code: &str, wanted: &str) {
        assert_eq!(self.run(code), wanted, "{code}");
    }

    /// Tells the process to end, and waits for it.
    pub fn end(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.stdin = None;
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

impl Drop for Puppet {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A shell in a directory that runs single lines, like the shell of an agent.
pub struct Shell {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Shell {
    pub fn start(dir: &Path) -> Shell {
        let mut command = Command::new("bash");
        let command = command.args(["--norc", "--noprofile"]).current_dir(dir);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut shell = Shell { child, stdin, stdout };
        shell.run("exec 2>&1");
        shell
    }

    /// Runs a line. Returns its output, followed by its exit status if that is not 0.
    #[track_caller]
    pub fn run(&mut self, line: &str) -> String {
        writeln!(self.stdin.as_mut().unwrap(), "{line}\nprintf '\\n:end %s\\n' $?").unwrap();
        let mut said = String::new();
        loop {
            let mut line = String::new();
            if self.stdout.read_line(&mut line).unwrap() == 0 {
                panic!("the shell ended: {said}");
            }
            match line.strip_prefix(":end ") {
                Some("0\n") => return said.trim_end().to_owned(),
                Some(status) => {
                    return format!("{}\nstatus {}", said.trim_end(), status.trim_end());
                }
                None => said.push_str(&line),
            }
        }
    }

    #[track_caller]
    pub fn gives(&mut self, line: &str, wanted: &str) {
        assert_eq!(self.run(line), wanted, "{line}");
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.stdin = None;
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// The options of a mount that `JAILFS_THREADS=N` asks for: N threads serve it, all at the same
/// time.
pub fn threads() -> Vec<String> {
    let number = std::env::var("JAILFS_THREADS");
    let options = |number| format!("threads={number},parallel={number}");
    number.map_or(Vec::new(), |number| vec!["-o".to_owned(), options(number)])
}
