//! Programs that people use: they must not notice that they work in a mount.
//!
//! Each program is a shell script with steps, run by `step.sh`: `work` makes something, `holds`
//! checks it completely, `more` changes and destroys it. [`program`] runs them. In between it
//! restores, remounts, kills the daemon and applies; then the tree is as it was, and `holds`
//! succeeds. `databases` takes checkpoints of servers at full speed. `cpython` compares the
//! outcomes of CPython's own tests with those on the disk.
//!
//! npm and pip need their registries, and a test fails if it cannot reach them.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

mod cpython;
mod databases;
#[expect(dead_code, reason = "the other tests use the rest of it")]
#[path = "../common/live.rs"]
mod harness;
mod place;
mod venv;

use harness::{assert_same, snapshot};
use place::{Place, User};

/// A program works, and goes on working across all that happens to its tree meanwhile.
fn program(name: &'static str, user: User, options: &[&'static str]) {
    let mut place = Place::new(name, user, options);
    place.step("work");
    place.step("holds");
    let worked = place.checkpoint("worked");
    place.step("more");
    place.restore("worked", &worked);
    place.step("holds");

    let kept = place.checkpoint("kept");
    place.live.remount();
    place.is("after a remount", &kept);
    place.live.kill_and_mount();
    place.is("after a kill of the daemon", &kept);
    place.step("holds");
    place.restore("worked", &worked);

    // Now the same with files of the base.
    let base = place.apply();
    place.step("moved");
    place.step("holds");
    let home = place.checkpoint("home");
    place.step("more");
    place.restore("home", &home);
    place.step("holds");
    place.restore("worked", &worked);
    assert_same(&base, &snapshot(&place.live.base, true), "the base");
}

#[test]
fn git_repositories_stay_sound() {
    program("git", User::Root, &[]);
}

#[test]
fn cargo_builds_nothing_twice() {
    program("cargo", User::Root, &[]);
}

#[test]
fn npm_installs_packages_that_run() {
    program("npm", User::Root, &[]);
}

#[test]
fn make_builds_only_changed_files() {
    program("make", User::Root, &[]);
}

#[test]
fn tar_rsync_and_cp_copy_everything_both_ways() {
    program("archives", User::Root, &[]);
}

#[test]
fn editors_save_and_find_finds_the_files() {
    program("edit", User::Root, &[]);
}

#[test]
fn a_virtual_environment_of_python_works() {
    program("venv", User::Root, &["-o", "allow-target=/usr"]);
}

#[test]
fn sqlite_loses_nothing() {
    program("sqlite", User::Root, &[]);
}

#[test]
fn postgres_loses_nothing() {
    program("postgres", User::Ordinary, &["-o", "allow_other"]);
}
