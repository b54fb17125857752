//! The same virtual environment under `jailfs run`, where no option is needed: the sandbox is itself the wall.

use std::process::{Command, Stdio};

use crate::harness::{assert_same, snapshot};
use crate::place::{MOUNTS, environment, prepare, succeed, words};

#[test]
fn a_virtual_environment_needs_no_option_under_run() {
    let _alone = MOUNTS.write();
    let dir = tempfile::tempdir().unwrap();
    let dir = jailfs::internals::sys::path::resolve(dir.path()).unwrap();
    let (base, store) = (dir.join("base"), dir.join("store"));
    std::fs::create_dir(&base).unwrap();
    // In the base, because a command in the sandbox need not see what is beside it.
    prepare(&base);
    let before = snapshot(&base, true);
    let jailfs = |verb: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["-k", "1", "200", env!("CARGO_BIN_EXE_jailfs"), "-C"]).arg(&base);
        command.arg("--store").arg(&store).args(verb).stdin(Stdio::null());
        environment(&mut command, &base);
        command
    };
    let run = |end: &str, step: &str| {
        let mut command = jailfs(&["run", end, "--", "bash"]);
        succeed(command.args(words(&base, "venv", step)), step);
    };
    run("--keep", "work");
    run("--keep", "holds");
    run("--discard", "more");
    run("--keep", "holds");
    assert_same(&before, &snapshot(&base, true), "the base before an apply");
    succeed(&mut jailfs(&["apply"]), "apply");
    // It was made for this place, and works here without a sandbox.
    let mut command = Command::new("bash");
    command.args(words(&base, "venv", "holds")).current_dir(&base).stdin(Stdio::null());
    environment(&mut command, &base);
    succeed(&mut command, "in the base");
}
