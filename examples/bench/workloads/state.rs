//! Checkpoints, restores and mounts of growing trees. Other systems have no checkpoints; they run
//! the steps that they can (mount, look).

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;

use crate::Res;
use crate::material::Materials;
use crate::programs::{self, program};
use crate::runner::Run;
use crate::workloads::Workload;

/// Files in one directory.
const PER_DIR: u64 = 100;
/// Missing names that are looked up.
const MISSING: u64 = 1_000;

pub fn all() -> Vec<Workload> {
    let state = |name, about, base, run| Workload::new("state", name, about, base, run);
    vec![
        state("changed-10", "checkpoint and restore, few files changed", Materials::empty, |run| {
            changed(run, 0)
        })
        .jailfs_only(),
        state("changed-many", "the same with many", Materials::empty, |run| changed(run, 1))
            .jailfs_only(),
        state("changed-most", "the same with very many", Materials::empty, |run| changed(run, 2))
            .jailfs_only(),
        state(
            "open-database",
            "checkpoint and restore, a large database open",
            Materials::database,
            open_database,
        )
        .needs(&["sqlite"])
        .jailfs_only(),
        state("deep", "names that are not there, below many checkpoints", Materials::empty, deep)
            .jailfs_only(),
        state(
            "mount-base",
            "mount of a base of many files, and a find",
            Materials::many_files,
            mount_base,
        ),
        state("mount-store", "mount of what was changed", Materials::empty, mount_store).mutates(),
        state(
            "memory",
            "bytes of the daemon for a file that changed, or that the kernel holds",
            Materials::empty,
            memory,
        )
        .jailfs_only(),
    ]
}

/// Writes files of 100 bytes.
fn write_files(root: &Path, files: u64, byte: u8) -> Res<()> {
    for at in 0..files {
        let dir = root.join(format!("d{}", at / PER_DIR));
        if at % PER_DIR == 0 && !dir.exists() {
            std::fs::create_dir(&dir)?;
        }
        let path = dir.join(format!("f{at}"));
        let file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)?;
        file.write_all_at(&[byte; 100], 0)?;
    }
    Ok(())
}

/// A checkpoint of so many new files, and a restore after all were written again. The kernel holds
/// every name.
fn changed(run: &mut Run, which: usize) -> Res<()> {
    let files = run.size.changed.get(which).copied().unwrap_or_default();
    let root = run.root();
    run.timed("write", files, |_| write_files(&root, files, 1))?;
    let mut id = String::new();
    // The new files are in the page cache only; the second time they are on disk.
    run.timed("checkpoint-dirty", files, |run| {
        id = run.ask("checkpoint")?;
        Ok(())
    })?;
    run.timed("write-again", files, |_| write_files(&root, files, 2))?;
    run.timed("fsync", files, |_| Ok(std::fs::File::open(root.join("d0/f0"))?.sync_all()?))?;
    run.timed("checkpoint", files, |run| run.ask("checkpoint").map(drop))?;
    // The same as a command, with the start of its process.
    let mut make = program("mkdir", &[".jailfs/checkpoints/by-command"], &root);
    run.command("checkpoint-command", files, &mut make)?;
    run.timed("restore", files, |run| run.ask(&format!("restore {id}")).map(drop))?;
    let seen = std::fs::read(root.join("d0/f0"))?;
    if seen != [1; 100] {
        return Err("the restore has not restored".into());
    }
    run.timed("restore-nothing", files, |run| run.ask(&format!("restore {id}")).map(drop))
}

fn open_database(run: &mut Run) -> Res<()> {
    let script = "import sqlite3, sys\n\
        db = sqlite3.connect('db', isolation_level=None)\n\
        db.execute('pragma synchronous=normal')\n\
        for step in range(2):\n    db.execute('begin')\n    for i in range(0, 1000): \
        db.execute('update t set body=randomblob(4000) where id=?', (i,))\n    \
        db.execute('commit')\n    print('written', flush=True)\n    sys.stdin.readline()\n";
    let mut command = program("python3", &["-c", script], &run.root());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let mut input = child.stdin.take().ok_or("no input")?;
    let mut output = BufReader::new(child.stdout.take().ok_or("no output")?);
    let mut wait = || output.read_line(&mut String::new());
    wait()?;
    let database = run.root().join("db");
    run.timed("fsync", 1, |_| Ok(std::fs::File::open(database)?.sync_all()?))?;
    let mut id = String::new();
    run.timed("checkpoint", 1, |run| {
        id = run.ask("checkpoint")?;
        Ok(())
    })?;
    input.write_all(b"go on\n")?;
    wait()?;
    run.timed("restore", 1, |run| run.ask(&format!("restore {id}")).map(drop))?;
    input.write_all(b"end\n")?;
    drop(input);
    child.wait()?;
    Ok(())
}

