//! Everything together: writers at full speed, many checkpoints, git, applies, and mounts inside
//! the mount.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jailfs::sandbox::Request;

use crate::harness::{Live, Shell, assert_same, shell, snapshot};

/// Each writer appends lines `writer number` to its own file and to a shared one, through a
/// descriptor that stays open and through one that is opened for each line. It reports every number
/// that was written.
const WRITER: &str = "
def work(who, seconds):
    stays = os.open(f'stays{who}', os.O_WRONLY | os.O_APPEND)
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += 1
        line = f'{who} {n}\\n'.encode()
        os.write(stays, line)
        for path in (f'opened{who}', 'shared'):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.write(fd, line)
            os.close(fd)
        for old, new in (('a', 'b'), ('b', 'a')):
            try: os.rename(f'dir/{old}{who}', f'dir/{new}{who}')
            except FileNotFoundError: pass
    return n
";

/// The numbers of each writer in a file, in order; every line must be whole.
fn numbers(text: &str) -> BTreeMap<u32, Vec<u64>> {
    assert!(text.is_empty() || text.ends_with('\n'), "a torn end: {text:?}");
    let mut found: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for line in text.lines() {
        let parsed =
            line.split_once(' ').and_then(|(who, n)| Some((who.parse().ok()?, n.parse().ok()?)));
        let (who, n) = parsed.unwrap_or_else(|| panic!("a torn line: {line:?}"));
        found.entry(who).or_default().push(n);
    }
    found
}

#[test]
fn writers_at_full_speed_never_mix_lines_from_before_and_after_a_restore() {
    const WRITERS: u32 = 3;
    let live = Live::new(
        "mkdir dir; for i in 0 1 2; do : > stays$i; : > dir/a$i; done; echo still > still",
    );
    live.sh("for i in 0 1 2; do echo \"$i 0\" > opened$i; done; echo '0 0' > shared");
    let mut writers: Vec<_> = (0..WRITERS).map(|_| live.puppet("")).collect();
    for (who, writer) in writers.iter_mut().enumerate() {
        writer.run(WRITER);
        writer.begin(&format!("work({who}, 3.5)"));
    }
    let end = Instant::now() + Duration::from_millis(2500);
    let mut rounds = 0;
    while rounds < 50 && (Instant::now() < end || rounds <= 3) {
        let name = format!("c{rounds}");
        live.checkpoint(&name);
        std::thread::sleep(Duration::from_millis(20));
        let back = format!("c{}", rounds / 2);
        live.restore(&back);
        // Lines since the restore directly follow those of the checkpoint.
        for who in 0..WRITERS {
            let (opened, shared) = (live.read(&format!("opened{who}")), live.read("shared"));
            let own = numbers(&opened).remove(&who).unwrap_or_default();
            assert!(own.is_sorted() && own.windows(2).all(|w| w[0] < w[1]), "{own:?}");
            let gaps = own.windows(2).filter(|w| w[1] != w[0] + 1).count();
            assert!(gaps <= rounds + 1, "{gaps} gaps after {rounds} restores");
            for (_, theirs) in numbers(&shared) {
                assert!(theirs.windows(2).all(|w| w[0] < w[1]), "{theirs:?}");
            }
            let in_dir = live.sh(&format!("ls dir | grep -c '[ab]{who}' || true"));
            assert!(in_dir.trim() == "1" || in_dir.trim() == "0", "{in_dir}");
        }
        rounds += 1;
    }
    let written: Vec<u64> =
        writers.iter_mut().map(|w| w.answer().unwrap().parse().unwrap()).collect();
    assert!(written.iter().all(|n| *n > 0), "{rounds} rounds, {written:?} lines");
    assert_eq!(live.read("still"), "still\n");
    // The writers have stopped: every checkpoint is a state of its own, and stays one.
    for round in [0, rounds / 2, rounds - 1] {
        live.restore(&format!("c{round}"));
        let once = live.snapshot();
        live.sh("rm -rf dir; echo x >> shared");
        live.restore(&format!("c{round}"));
        assert_same(&once, &live.snapshot(), &format!("checkpoint {round}"));
        for who in 0..WRITERS {
            // The three names of a line are written one after the other, so in one state they
            // differ by at most one line.
            let opened = numbers(&live.read(&format!("opened{who}"))).remove(&who).unwrap();
            let shared = numbers(&live.read("shared")).remove(&who).unwrap_or_default();
            let last = |of: &[u64]| of.last().copied().unwrap_or_default();
            assert!(
                last(&opened) - last(&shared).min(last(&opened)) <= 1,
                "{who}: {opened:?} {shared:?}"
            );
            assert_eq!(live.sh(&format!("ls dir | grep -c '[ab]{who}'")).trim(), "1");
        }
    }
}

