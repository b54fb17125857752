//! The real binary with a real mount, and processes that live in it.
//!
//! A [`Live`] is one base, one store and one mount point. It unmounts when it is dropped, also in a panic, and holds the
//! base against what it was: nothing but an apply may change a byte or a time of it. A [`Puppet`] is a python process
//! that does what it is told and says what came of it, so that a test can hold descriptors, mappings and directories
//! across a restore without holding them itself. After [`LIMIT`], or its own limit, a watchdog kills the daemon and the puppets, so that
//! whatever hangs fails instead.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::statvfs::statvfs;
use nix::unistd::Pid;

/// How long one test may take, if it does not ask for more.
const LIMIT: Duration = Duration::from_secs(100);
/// What a program says of every node of a tree.
const SNAPSHOT: &str = include_str!("snapshot.py");
/// What a puppet does.
const PUPPET: &str = include_str!("puppet.py");

/// A base, a store and a mount.
pub struct Live {
    dir: tempfile::TempDir,
    pub base: PathBuf,
    pub mnt: PathBuf,
    pub store: PathBuf,
    base_before: Vec<String>,
    /// Further words for `mount`.
    pub options: Vec<&'static str>,
    /// At which failpoint the daemon is killed or fails (`JAILFS_FAILPOINTS`).
    pub steps: String,
    /// Whether an apply may have changed the base.
    pub applied: bool,
    mounted: bool,
    pid: u32,
    watched: Arc<Watched>,
}

/// What the watchdog kills.
#[derive(Default)]
struct Watched {
    processes: Mutex<Vec<Watchee>>,
    over: AtomicBool,
}

/// A process that the watchdog ends.
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
    /// Makes a base by a shell script that runs in it, and mounts it.
    pub fn new(script: &str) -> Live {
        Live::with_options(script, &[])
    }

    /// The same with further words for `mount`.
    pub fn with_options(script: &str, options: &[&'static str]) -> Live {
        Live::with_limit(script, options, LIMIT)
    }

    /// The same, for a test that may take this long.
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

    /// Mounts it, with what the store has.
    pub fn mount(&mut self) {
        let (base, mnt, store) = (self.base.clone(), self.mnt.clone(), self.store.clone());
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let command =
            command.arg("mount").args([&base, &mnt]).arg("--store").arg(&store).args(&self.options);
        let command = command.env("JAILFS_FAILPOINTS", &self.steps);
        checked(command.current_dir("/"), "mount");
        self.mounted = true;
        self.pid = self.daemon();
        self.watched.add(self.pid);
    }

    /// Unmounts it; nothing may be in use any more.
    pub fn umount(&mut self) {
        let output = self.try_umount();
        assert!(output.status.success(), "umount: {}", text(&output));
        self.mounted = false;
    }

    fn try_umount(&self) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.arg("umount").arg(&self.mnt).current_dir("/").output().unwrap()
    }

    /// Unmounts where the store may have failed: a daemon that reports an error is killed.
    pub fn umount_or_kill(&mut self) {
        if !self.try_umount().status.success() && living_thread(self.pid).is_some() {
            kill(self.pid(), Signal::SIGKILL).unwrap();
            self.wait_until_dead();
        }
        // A dead mount is of no use to the next one.
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

    /// Kills the daemon as a full machine would, and mounts again over the dead mount.
    pub fn kill_and_mount(&mut self) {
        kill(self.pid(), Signal::SIGKILL).unwrap();
        self.wait_until_dead();
        self.mount();
    }

    /// The daemon.
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.pid as i32)
    }

    /// Waits for the end of a daemon that was killed: the signal is on its way, and all of its threads must follow it. Then
    /// the kernel says of its mount that nobody serves it.
    pub fn wait_until_dead(&self) {
        let gone = Instant::now() + Duration::from_secs(10);
        while let Some(thread) = living_thread(self.pid) {
            if Instant::now() > gone {
                // Or whoever asks the mount waits for ever.
                let _aborted = nix::mount::umount2(&self.mnt, nix::mount::MntFlags::MNT_FORCE);
                panic!("the daemon outlives SIGKILL: {thread}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        // Who asks while the kernel lets the connection go is told so.
        let told = loop {
            match statvfs(&self.mnt).unwrap_err() {
                Errno::ECONNABORTED if Instant::now() < gone => {}
                errno => break errno,
            }
        };
        assert_eq!(told, Errno::ENOTCONN);
    }

    fn daemon(&self) -> u32 {
        let status = self.json(&["status"]);
        status[0]["pid"].as_u64().unwrap() as u32
    }

    /// Runs `jailfs -C MNT` with these words; it must succeed.
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

    /// What a command says with `--json`.
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

    /// A process that stands in a directory of the mount.
    pub fn puppet(&self, dir: &str) -> Puppet {
        let puppet = Puppet::start(&self.mnt.join(dir));
        self.watched.add(puppet.child.id());
        puppet
    }

    /// A directory outside of everything, for what a test keeps.
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
                // Its number may be another's by now.
                if begun_at(pid) == Some(begun)
                    && let Err(error) = kill(Pid::from_raw(pid as i32), Signal::SIGKILL)
                {
                    eprintln!("kill {pid}: {error}");
                }
            }
        });
    }

    /// The base must have these files as the mount shows them.
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

    /// Holds the base against what it was.
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
            // What still uses the mount is detached with it.
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

/// When a process began, in ticks since the start of the machine (proc_pid_stat(5), field 22).
fn begun_at(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name may hold spaces and brackets.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// What the kernel says of a thread of a process that has not ended.
fn living_thread(pid: u32) -> Option<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let stats =
        tasks.flatten().filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok());
    stats.into_iter().find(|stat| !stat.contains(") Z") && !stat.contains(") X"))
}

/// What a program said, for messages.
pub fn text(output: &Output) -> String {
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{}\n{out}{err}", output.status)
}

/// Runs a shell script in a directory; it must succeed.
pub fn shell(dir: &Path, script: &str) -> String {
    checked(Command::new("sh").arg("-euc").arg(script).current_dir(dir), script)
}

/// Everything that can be seen of a tree, a line for each node. With `quietly` not even its times of access are changed.
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

/// A process that does what it is told.
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

    /// Begins something; [`Puppet::answer`] says what came of it.
    pub fn begin(&mut self, code: &str) {
        let line = serde_json::to_string(code).unwrap();
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Waits for what was begun.
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

    /// Does something that must succeed; gives the value of an expression as python writes it.
    #[track_caller]
    pub fn run(&mut self, code: &str) -> String {
        self.begin(code);
        self.answer().unwrap_or_else(|error| panic!("{code}: {error}"))
    }

    /// Does something that must fail; gives the name of the errno.
    #[track_caller]
    pub fn fail(&mut self, code: &str) -> String {
        self.begin(code);
        match self.answer() {
            Ok(said) => panic!("{code} should fail, and gives {said}"),
            Err(error) => error,
        }
    }

    /// The value of an expression must be this.
    #[track_caller]
    pub fn gives(&mut self, code: &str, wanted: &str) {
        assert_eq!(self.run(code), wanted, "{code}");
    }

    /// Tells it to end, and waits until it did.
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

/// A shell that stands in a directory and runs line by line, as an agent's does.
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

    /// Runs a line; gives what it said, with its exit status at the end if that is not 0.
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
