//! pjdfstest: POSIX tests of every system call that takes a name, for several users.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use crate::harness::{Live, shell};
use crate::tool;

/// The features to test: all that Linux has, so the same as for ext4.
///
/// The users exist on every Debian. `allow_remount` would make mount(8) change the mount under the
/// other tests.
const CONFIGURATION: &str = r#"
    [features]
    posix_fallocate = {}
    rename_ctime = {}
    stat_st_birthtime = {}
    utime_now = {}
    utimensat = {}
    [settings]
    naptime = 0.01
    allow_remount = false
    [dummy_auth]
    entries = [["nobody", "nogroup"], ["games", "games"]]
"#;

/// The tests that jailfs fails, each with the reason.
const GAPS: &str = include_str!("pjdfstest.gaps");

/// pathconf(3) knows the limits of filesystems by their type. For FUSE, and all types that it does
/// not know, it returns 127, and the test of the limit would be skipped. This returns the number
/// that docs/SEMANTICS.md states.
const PATHCONF: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <unistd.h>
    long pathconf(const char *path, int name) {
        long (*real)(const char *, int) = dlsym(RTLD_NEXT, "pathconf");
        return name == _PC_LINK_MAX ? 65000 : real(path, name);
    }
"#;

/// The outcome of each test of a run.
struct Outcome {
    passed: Vec<String>,
    failed: Vec<String>,
    /// With the reason.
    skipped: BTreeMap<String, String>,
    log: String,
}

fn pjdfstest(dir: &Path, work: &Path, preload: &Path) -> Outcome {
    std::fs::write(work.join("pjdfstest.toml"), CONFIGURATION).unwrap();
    let mut command = Command::new(tool("pjdfstest"));
    command.arg("-c").arg(work.join("pjdfstest.toml")).arg("-p").arg(dir).arg("-s").arg("/dev/shm");
    let output = command.env("LD_PRELOAD", preload).env("NO_COLOR", "1").output().unwrap();
    let log = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut outcome = Outcome { passed: vec![], failed: vec![], skipped: BTreeMap::new(), log };
    let mut lines = outcome.log.lines().peekable();
    while let Some(line) = lines.next() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [test, "ok"] if test.contains("::") => outcome.passed.push(test.to_owned()),
            [test, "FAILED"] => outcome.failed.push(test.to_owned()),
            [test, "skipped"] => {
                let reason = lines.peek().unwrap_or(&"").trim().to_owned();
                outcome.skipped.insert(test.to_owned(), reason);
            }
            _ => {}
        }
    }
    outcome
}

#[test]
fn pjdfstest_passes_all_tests_that_ext4_passes() {
    let live = Live::with_options("chmod 777 .", &["-o", "allow_other,suid,dev"]);
    let work = live.outside();
    std::fs::write(work.join("pathconf.c"), PATHCONF).unwrap();
    shell(work, "cc -shared -fPIC -o pathconf.so pathconf.c");

    let outcome = pjdfstest(&live.mnt, work, &work.join("pathconf.so"));

    let gaps = GAPS.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    let gaps: Vec<&str> = gaps.map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(outcome.failed, gaps, "{}", outcome.log);
    let remount = "Remounts (allow_remount) are not allowed in the configuration file";
    let skipped: Vec<_> = outcome.skipped.iter().filter(|(_, reason)| *reason != remount).collect();
    assert!(skipped.is_empty(), "{skipped:?}");
    eprintln!("pjdfstest: {} passed, {} failed", outcome.passed.len(), outcome.failed.len());
    // This many run on ext4 with this configuration.
    assert_eq!(outcome.passed.len() + gaps.len(), 385, "{}", outcome.log);
}
