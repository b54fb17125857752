//! An export imports to the same state.

use super::harness::{Live, assert_same};
use super::{BASE, CHANGES, outside, run, tree};

fn sha(file: &str) -> String {
    run(&["sha256sum", file]).split(' ').next().unwrap().to_owned()
}

#[test]
fn an_export_imports_to_an_equal_state_with_the_same_bytes() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    live.sh("setfattr -n user.b=c%d -v '' dir/sub/two");
    live.checkpoint("wanted");
    let (file, again) = (outside(&live, "a.tar"), outside(&live, "b.tar"));
    live.jailfs(&["export", "wanted", "--tar", &file]);
    let wanted = tree(&live.mnt);
    // An equal tree is kept as it is, with all its inode numbers and times.
    let snapshot = live.snapshot();
    live.jailfs(&["import", &file]);
    let same = live.snapshot();
    let lines = |all: &[String]| -> Vec<String> {
        let is_linked = |line: &str| line.contains("nlink=2") || line.contains("nlink=3");
        let is_kept = |line: &&String| !is_linked(line) && !line.starts_with("one file");
        all.iter().filter(is_kept).cloned().collect()
    };
    assert_same(&lines(&snapshot), &lines(&same), "the tree after an import of itself");
    assert_same(&wanted, &tree(&live.mnt), "the import of the present tree");
    live.sh("rm -rf dir big d*; echo other > long; mkdir -p gone/new; rm holes; mkdir holes");
    let changed = live.snapshot();
    let said = live.jailfs(&["import", &file]);
    assert_same(&wanted, &tree(&live.mnt), "the import");
    live.jailfs(&["export", "@", "--tar", &again]);
    assert_eq!(sha(&file), sha(&again));
    let undo = said.lines().find_map(|line| line.strip_prefix("undo: jailfs ")).unwrap();
    live.jailfs(&undo.split(' ').collect::<Vec<_>>());
    assert_same(&changed, &live.snapshot(), "the tree after the undo");
}

#[test]
fn an_import_survives_a_kill_of_the_daemon_and_passes_the_check() {
    let mut live = Live::new(BASE);
    let file = outside(&live, "a.tar");
    live.sh(CHANGES);
    live.jailfs(&["export", "@", "--tar", &file]);
    let wanted = tree(&live.mnt);
    live.sh("rm -rf dir; echo x > big");
    live.jailfs(&["import", &file]);
    let log = live.jailfs(&["op", "log"]);
    assert!(log.contains("import"), "{log}");
    live.kill_and_mount();
    assert_same(&wanted, &tree(&live.mnt), "the import after a kill");
    live.jailfs(&["check", "--read-data"]);
    live.jailfs(&["gc"]);
    assert_same(&wanted, &tree(&live.mnt), "the import after gc");
}

#[test]
fn an_import_goes_to_another_head_or_a_new_one() {
    let live = Live::new(BASE);
    let (file, again) = (outside(&live, "a.tar"), outside(&live, "b.tar"));
    live.sh(CHANGES);
    live.jailfs(&["export", "@", "--tar", &file]);
    live.sh("rm -r dir");
    let before = live.snapshot();
    live.jailfs(&["import", &file, "--into", "try"]);
    live.jailfs(&["export", "try@", "--tar", &again]);
    assert_eq!(sha(&file), sha(&again), "the new head");
    live.jailfs(&["export", "@", "--tar", &file, "--force"]);
    live.jailfs(&["import", &file, "--into", "try"]);
    live.jailfs(&["export", "try@", "--tar", &again, "--force"]);
    assert_eq!(sha(&file), sha(&again), "the head that was there");
    assert_same(&before, &live.snapshot(), "the tree of this head");
    let wrong = live.try_jailfs(&["import", &file, "--into", "no/name"]);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn changes_since_a_state_import_onto_it() {
    let live = Live::new(BASE);
    live.sh(CHANGES);
    let wanted = tree(&live.mnt);
    let file = outside(&live, "changes.tar");
    live.jailfs(&["export", "@", "--since", "base", "--tar", &file]);
    live.jailfs(&["discard"]);
    live.jailfs(&["import", &file, "--onto", "base"]);
    assert_same(&wanted, &tree(&live.mnt), "the changes on the base");
    live.sh("touch .wh.name");
    let refused = live.try_jailfs(&["export", "@", "--since", "base", "--tar", &file, "--force"]);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(1) && said.contains("'.wh.name'"), "{said}");
}

#[test]
fn unknown_states_files_and_tags_are_told() {
    let live = Live::new("echo a > a");
    let (image, file) = (outside(&live, "image"), outside(&live, "x"));
    live.jailfs(&["export", "@", "--oci", &image]);
    std::fs::write(&file, "not an archive").unwrap();
    let plain = live.outside().display().to_string();
    for (words, code, part) in [
        (vec!["export", "nothing", "--tar", "-"], 10, "no such checkpoint"),
        (vec!["export", "@", "--since", "99", "--tar", "-"], 10, "no such checkpoint"),
        (vec!["export", "@", "--tar", &file], 1, "it exists"),
        (vec!["export", "@", "--oci", &plain], 1, "not an OCI image layout"),
        (vec!["import", &plain], 1, "not an OCI image layout"),
        (vec!["import", &format!("{image}:none")], 10, "no tag 'none'"),
        (vec!["import", "/nonexistent"], 1, "No such file"),
        (vec!["import", &file], 1, "the archive ends"),
    ] {
        let output = live.try_jailfs(&words);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {said}");
        assert!(said.contains(part), "{words:?}: {said}");
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "not an archive");
}
