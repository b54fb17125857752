//! The usual work of agents: clone, build, install.

use crate::Res;
use crate::material::{CHANGED_ONE_OF, Materials, OTHER_BRANCH};
use crate::programs::{self, program};
use crate::runner::Run;
use crate::workloads::Workload;

pub fn all() -> Vec<Workload> {
    vec![
        Workload::new("build", "git-clone", "git clone --local", Materials::repository, clone)
            .needs(&["git"])
            .mutates(),
        Workload::new(
            "build",
            "git-checkout",
            "git checkout of a branch in which one file of six differs",
            Materials::repository,
            checkout,
        )
        .needs(&["git"])
        .mutates(),
        Workload::new(
            "build",
            "cargo",
            "cargo build, and again after a change",
            Materials::cargo_crate,
            cargo,
        )
        .needs(&["cargo"])
        .mutates(),
        Workload::new(
            "build",
            "venv",
            "python3 -m venv, which installs pip",
            Materials::empty,
            venv,
        )
        .needs(&["venv"])
        .mutates(),
        Workload::new(
            "build",
            "venv-copies",
            "python3 -m venv --copies: no link leads to the interpreter",
            Materials::empty,
            venv_copies,
        )
        .needs(&["venv"])
        .mutates(),
        Workload::new(
            "build",
            "npm",
            "npm install of local archives, offline",
            Materials::node_app,
            npm,
        )
        .needs(&["npm"])
        .mutates(),
    ]
}

fn clone(run: &mut Run) -> Res<()> {
    let (root, files) = (run.root(), run.size.files);
    run.command(
        "clone",
        files,
        &mut program("git", &["clone", "-q", "--local", "tree", "clone"], &root),
    )
}

fn checkout(run: &mut Run) -> Res<()> {
    let (tree, files) = (run.root().join("tree"), run.size.files.div_ceil(CHANGED_ONE_OF));
    // Else git would compare the content of each file of a copied tree.
    programs::run(&mut program("git", &["update-index", "-q", "--refresh"], &tree))?;
    run.command("checkout", files, &mut program("git", &["checkout", "-q", OTHER_BRANCH], &tree))
}

fn cargo(run: &mut Run) -> Res<()> {
    let dir = run.root().join("crate");
    let build = || program("cargo", &["build", "-q", "--offline"], &dir);
    run.command("build", 1, &mut build())?;
    let module = dir.join("src/m0.rs");
    let text = std::fs::read_to_string(&module)?;
    std::fs::write(&module, text + "pub fn another() {}\n")?;
    run.command("rebuild", 1, &mut build())?;
    run.command("nothing-to-do", 1, &mut build())
}

fn venv(run: &mut Run) -> Res<()> {
    let root = run.root();
    run.command("create", 1, &mut program("python3", &["-m", "venv", "venv"], &root))
}

fn venv_copies(run: &mut Run) -> Res<()> {
    let root = run.root();
    run.command("create", 1, &mut program("python3", &["-m", "venv", "--copies", "venv"], &root))
}

fn npm(run: &mut Run) -> Res<()> {
    let dir = run.root().join("app");
    let cache = run.place.join("npm-cache");
    let mut npm =
        program("npm", &["install", "--offline", "--no-audit", "--no-fund", "--cache"], &dir);
    let packages = run.size.packages;
    run.command("install", packages, npm.arg(cache).env("HOME", &run.place))
}
