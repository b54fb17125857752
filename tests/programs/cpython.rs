//! CPython's own tests of file operations, in the mount and on the disk: each has the same outcome
//! in both.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::place::{Place, User, environment, succeed};

/// The modules of Debian's package libpython3.11-testsuite.
const MODULES: &[&str] = &[
    "test_os",
    "test_posix",
    "test_shutil",
    "test_tempfile",
    "test_mmap",
    "test_pathlib",
    "test_zipfile",
    "test_dbm",
    "test_fcntl",
    "test_file",
    "test_filecmp",
    "test_fileio",
    "test_genericpath",
    "test_glob",
    "test_mailbox",
    "test_posixpath",
    "test_shelve",
    "test_stat",
    "test_tarfile",
];

/// The outcome of each test, with all its files in `place`.
fn outcomes(place: &Path, user: User, outside: &Path, name: &str) -> BTreeMap<String, String> {
    std::fs::create_dir(place).unwrap();
    user.owns(place);
    let said = outside.join("out").join(name);
    let mut command = user.command("timeout");
    command.args(["-k", "1", "200", "/usr/bin/python3", "-B", "-s"]);
    command.arg(outside.join("programs/cpython.py")).arg(&said).args(MODULES);
    environment(&mut command, outside);
    command.env("TMPDIR", place).env("HOME", place).env("LC_ALL", "C.UTF-8").current_dir(place);
    command.stdin(std::process::Stdio::null());
    succeed(&mut command, "CPython's tests");
    let text = std::fs::read_to_string(&said).unwrap();
    let lines = text.lines().filter_map(|line| line.split_once('\t'));
    // File names in an outcome contain the pid.
    let plain = |text: &str| text.chars().filter(|c| !c.is_ascii_digit()).collect();
    lines.map(|(test, outcome)| (test.to_owned(), plain(outcome))).collect()
}

/// The tests with different outcomes: name, outcome on the disk, outcome in the mount.
fn differences(user: User, options: &[&'static str]) -> Vec<String> {
    let place = Place::new("cpython", user, options);
    let outside = place.live.outside();
    std::fs::set_permissions(&place.live.mnt, PermissionsExt::from_mode(0o755)).unwrap();
    let disk = outcomes(&outside.join("disk"), user, outside, "on-disk");
    let mount = outcomes(&place.live.mnt.join("place"), user, outside, "in-mount");
    let passed = disk.values().filter(|outcome| *outcome == "passed").count();
    assert!(
        passed > 1500 && disk.len() == mount.len(),
        "{passed} of {} and {}",
        disk.len(),
        mount.len()
    );
    let differ = disk.iter().filter(|(test, outcome)| mount.get(*test) != Some(*outcome));
    differ.map(|(test, outcome)| format!("{test}: {outcome:?}, {:?}", mount.get(test))).collect()
}

#[test]
fn cpython_tests_have_the_same_outcome_as_on_the_disk() {
    assert_eq!(differences(User::Root, &["-o", "allow-target=/usr"]), [""; 0]);
}

#[test]
fn cpython_tests_have_the_same_outcome_for_an_ordinary_user() {
    assert_eq!(differences(User::Ordinary, &["-o", "allow_other,allow-target=/usr"]), [""; 0]);
}
