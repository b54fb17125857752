//! Looking at a tree: for the first time after the mount, and again. The base is in the memory of the host each time.

use crate::Res;
use crate::material::Materials;
use crate::programs::{self, program};
use crate::runner::Run;
use crate::workloads::Workload;

/// What no file has in it: the search goes through to the end.
const NOWHERE: &str = "qqqqqqqqqq";

pub fn all() -> Vec<Workload> {
    let new = |name, about, run| {
        Workload::new("meta", name, about, Materials::repository as fn(&Materials) -> _, run).needs(&["git"])
    };
    vec![
        new("find", "find -type f: names only", find),
        new("find-stat", "find -size: each file is looked at", find_stat),
        new("git-status", "git status", git_status),
        new("ls", "ls -lR", ls),
        new("du", "du -s", du),
        new("grep", "grep -r for what is nowhere", grep),
        new("ripgrep", "rg for what is nowhere", ripgrep).needs(&["git", "rg"]),
    ]
}

/// The same program twice; before, in the base itself, so that the host has all in memory.
fn twice(run: &mut Run, name: &str, args: &[&str]) -> Res<()> {
    let tree = run.root().join("tree");
    programs::run_to(&mut program(name, args, &run.base.join("tree")), &[0, 1])?;
    let files = run.size.files;
    run.search("fresh", files, &mut program(name, args, &tree))?;
    run.search("warm", files, &mut program(name, args, &tree))
}

fn find(run: &mut Run) -> Res<()> {
    twice(run, "find", &[".", "-type", "f"])
}

fn find_stat(run: &mut Run) -> Res<()> {
    twice(run, "find", &[".", "-size", "+1000000k"])
}

fn git_status(run: &mut Run) -> Res<()> {
    twice(run, "git", &["status", "--porcelain"])
}

fn ls(run: &mut Run) -> Res<()> {
    twice(run, "ls", &["-lR"])
}

fn du(run: &mut Run) -> Res<()> {
    twice(run, "du", &["-s"])
}

fn grep(run: &mut Run) -> Res<()> {
    twice(run, "grep", &["-r", "--exclude-dir=.git", NOWHERE, "."])
}

fn ripgrep(run: &mut Run) -> Res<()> {
    twice(run, "rg", &["--no-config", "--no-ignore", NOWHERE, "."])
}