/// Looks up missing names, each once only, because the kernel caches the answer.
fn look_for_missing(dir: &Path, prefix: &str) {
    for at in 0..MISSING {
        // The name is missing on purpose.
        drop(std::fs::symlink_metadata(dir.join(format!("{prefix}{at}"))));
    }
}

fn deep(run: &mut Run) -> Res<()> {
    let (root, checkpoints) = (run.root(), run.size.checkpoints);
    std::fs::create_dir(root.join("dir"))?;
    run.timed("missing-names-shallow", MISSING, |_| {
        look_for_missing(&root.join("dir"), "a");
        Ok(())
    })?;
    run.timed("checkpoints", checkpoints, |run| {
        for at in 0..checkpoints {
            std::fs::write(root.join(format!("dir/f{}", at % 100)), at.to_string())?;
            run.ask("checkpoint")?;
        }
        Ok(())
    })?;
    run.timed("missing-names-deep", MISSING, |_| {
        look_for_missing(&root.join("dir"), "b");
        Ok(())
    })?;
    run.unmount()?;
    run.timed("mount-deep", 1, Run::mount)?;
    run.timed("missing-names-deep-fresh", MISSING, |_| {
        look_for_missing(&root.join("dir"), "c");
        Ok(())
    })
}

fn mount_base(run: &mut Run) -> Res<()> {
    let find = |dir: &Path| program("find", &[".", "-size", "+1k"], dir);
    programs::run(&mut find(&run.base))?;
    run.unmount()?;
    run.timed("mount", 1, Run::mount)?;
    let (root, many) = (run.root(), run.size.many);
    let before = run.usage()?;
    run.command("find-stat", many, &mut find(&root))?;
    if let (Some(before), Some(after)) = (before, run.usage()?) {
        run.bytes(
            "memory-per-cached-file",
            many,
            (after.rss as f64 - before.rss as f64) / many as f64,
        );
    }
    Ok(())
}

fn mount_store(run: &mut Run) -> Res<()> {
    let (root, files) = (run.root(), run.size.stored);
    let empty = run.usage()?;
    run.timed("write", files, |_| write_files(&root, files, 3))?;
    run.unmount()?;
    run.timed("mount", files, Run::mount)?;
    if let (Some(empty), Some(usage)) = (empty, run.usage()?) {
        run.bytes(
            "memory-per-changed-file",
            files,
            (usage.rss as f64 - empty.rss as f64) / files as f64,
        );
    }
    if run.system.is_jailfs() {
        run.ask("checkpoint")?;
        run.unmount()?;
        run.timed("mount-sealed", files, Run::mount)?;
    }
    let root = run.root();
    run.command("find-stat", files, &mut program("find", &[".", "-size", "+1k"], &root))
}

fn memory(run: &mut Run) -> Res<()> {
    let (root, files) = (run.root(), run.size.stored);
    let rss = |run: &Run| {
        Ok::<f64, Box<dyn std::error::Error>>(run.usage()?.unwrap_or_default().rss as f64)
    };
    let begin = Instant::now();
    let at_first = rss(run)?;
    write_files(&root, files, 4)?;
    let written = rss(run)?;
    let mut checkpoints = Vec::new();
    for byte in 5..8 {
        run.ask("checkpoint")?;
        // A tenth changes between two checkpoints.
        write_files(&root, files / 10, byte)?;
        checkpoints.push(rss(run)?);
    }
    run.bytes("changed-and-cached", files, (written - at_first) / files as f64);
    let grown = checkpoints.last().copied().unwrap_or(written) - written;
    run.bytes("per-file-of-a-checkpoint", files, grown / (3 * (files / 10)) as f64);
    run.step("all", files, |_| Ok(begin.elapsed()))
}
