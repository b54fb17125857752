//! Asks a credential helper: `docker-credential-NAME get`.
//!
//! The helper reads the name of the server and prints one JSON object. It runs in a process group
//! of its own, which is killed when the time is over or the output too long.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde::Deserialize;

use super::super::environment::Environment;
use super::super::fault::shown;
use super::Login;
use crate::error::{Attempt, Error, Kind, Result};

/// The longest output, in bytes.
const LONGEST: u64 = 64 << 10;
/// The user name with which a helper says that the secret is a token.
const TOKEN_USER: &str = "<token>";

/// The output of a helper.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Output {
    username: String,
    secret: String,
}

/// A helper that runs. It is killed when it is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.0.id()) {
            // It fails if the whole group has ended.
            if killpg(Pid::from_raw(pid), Signal::SIGKILL).is_err() {
                log::debug!("the credential helper {pid} has ended");
            }
        }
        drop(self.0.wait());
    }
}

/// The login that a helper keeps for a server, if there is one.
///
/// # Errors
/// The helper is missing, fails, does not end in time, or prints something else.
pub(super) fn ask(
    name: &str,
    server: &str,
    environment: &Environment,
    limit: Duration,
) -> Result<Option<Login>> {
    let is_name =
        !name.is_empty() && name.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c));
    if !is_name {
        let reason = format!("'{}' is no name of a credential helper", shown(name));
        return Err(Error::new(Kind::Failed, "find the login", reason));
    }
    let program = format!("docker-credential-{name}");
    let attempt = || format!("ask {program} for the login of {server}");
    let failed = |reason: String| Error::new(Kind::Failed, attempt(), reason);
    let (status, output) = run(&program, server, environment, limit).map_err(failed)?;
    if output.len() as u64 > LONGEST {
        return Err(failed("it prints more than 64 KiB".into()));
    }
    if !status.success() {
        let text = output.utf8_chunks().map(|chunk| chunk.valid()).collect::<String>();
        // The fixed text of the protocol for an unknown server.
        if text.contains("credentials not found") {
            return Ok(None);
        }
        return Err(failed(format!("{status}: {}", shown(text.trim()))));
    }
    // The error of the parser can quote the secret.
    let found: Output =
        serde_json::from_slice(&output).map_err(|_| failed("it prints no login in JSON".into()))?;
    Ok(Some(match found.username.as_str() {
        TOKEN_USER => Login::Identity(found.secret),
        _ => Login::Password(found.username, found.secret),
    }))
}

fn run(
    program: &str,
    server: &str,
    environment: &Environment,
    limit: Duration,
) -> std::result::Result<(ExitStatus, Vec<u8>), String> {
    let end = Instant::now() + limit;
    let late = || format!("it does not answer within {} ms", limit.as_millis());
    let child = Command::new(program)
        .arg("get")
        .env_clear()
        .envs(environment.all())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .attempt(String::new)
        .map_err(|error| error.reason)?;
    let mut running = Running(child);
    let (input, output) = (running.0.stdin.take(), running.0.stdout.take());
    let (sender, receiver) = mpsc::channel();
    let line = format!("{server}\n");
    // The thread ends with the helper at the latest, because the helper is killed.
    std::thread::spawn(move || {
        let written = input.map(|mut input| input.write_all(line.as_bytes()));
        // A helper that needs no input may have ended already.
        drop(written);
        let mut bytes = Vec::new();
        let read = output.map(|output| output.take(LONGEST + 1).read_to_end(&mut bytes));
        // The receiver is gone when the time was over.
        drop(sender.send(read.transpose().map(|_| bytes)));
    });
    let bytes = receiver.recv_timeout(limit).map_err(|_| late())?;
    let bytes = bytes.attempt(String::new).map_err(|error| error.reason)?;
    if bytes.len() as u64 > LONGEST {
        return Ok((ExitStatus::default(), bytes));
    }
    while Instant::now() < end {
        let ended = running.0.try_wait().attempt(String::new).map_err(|error| error.reason)?;
        if let Some(status) = ended {
            return Ok((status, bytes));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err(late())
}
