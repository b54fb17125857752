//! The daemon of jailfs in a process of its own. It answers questions on its standard input: the
//! number of messages from the kernel, and checkpoint and restore. So the time of a checkpoint does
//! not include the start of a command.
//!
//! ```text
//! bench __serve BASE MNT STORE [writeback] [wake=HOW] [no-allow] [allow=PREFIX]...
//!   -> ready
//! counters        -> NAME=N NAME=N ...
//! checkpoint      -> the id
//! restore ID      -> restored
//! (end of input)  -> unmounts and ends
//! ```

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use jailfs::internals::fs::SnapdirView;
use jailfs::internals::fuse::{self, Counters, MountOptions, Wake};
use jailfs::internals::jail::Policy;
use jailfs::sandbox::{Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions, View};

use jailfs::types::Name;

use crate::Res;
use crate::programs;

/// The verb of the daemon.
pub const VERB: &str = "__serve";
/// The option with which no link may lead out of the mount, not even to programs.
pub const NO_ALLOW: &str = "no-allow";

/// The daemon.
pub fn main(words: &[OsString]) -> Res<()> {
    let [base, mount_point, store, options @ ..] = words else {
        return Err("no base, mount or store".into());
    };
    let (mount_point, store) = (PathBuf::from(mount_point), Path::new(store));
    let sandbox = Sandbox::create_or_open(Path::new(base), store, &StoreOptions::default())?;
    sandbox.set_view(View {
        mount_point: mount_point.clone(),
        policy: Policy::Deny,
        // A venv has a link to the interpreter, which may be outside of /usr.
        allowed_targets: options
            .iter()
            .filter_map(|o| o.as_bytes().strip_prefix(b"allow="))
            .map(<[u8]>::to_vec)
            .collect(),
        // As 'jailfs mount' does it.
        snapdir: Some(SnapdirView {
            name: Name::new(b".jailfs").map_err(|_| "no name")?,
            listed: false,
            makes: true,
        }),
    })?;
    let writeback = options.iter().any(|option| option == "writeback");
    let asked = options.iter().find_map(|option| option.to_str()?.strip_prefix("wake="));
    let wake = match asked {
        None | Some("auto") => Wake::Auto,
        Some("off") => Wake::Off,
        Some("latency") => Wake::Latency,
        Some("spin") => Wake::Spin,
        Some(other) => return Err(format!("'wake={other}' is not known").into()),
    };
    let options = MountOptions { writeback, wake, ..MountOptions::default() };
    let mounted = fuse::mount(Arc::clone(sandbox.fs()), &mount_point, store, &options)?;
    sandbox.attach(mounted.kernel());
    println!("ready");
    let counters = mounted.counters();
    for line in std::io::stdin().lock().lines() {
        println!(
            "{}",
            answer(&sandbox, &counters, &line?).unwrap_or_else(|error| format!("error {error}"))
        );
    }
    mounted.unmounter().unmount(true)?;
    mounted.wait()?;
    sandbox.detach()?;
    Ok(())
}

fn answer(sandbox: &Sandbox, counters: &Counters, line: &str) -> Res<String> {
    if line == "counters" {
        let all = counters.snapshot().into_iter().filter(|(_, count)| *count > 0);
        return Ok(all
            .map(|(name, count)| format!("{name}={count}"))
            .collect::<Vec<_>>()
            .join(" "));
    }
    let request = match line.split_once(' ') {
        None if line == "checkpoint" => Request::Checkpoint { name: None, message: String::new() },
        Some(("restore", id)) => Request::Restore {
            detach_mounts: false,
            to: Rev::parse(id),
            paths: Vec::new(),
            dry_run: false,
        },
        _ => return Err(format!("'{line}' is not known").into()),
    };
    match sandbox.handle(request)? {
        Reply::Checkpoint(made) => Ok(made.id.to_string()),
        Reply::Restored(_) => Ok("restored".to_owned()),
        _ => Err("an answer to something else".into()),
    }
}

/// The daemon, as the benchmark sees it.
pub struct Daemon {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Daemon {
    /// Starts the daemon and waits until it has mounted.
    pub fn start(
        base: &Path,
        mount_point: &Path,
        store: &Path,
        option: Option<&str>,
    ) -> Res<Daemon> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(VERB).args([base, mount_point, store]).args(option);
        if option != Some(NO_ALLOW) {
            command.args(programs::prefixes().iter().map(|prefix| format!("allow={prefix}")));
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("a daemon without output")?);
        let mut daemon = Daemon { child, input, output };
        match daemon.line()?.as_str() {
            "ready" => Ok(daemon),
            other => Err(format!("the daemon said '{other}'").into()),
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a question and returns the answer.
    pub fn ask(&mut self, question: &str) -> Res<String> {
        let input = self.input.as_mut().ok_or("the daemon has ended")?;
        input.write_all(format!("{question}\n").as_bytes())?;
        let answer = self.line()?;
        match answer.strip_prefix("error ") {
            Some(error) => Err(format!("{question}: {error}").into()),
            None => Ok(answer),
        }
    }

    fn line(&mut self) -> Res<String> {
        let mut line = String::new();
        self.output.read_line(&mut line)?;
        line.pop().map(|_| line).ok_or_else(|| "the daemon has ended".into())
    }

    /// Unmounts, and waits until the daemon has ended.
    pub fn end(mut self) -> Res<()> {
        drop(self.input.take());
        let status = self.child.wait()?;
        status
            .success()
            .then_some(())
            .ok_or_else(|| format!("the daemon ended with {status}").into())
    }
}