#[test]
fn every_acknowledged_write_is_in_the_tree_or_in_a_restorable_state() {
    let live = Live::new("echo x > x");
    live.checkpoint("start");
    let mut writer = live.puppet("");
    let work = "
def work():
    end, n = time.monotonic() + 1.5, 0
    while time.monotonic() < end:
        n += 1
        os.close(os.open(f'n{n}', os.O_CREAT | os.O_WRONLY))
    return n
";
    writer.run(work);
    writer.begin("work()");
    for _ in 0..5 {
        live.restore("start");
    }
    let made: u32 = writer.answer().unwrap().parse().unwrap();
    let mut found: BTreeSet<String> = BTreeSet::new();
    let mut take = |live: &Live| found.extend(live.sh("ls").lines().map(str::to_owned));
    take(&live);
    for state in live.json(&["log", "--all"]) {
        live.restore(&state["id"].to_string());
        take(&live);
    }
    let lost: Vec<u32> = (1..=made).filter(|n| !found.contains(&format!("n{n}"))).collect();
    assert_eq!(lost, [0; 0], "of {made}");
}

#[test]
fn a_checkpoint_contains_exactly_what_was_acknowledged_before_it() {
    let live = Live::new("echo 0 > file");
    let mut writer = live.puppet("");
    for n in 1..=20 {
        writer.run(&format!("write('file', b'{n}'); write('new{n}', b'{n}')"));
        live.checkpoint(&format!("c{n}"));
        writer.run("write('file', b'late')");
    }
    for n in [20, 1, 10, 11, 9] {
        live.restore(&format!("c{n}"));
        assert_eq!(live.read("file"), n.to_string());
        assert!(live.exists(&format!("new{n}")) && !live.exists(&format!("new{}", n + 1)));
    }
}

#[test]
fn git_finds_no_change_after_a_restore() {
    let mut live = Live::new(
        "git init -q .; git config user.email a@b; git config user.name n
        mkdir -p src/deep; for i in $(seq 100); do echo \"file $i\" > src/$i
        echo \"deep $i\" > src/deep/$i; done
        git add .; git commit -qm first",
    );
    let status = "git status --porcelain; git fsck --strict 2>&1 | grep -v '^dangling' || true";
    assert_eq!(live.sh(status), "");
    live.sh("touch -d '1 hour ago' src/1; git status --porcelain; echo new > src/new; git add .; \
        git commit -qm second");
    live.checkpoint("clean");
    let (index, seen) = (live.sh("cksum .git/index; git rev-parse HEAD"), live.snapshot());
    live.sh("git mv src source; rm source/deep/*; git add -A; git commit -qm third; git gc -q; \
        git checkout -q -b other");
    live.sh("git reset -q --hard HEAD~2; echo junk > src/1; git stash -q || true; \
        mv .git/objects .git/o2; mv .git/o2 .git/objects");
    live.restore("clean");
    assert_same(&seen, &live.snapshot(), "the repository");
    // Inode numbers and times are as in the index, so git neither reads the files again nor
    // rewrites the index.
    assert_eq!(
        live.sh(
            "GIT_TRACE2_PERF=1 git diff-files --name-only 2>&1 | grep -v perf | grep '^src' || true"
        ),
        ""
    );
    assert_eq!(live.sh("git diff-files; git diff-index HEAD"), "");
    assert_eq!(live.sh(status), "");
    assert_eq!(live.sh("cksum .git/index; git rev-parse HEAD"), index);
    live.remount();
    assert_eq!(live.sh("git diff-files; git diff-index HEAD"), "");
    assert_eq!(live.sh(status), "");
    assert_eq!(live.sh("cksum .git/index; git rev-parse HEAD"), index);
}

#[test]
fn a_mount_inside_the_mount_survives_a_restore_of_other_files() {
    if !nix::unistd::geteuid().is_root() {
        // Only root can mount inside a mount.
        return;
    }
    let live = Live::new("mkdir -p dir/point other; echo x > other/x; echo y > dir/y");
    live.checkpoint("start");
    live.sh("mount -t tmpfs none dir/point; echo inner > dir/point/inner");
    let inside = live.mnt.join("dir/point");
    let check = || {
        live.sh("echo z > other/z; rm other/x; echo changed > dir/y; mkdir dir/new");
        live.restore("start");
        assert_eq!((live.read("other/x"), live.read("dir/y")), ("x\n".into(), "y\n".into()));
        assert!(!live.exists("other/z") && !live.exists("dir/new"));
        assert_eq!(live.read("dir/point/inner"), "inner\n");
    };
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        check();
        // So many names that all would be invalidated at once, if there were no mount.
        let mut maker = live.puppet("other");
        maker.run(
            "for d in range(2): os.mkdir(f'{d}'); [os.mknod(f'{d}/{i}') for i in range(10050)]",
        );
        check();
        assert_eq!(live.sh("ls other").trim(), "x");
    }));
    shell(Path::new("/"), &format!("umount '{}'", inside.display()));
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
    assert!(!live.exists("dir/point/inner"));
}

