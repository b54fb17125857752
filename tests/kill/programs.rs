//! git and sqlite as writers: the commits and transactions that they reported exist, and their own
//! checks find no fault.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::span::Op;
use crate::writer::{Control, Writer, stamp};

/// Writes and reads a table.
pub const SQLITE: &str = include_str!("sqlite.py");

/// A repository without background work.
pub const REPOSITORY: &str = "
    git init -q; git config user.name k; git config user.email k@k; git config gc.auto 0
    git config commit.gpgsign false
    seq 50 > f0; git add -A; git commit -qm first
";

/// Makes commits in a loop.
pub fn commit(writer: &Writer, repo: &Path, control: &Control) {
    while !control.is_over() {
        let stamp = stamp();
        writer.begin(Op::Line(stamp.to_string()));
        let file = stamp % 7;
        let pack = if stamp.is_multiple_of(5) { "git repack -adq; " } else { "" };
        // A git that reads a directory of a dead mount may report errors for ever. It ends when
        // nothing reads its output.
        let quietly = "exec 2> >(head -c 65536 >&2)";
        let script =
            format!("{quietly}; {pack}echo {stamp} >> f{file}; git add -A; git commit -qm {stamp}");
        match Command::new("bash").args(["-ec", &script]).current_dir(repo).output() {
            Ok(output) if output.status.success() => writer.acknowledge(),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                return control.failed(format!("{}: commit {stamp}: {said}", writer.name));
            }
            Err(error) => {
                return control.failed(format!("{}: commit {stamp}: {error}", writer.name));
            }
        }
    }
}

/// The commits of a repository that is sound. Removes the lock files of a git that was killed.
pub fn read_commits(repo: &Path) -> Result<Vec<String>, String> {
    const SCRIPT: &str = "
        find .git -name '*.lock' -delete
        git fsck --strict >&2
        git status --porcelain > /dev/null
        git log --reverse --format=%s
    ";
    let output = Command::new("sh").args(["-ec", SCRIPT]).current_dir(repo).output();
    let output = output.map_err(|error| format!("go into the repository: {error}"))?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(said(&output.stdout).lines().map(str::to_owned).collect()),
        false => Err(format!("git: {}{}", said(&output.stdout), said(&output.stderr))),
    }
}

/// Commits transactions in a loop.
pub fn transact(writer: &Writer, dir: &Path, (mode, synchronous): (&str, &str), control: &Control) {
    let number = |line: &String| line.split_once('-').unwrap().0.to_owned();
    let (count, stamp) = (writer.lines().last().map_or_else(|| "0".to_owned(), number), stamp());
    let mut command = Command::new("python3");
    command.args(["-I", "-S", "-u", "-c", SQLITE, "write", mode, synchronous]);
    command.args([count, stamp.to_string()]).current_dir("/").arg(dir.join("db"));
    let started =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.unwrap();
    let (mut stdin, stdout) = (child.stdin.take(), child.stdout.take().unwrap());
    for line in BufReader::new(stdout).lines() {
        match line.unwrap().split_once(' ') {
            // At the end of its input, the program ends.
            Some(("begin", _)) if control.is_over() => stdin = None,
            Some(("begin", row)) => {
                writer.begin(Op::Line(row.to_owned()));
                // If it is gone, it says why below.
                drop(stdin.as_mut().map(|stdin| stdin.write_all(b"\n")));
            }
            Some(("done", _)) => writer.acknowledge(),
            other => panic!("{other:?}"),
        }
    }
    drop(stdin);
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    let status = child.wait().unwrap();
    if !status.success() {
        control.failed(format!("{}: {status}: {said}", writer.name));
    }
}

/// The rows of a table in a database that is sound.
pub fn read_table(dir: &Path) -> Result<Vec<String>, String> {
    let mut command = Command::new("python3");
    command.args(["-I", "-S", "-c", SQLITE, "read"]).arg(dir.join("db")).current_dir("/");
    let output = command.output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()),
        false => Err(format!("sqlite: {}", String::from_utf8_lossy(&output.stderr))),
    }
}
