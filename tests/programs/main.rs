//! Programs that people use, with all that they do to files in the mount: they must not notice it.
//!
//! Each program is a shell script with steps, run by `step.sh`: `work` makes something, `holds` says whether all of it is as
//! it should be, `more` changes and destroys it. [`program`] runs them and does in between what jailfs is for: after a
//! restore, a remount, a kill of the daemon and an apply the tree is what it was, and `holds` still holds. `databases` takes
//! checkpoints of servers at full speed; `cpython` compares what CPython's own tests say here and on the disk.
//!
//! npm and pip need their registries, and a test fails if they cannot be reached.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    reason = "a failure is what a test is for"
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

/// A program works, and goes on working whatever becomes of its tree meanwhile.
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

    // Now the same on files that are the base's.
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
fn git_repositories_stay_whole() {
    program("git", User::Root, &[]);
}

#[test]
fn cargo_builds_and_nothing_is_built_twice() {
    program("cargo", User::Root, &[]);
}

#[test]
fn npm_installs_and_what_it_installed_runs() {
    program("npm", User::Root, &[]);
}

#[test]
fn make_builds_only_what_changed() {
    program("make", User::Root, &[]);
}

#[test]
fn tar_rsync_and_cp_carry_everything_both_ways() {
    program("archives", User::Root, &[]);
}

#[test]
fn editors_save_and_find_sees_it() {
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
    program("postgres", User::Nobody, &["-o", "allow_other"]);
}
