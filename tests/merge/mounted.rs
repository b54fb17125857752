//! Merges under programs that work in the mounts of both heads.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::harness::{Live, Shell, shell, text};

/// A sandbox and a mounted fork of it.
struct Pair {
    live: Live,
    fork: PathBuf,
}

impl Pair {
    fn new(script: &str) -> Pair {
        let live = Live::new(script);
        let fork = live.outside().join("try");
        std::fs::create_dir(&fork).unwrap();
        live.jailfs(&["fork", "try", fork.to_str().unwrap()]);
        Pair { live, fork }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        drop(jailfs(&self.fork, &["umount", "-l", self.fork.to_str().unwrap()]));
    }
}

fn jailfs(dir: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
    command.arg("-C").arg(dir).args(words).current_dir("/").output().unwrap()
}

const BASE: &str = "mkdir -p dir/sub; seq 9 > dir/text; echo s > dir/sub/s; echo t > top";

#[test]
fn programs_go_on_in_the_merged_tree() {
    let pair = Pair::new(BASE);
    let mut in_dir = Shell::start(&pair.live.mnt.join("dir"));
    let mut puppet = pair.live.puppet("dir/sub");
    puppet.run("kept = os.open('s', os.O_RDWR); old = os.open('../text', os.O_RDONLY)");
    pair.live.sh("sed -i s/1/one/ dir/text; echo ours > ours");
    shell(
        &pair.fork,
        "sed -i s/9/nine/ dir/text; mkdir new; echo x > new/x; mv top dir/moved; \
         ln new/x link; chmod 600 dir/sub/s",
    );
    let said = pair.live.jailfs(&["merge", "try"]);
    assert!(said.contains("undo: jailfs op restore"), "{said}");
    in_dir.gives("head -1 text; tail -1 text; cat moved; cat ../new/x", "one\nnine\nt\nx");
    in_dir.gives("stat -c '%h %a' ../link sub/s", "2 644\n1 600");
    puppet.gives("os.fstat(kept).st_nlink, os.pread(old, 2, 0)", "(1, b'1\\n')");
    in_dir.gives("ls ..", "dir\nlink\nnew\nours");
    // Both heads are as they were, and go on apart.
    assert_eq!(shell(&pair.fork, "head -1 dir/text; ls"), "1\ndir\nlink\nnew\n");
    pair.live.sh("echo more >> new/x");
    assert_eq!(shell(&pair.fork, "cat new/x"), "x\n");
    let op = said.lines().find_map(|line| line.strip_prefix("undo: jailfs op restore ")).unwrap();
    pair.live.jailfs(&["op", "restore", op]);
    in_dir.gives("head -1 text; tail -1 text; ls ..", "one\n9\ndir\nours\ntop");
}

#[test]
fn dirty_pages_of_both_heads_are_merged() {
    let pair = Pair::new("head -c 8192 /dev/zero | tr '\\0' - > a; cp a b");
    let mut ours = pair.live.puppet("");
    let mut theirs = crate::harness::Puppet::start(&pair.fork);
    ours.run("m = mapped('a'); m[0] = 65");
    theirs.run("m = mapped('b'); m[0] = 66");
    pair.live.jailfs(&["merge", "try"]);
    assert_eq!(pair.live.sh("head -c 1 a; head -c 1 b"), "AB");
    // A mapping of a file that the merge did not change stays.
    ours.run("m[1] = 65; m.flush()");
    assert_eq!(pair.live.sh("head -c 2 a"), "AA");
}

#[test]
fn a_conflict_exits_3_and_changes_nothing() {
    let pair = Pair::new(BASE);
    pair.live.sh("sed -i s/1/one/ dir/text");
    shell(&pair.fork, "sed -i s/1/uno/ dir/text; echo new > new");
    let before = pair.live.snapshot();
    let output = pair.live.try_jailfs(&["merge", "try"]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("conflict\tdir/text\tmain changed content; try changed content"),
        "{said}"
    );
    crate::harness::assert_same(&before, &pair.live.snapshot(), "the tree");
    let output = pair.live.try_jailfs(&["merge", "try", "--json"]);
    let lines = String::from_utf8(output.stdout).unwrap();
    assert!(lines.contains("\"type\":\"conflict\"") && lines.contains("dir/text"), "{lines}");
    pair.live.jailfs(&["merge", "try", "--markers"]);
    assert!(
        pair.live.read("dir/text").starts_with("<<<<<<< main\none\n=======\nuno\n>>>>>>> try\n")
    );
    assert!(pair.live.jailfs(&["status"]).contains("dir/text"));
    pair.live.sh("seq 9 > dir/text");
    assert!(!pair.live.jailfs(&["status"]).contains("dir/text"));
}