#[test]
fn a_thousand_checkpoints_do_not_slow_a_lookup() {
    let script = "mkdir dir; for i in $(seq 30); do echo $i > dir/$i; done";
    let mut live = Live::with_options(script, &["--volatile"]);
    let mut puppet = live.puppet("");
    let absent = "
def absent():
    for i in range(400):
        try: os.stat(f'dir/absent{time.monotonic_ns()}')
        except FileNotFoundError: pass
";
    puppet.run(absent);
    let pid = live.json(&["status"])[0]["pid"].to_string();
    // Reads of the threads that answer the kernel: one for each message, and none in the layers.
    // Other threads do housekeeping meanwhile.
    let reads = || -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .map(|task| task.unwrap().path());
        let answers = |task: &PathBuf| {
            let name = std::fs::read_to_string(task.join("comm")).unwrap_or_default();
            name.starts_with("jailfs-session") || name.starts_with("jailfs-serve")
        };
        let count = |task: PathBuf| -> u64 {
            let io = std::fs::read_to_string(task.join("io")).unwrap();
            io.lines().find_map(|l| l.strip_prefix("syscr: ")).unwrap().parse().unwrap()
        };
        tasks.filter(answers).map(count).sum()
    };
    live.sh("echo x > dir/1");
    live.checkpoint("first");
    let start = reads();
    puppet.run("absent()");
    let before = reads() - start;
    assert!(before >= 400, "{before} reads: the requests went elsewhere");
    let seen = live.snapshot();
    // One process makes the changes, and one connection the checkpoints: a command for each would
    // be slow.
    let mut client = jailfs::internals::control::connect(&live.store).unwrap().unwrap();
    for n in 0..1000 {
        puppet.run(&format!("write('dir/{}', b'{n}')", n % 20));
        client.call(&Request::Checkpoint { name: None, message: String::new() }).unwrap();
    }
    drop(client);
    let start = reads();
    puppet.run("absent()");
    let after = reads() - start;
    assert!(after <= before + 100, "{before} reads for 400 lookups before, {after} after");
    let log = live.json(&["log"]);
    assert_eq!(log.len(), 1001);
    let last = live.snapshot();
    live.restore("first");
    assert_same(&seen, &live.snapshot(), "the first checkpoint");
    let middle = log[500]["id"].to_string();
    live.restore(&middle);
    puppet.gives("read('dir/19'), read('dir/20')", "(b'499', b'20\\n')");
    live.restore("@-1");
    puppet.end();
    live.restore(&log[0]["id"].to_string());
    live.remount();
    assert_same(&last, &live.snapshot(), "the last checkpoint after a remount");
    assert_eq!(live.json(&["log"]).len(), 1001);
}

/// The lines of a snapshot without some fields.
fn without(fields: &[&str], lines: &[String]) -> Vec<String> {
    let keep = |word: &&str| !fields.iter().any(|field| word.starts_with(field));
    lines.iter().map(|line| line.split(' ').filter(keep).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn an_older_checkpoint_is_exact_after_an_apply_and_a_remount() {
    let mut live = Live::new(
        "mkdir -p dir/sub keep; echo one > one; echo two > dir/two; echo three > dir/sub/three; \
         echo k > keep/k
        echo pair > p1; ln p1 p2; ln -s one link; setfattr -n user.a -v 1 one
        touch -d 2001-01-01 one dir/sub",
    );
    live.applied = true;
    let base = snapshot(&live.base, true);
    let mut shell = Shell::start(&live.mnt.join("keep"));
    let mut holder = live.puppet("");
    holder.run(
        "one, k = os.open('one', os.O_RDWR), os.open('keep/k', os.O_RDWR); m = mapped('dir/two')",
    );
    let untouched = live.snapshot();
    live.checkpoint("untouched");
    live.sh("echo changed > one; mv dir moved; rm p1; echo new > new; chmod 600 moved/two; \
        mkdir dir; echo d > dir/two");
    let changed = live.snapshot();
    live.checkpoint("changed");
    live.jailfs(&["apply"]);
    // The files are now those of the base, whose change time cannot be set.
    assert_same(
        &without(&["ctime="], &changed),
        &without(&["ctime="], &live.snapshot()),
        "the tree after the apply",
    );
    live.check_applied(&["new", "moved/two", "dir/two"]);
    shell.gives("cat k; cat ../new", "k\nnew");
    holder.gives("os.pread(k, 10, 0), bytes(m[:])", "(b'k\\n', b'two\\n')");
    live.restore("untouched");
    assert_same(&untouched, &live.snapshot(), "the checkpoint before the apply");
    shell.gives("cat k && cd ../dir && cat two", "k\ntwo");
    live.restore("changed");
    assert_same(&changed, &live.snapshot(), "the checkpoint that was applied");
    drop(shell);
    holder.end();
    live.remount();
    assert_same(&changed, &live.snapshot(), "after a remount");
    live.restore("untouched");
    assert_same(&untouched, &live.snapshot(), "the checkpoint before the apply, after a remount");
    live.kill_and_mount();
    assert_same(&untouched, &live.snapshot(), "after kill -9");
    live.restore("changed");
    live.jailfs(&["apply", "--undo"]);
    let undone = snapshot(&live.base, true);
    let unset = ["ctime=", "ino=", "atime="];
    assert_same(
        &without(&unset, &base),
        &without(&unset, &undone),
        "the base after the apply was undone",
    );
    live.restore("untouched");
    assert_same(&untouched, &live.snapshot(), "the first checkpoint after the undo");
    live.restore("changed");
    assert_same(&changed, &live.snapshot(), "the second checkpoint after the undo");
}
