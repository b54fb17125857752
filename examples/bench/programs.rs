//! Runs the real programs.

use std::ffi::OsStr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::Res;

/// A program in a directory, with an environment without the caller's settings.
pub fn program(name: impl AsRef<OsStr>, args: &[&str], dir: &Path) -> Command {
    let mut command = Command::new(name);
    command.args(args).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null());
    command.env("LC_ALL", "C").env("GIT_OPTIONAL_LOCKS", "0");
    for (key, value) in [
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_CONFIG_SYSTEM", "/dev/null"),
        ("GIT_AUTHOR_NAME", "bench"),
        ("GIT_AUTHOR_EMAIL", "bench@localhost"),
        ("GIT_COMMITTER_NAME", "bench"),
        ("GIT_COMMITTER_EMAIL", "bench@localhost"),
    ] {
        command.env(key, value);
    }
    for key in [
        "CARGO_TARGET_DIR",
        "RUSTFLAGS",
        "CARGO_BUILD_JOBS",
        "CARGO_ENCODED_RUSTFLAGS",
        "PIP_REQUIRE_VIRTUALENV",
    ] {
        command.env_remove(key);
    }
    command
}

/// Runs a program to its end. Its exit code must be one of `fine`.
pub fn run_to(command: &mut Command, fine: &[i32]) -> Res<Duration> {
    let said = command.stderr(Stdio::piped());
    let begin = Instant::now();
    let output = said
        .spawn()
        .map_err(|error| format!("{:?}: {error}", said.get_program()))?
        .wait_with_output()?;
    let taken = begin.elapsed();
    if output.status.code().is_some_and(|code| fine.contains(&code)) {
        return Ok(taken);
    }
    let errors = output.stderr.escape_ascii().to_string();
    let last: String =
        errors.chars().rev().take(300).collect::<Vec<_>>().into_iter().rev().collect();
    Err(format!("{:?} ended with {}: {last}", command.get_program(), output.status).into())
}

/// Runs programs side by side, which must all succeed.
pub fn run_all(commands: &mut [Command]) -> Res<()> {
    let started: Vec<_> = commands.iter_mut().map(Command::spawn).collect();
    let ended: Vec<_> =
        started.into_iter().map(|child| child.and_then(|mut child| child.wait())).collect();
    ended.into_iter().try_for_each(|status| match status? {
        status if status.success() => Ok(()),
        status => Err(format!("a program ended with {status}").into()),
    })
}

/// Runs a program that must succeed.
pub fn run(command: &mut Command) -> Res<Duration> {
    run_to(command, &[0])
}

/// Runs a Python script that prints the seconds that its work took.
pub fn python(script: &str, args: &[&str], dir: &Path) -> Res<Duration> {
    let mut command = program("python3", &["-c", script], dir);
    let output = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).output()?;
    if !output.status.success() {
        return Err(format!("python3: {}", output.stderr.escape_ascii()).into());
    }
    let text = String::from_utf8(output.stdout)?;
    Ok(Duration::from_secs_f64(text.trim().parse()?))
}

/// The reason why a program is missing, if it is.
pub fn missing(name: &str) -> Option<String> {
    let (name, check): (&str, &[&str]) = match name {
        "sqlite" => ("python3", &["-c", "import sqlite3"]),
        "venv" => ("python3", &["-c", "import venv, ensurepip"]),
        other => (other, &["--version"]),
    };
    let output =
        Command::new(name).args(check).stdout(Stdio::null()).stderr(Stdio::null()).status();
    match output {
        Ok(status) if status.success() => None,
        Ok(_) => Some(format!("'{name} {}' fails", check.join(" "))),
        Err(error) => Some(format!("{name}: {error}")),
    }
}

/// The directories of programs that links in the mount may lead to: `/usr`, and that of the Python
/// interpreter if it is elsewhere.
pub fn prefixes() -> &'static [String] {
    static PREFIXES: OnceLock<Vec<String>> = OnceLock::new();
    PREFIXES.get_or_init(|| {
        let script = "import os, sys; print(os.path.realpath(sys.base_prefix))";
        let python = Command::new("python3").args(["-c", script]).output().ok();
        let python =
            python.and_then(|output| String::from_utf8(output.stdout).ok()).unwrap_or_default();
        let python = Some(python.trim().to_owned())
            .filter(|prefix| prefix.len() > 1 && !prefix.starts_with("/usr"));
        std::iter::once("/usr".to_owned()).chain(python).collect()
    })
}