#[test]
fn one_head_can_be_chosen() {
    let pair = Pair::new(BASE);
    pair.live.sh("echo ours > dir/text; rm top");
    shell(&pair.fork, "echo theirs > dir/text; echo theirs > top");
    pair.live.jailfs(&["merge", "try", "--theirs", "dir", "--ours", "top"]);
    assert_eq!(pair.live.read("dir/text"), "theirs\n");
    assert!(!pair.live.exists("top"));
}

#[test]
fn forks_compare_by_their_names() {
    let pair = Pair::new(BASE);
    pair.live.sh("echo ours > top");
    shell(&pair.fork, "echo new > new");
    let said = pair.live.jailfs(&["diff", "main@", "try@", "--name-status"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.contains("new") && said.contains("top"), "{said}");
}

#[test]
fn bad_input_is_refused_with_a_hint() {
    let pair = Pair::new(BASE);
    for (words, code) in [(&["merge", "main"][..], 2), (&["merge", "nothing"], 10)] {
        let output = pair.live.try_jailfs(words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output));
        assert!(String::from_utf8(output.stderr).unwrap().contains("hint: "), "{words:?}");
    }
}

/// Writes that arrive while a merge is made are kept.
#[test]
fn nothing_that_programs_write_during_a_merge_is_lost() {
    let pair = Pair::new(BASE);
    shell(&pair.fork, "for n in $(seq 200); do echo $n > dir/f$n; done");
    let mnt = pair.live.mnt.clone();
    std::thread::scope(|scope| {
        let writer = scope.spawn(move || {
            for n in 0..400 {
                shell(&mnt, &format!("echo {n} >> top; echo {n} > own{n}"));
            }
        });
        let mut merges = 0;
        while !writer.is_finished() && merges < 5 {
            let output = pair.live.try_jailfs(&["merge", "try"]);
            assert!(output.status.success(), "{}", text(&output));
            shell(&pair.fork, "echo again >> dir/f1");
            merges += 1;
        }
        writer.join().unwrap();
    });
    assert_eq!(
        pair.live
            .sh("wc -l < top; ls | grep -c own; ls dir | wc -l")
            .split_whitespace()
            .collect::<Vec<_>>(),
        ["401", "400", "202"]
    );
}

#[test]
fn markers_keep_both_sides_of_any_conflict() {
    let pair = Pair::new(BASE);
    pair.live.sh("rm top; mkdir n; echo in > n/x; chmod 700 dir; printf 'a\\0' > dir/bin");
    shell(&pair.fork, "echo try > top; echo n > n; chmod 711 dir; printf 'b\\0' > dir/bin");
    let said = pair.live.jailfs(&["merge", "try", "--markers"]);
    for path in ["dir/bin~try", "dir~try", "n~try", "top~try"] {
        assert!(said.contains(&format!("unresolved: {path}\n")), "{path}: {said}");
        assert!(pair.live.jailfs(&["status"]).contains(path), "{path}");
    }
    let shown =
        pair.live.sh("cat n/x n~try top~try; stat -c %a dir dir~try; cat dir/bin*; ls dir~try");
    assert_eq!(shown, "in\nn\ntry\n700\n711\na\0b\0");
    assert!(!pair.live.exists("top"));
    pair.live.sh("rm -r top~try n~try dir~try dir/bin~try");
    assert!(!pair.live.jailfs(&["status"]).contains("~try"));
}

#[test]
fn a_fork_is_merged_after_an_apply_and_applied() {
    let mut pair = Pair::new(BASE);
    pair.live.applied = true;
    let mut in_dir = Shell::start(&pair.live.mnt.join("dir"));
    pair.live.sh("sed -i s/1/one/ dir/text; echo new > new");
    shell(&pair.fork, "sed -i s/9/nine/ dir/text; rm top");
    pair.live.jailfs(&["apply"]);
    assert_eq!(shell(&pair.fork, "head -1 dir/text; test ! -e new").trim(), "1");
    pair.live.jailfs(&["merge", "try"]);
    assert_eq!(
        in_dir.run("head -1 text; tail -1 text; ls ..").replace('\n', " ").trim(),
        "one nine dir new"
    );
    pair.live.jailfs(&["apply"]);
    let base = pair.live.base.clone();
    assert_eq!(
        shell(&base, "sed -n '1p;9p' dir/text; ls").replace('\n', " ").trim(),
        "one nine dir new"
    );
}
