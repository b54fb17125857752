//! Shared mappings: a write through one belongs to the state in which it was made, and to no later
//! one.

use std::time::Duration;

use crate::harness::{Live, Puppet, assert_same};

/// Four pages of `-`, and other files.
const BASE: &str = "
    for f in same changed removed replaced base renamed; do head -c 16384 /dev/zero |
    tr '\\0' - > $f; done; echo x > x
";

/// The bytes that a process writes into each page of a mapping.
const DIRTY: &str = "
def dirty(m, byte):
    for page in range(0, len(m), 4096):
        m[page] = byte
";

fn mapper(live: &Live) -> Puppet {
    let mut puppet = live.puppet("");
    puppet.run(DIRTY);
    puppet
}

fn marks(live: &Live, path: &str) -> String {
    live.read(path).bytes().step_by(4096).map(char::from).collect()
}

#[test]
fn dirty_pages_of_a_mapping_are_in_the_checkpoint() {
    let mut live = Live::new(BASE);
    let mut puppet = mapper(&live);
    puppet.run("m = mapped('changed'); dirty(m, 65); n = mapped('base'); dirty(n, 66)");
    live.checkpoint("dirty");
    puppet.run("dirty(m, 67); dirty(n, 68)");
    live.checkpoint("dirtier");
    let dirtier = live.snapshot();
    live.restore("dirty");
    assert_eq!((marks(&live, "changed"), marks(&live, "base")), ("AAAA".into(), "BBBB".into()));
    live.restore("dirtier");
    assert_eq!((marks(&live, "changed"), marks(&live, "base")), ("CCCC".into(), "DDDD".into()));
    assert_same(&dirtier, &live.snapshot(), "the second checkpoint");
    puppet.end();
    live.kill_and_mount();
    live.restore("dirty");
    assert_eq!((marks(&live, "changed"), marks(&live, "base")), ("AAAA".into(), "BBBB".into()));
}

#[test]
fn dirty_pages_are_in_the_checkpoint_of_a_mount_that_is_never_idle() {
    let live = Live::new(BASE);
    let mut puppet = mapper(&live);
    let ask = "import os, itertools
for n in itertools.count():
    try: os.stat(f'{os.getpid()}-{n}')
    except OSError: pass";
    let askers = (0..6).map(|_| {
        let mut command = std::process::Command::new("python3");
        command.args(["-I", "-S", "-c", ask]).current_dir(&live.mnt).spawn().unwrap()
    });
    let askers: Vec<_> = askers.collect();
    for round in ["one", "two", "three"] {
        puppet.run("m = mapped('changed'); dirty(m, 65); n = mapped('base'); dirty(n, 66)");
        live.checkpoint(round);
        puppet.run("dirty(m, 45); dirty(n, 45)");
    }
    for mut asker in askers {
        asker.kill().unwrap();
        asker.wait().unwrap();
    }
    for round in ["one", "two", "three"] {
        let at = |name: &str| marks(&live, &format!(".jailfs/checkpoints/{round}/{name}"));
        assert_eq!((at("changed"), at("base")), ("AAAA".into(), "BBBB".into()), "{round}");
    }
}

/// A file that was just truncated may have pages that the kernel keeps back.
#[test]
fn dirty_pages_are_in_the_checkpoint_after_many_truncations() {
    let live = Live::new(BASE);
    let mut puppet = mapper(&live);
    puppet.run("m = mapped('changed'); n = mapped('base')");
    // Of many, the mappings of all processes are read.
    for (round, count) in [("few", 10), ("many", 600)] {
        puppet.run(&format!("for i in range({count}): open(f't{{i}}', 'w').write('12')"));
        puppet.run(&format!("for i in range({count}): os.truncate(f't{{i}}', 1)"));
        puppet.run("os.truncate('changed', 8192); dirty(n, 66); m[0] = m[4096] = 65");
        live.checkpoint(round);
        puppet.run("dirty(n, 45); m[0] = m[4096] = 45");
        let at = |name: &str| marks(&live, &format!(".jailfs/checkpoints/{round}/{name}"));
        assert_eq!((at("changed"), at("base")), ("AA".into(), "BBBB".into()), "{round}");
    }
}

/// The read(2) calls that a checkpoint of an idle mount costs the daemon.
fn reads_of_a_checkpoint(live: &Live, prefix: &str, make: fn(&Live, &str)) -> u64 {
    let reads = || {
        let counted = std::fs::read_to_string(format!("/proc/{}/io", live.pid())).unwrap();
        let line = counted.lines().find_map(|line| line.strip_prefix("syscr: ")).unwrap();
        line.parse::<u64>().unwrap()
    };
    // Background work adds calls to some checkpoints.
    let counts = (0..8).map(|n| {
        live.sh("echo changed > x");
        let before = reads();
        make(live, &format!("{prefix}{n}"));
        reads() - before
    });
    counts.min().unwrap()
}

#[test]
fn a_checkpoint_costs_the_same_beside_many_sleeping_processes() {
    let live = Live::new(BASE);
    let by_command: fn(&Live, &str) = |live, name| live.checkpoint(name);
    let by_mkdir: fn(&Live, &str) = |live, name| {
        std::fs::create_dir(live.mnt.join(".jailfs/checkpoints").join(name)).unwrap();
    };
    let counted = |prefix: &str| {
        let of = |how: &str, make| reads_of_a_checkpoint(&live, &format!("{prefix}-{how}"), make);
        (of("command", by_command), of("mkdir", by_mkdir))
    };
    let alone = counted("alone");
    let sleepers: Vec<_> =
        (0..300).map(|_| std::process::Command::new("sleep").arg("90").spawn().unwrap()).collect();
    let beside = counted("beside");
    for mut sleeper in sleepers {
        sleeper.kill().unwrap();
        sleeper.wait().unwrap();
    }
    assert!(
        beside.0 < alone.0 + 100 && beside.1 < alone.1 + 100,
        "read(2) by command and by mkdir: {alone:?} alone, {beside:?} beside 300 processes"
    );
}

#[test]
fn dirty_pages_of_every_kind_of_mapping_are_in_the_checkpoint() {
    let live = Live::new(BASE);
    let mut puppet = mapper(&live);
    // Pages that became read-only after they were written; a mapping whose thread has ended; an
    // unlinked, a renamed and a linked file.
    puppet.run("m = mapped('changed'); dirty(m, 65)");
    puppet.run(
        "a = ctypes.addressof(ctypes.c_char.from_buffer(m)); \
         libc.mprotect(ctypes.c_void_p(a), 16384, 1)",
    );
    puppet.run(
        "n = mapped('renamed'); dirty(n, 66); os.mkdir('d'); os.rename('renamed', 'd/other'); \
         os.link('d/other', 'l')",
    );
    puppet.run("g = mapped('removed'); os.unlink('removed'); dirty(g, 67)");
    let script = "import ctypes, threading, time, mmap, os, sys
fd = os.open('same', os.O_RDWR)
m = mmap.mmap(fd, 0)
def go():
    time.sleep(0.3)
    for page in range(0, len(m), 4096): m[page] = 68
    print('dirty', flush=True)
    time.sleep(60)
threading.Thread(target=go).start()
ctypes.CDLL(None).pthread_exit(None)";
    let mut command = std::process::Command::new("python3");
    let command = command.args(["-I", "-S", "-c", script]).current_dir(&live.mnt);
    let mut headless = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut said = [0; 6];
    std::io::Read::read_exact(&mut headless.stdout.take().unwrap(), &mut said).unwrap();
    live.checkpoint("dirty");
    live.sh("rm -rf changed d l same");
    live.restore("dirty");
    assert_eq!(marks(&live, "changed"), "AAAA", "a mapping that is only readable by now");
    assert_eq!((marks(&live, "d/other"), marks(&live, "l")), ("BBBB".into(), "BBBB".into()));
    let same = marks(&live, "same");
    headless.kill().unwrap();
    headless.wait().unwrap();
    assert_eq!(same, "DDDD", "a mapping of a process whose first thread has ended");
    assert!(!live.exists("removed"));
    puppet.gives("g[0], n[0]", "(67, 66)");
}

#[test]
fn pages_that_were_dirty_before_a_restore_never_appear_after_it() {
    let live = Live::new(BASE);
    live.sh("echo y > y");
    live.checkpoint("start");
    let start = live.snapshot();
    let mut puppet = mapper(&live);
    for name in ["same", "changed", "removed", "replaced", "renamed"] {
        puppet.run(&format!("{name} = mapped('{name}')"));
    }
    puppet.run("write('added', b'-' * 16384); added = mapped('added')");
    puppet.run(
        "os.unlink('removed'); write('n', b'n'); os.rename('n', 'replaced'); \
         os.rename('renamed', 'elsewhere')",
    );
    puppet.run("for m in (changed, removed, replaced, renamed, added): dirty(m, 65)");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree right after the restore");
    puppet.run("for m in (changed, removed, replaced, renamed, added): m[1] = 66");
    live.sh("sync");
    std::thread::sleep(Duration::from_millis(1500));
    live.sh("sync");
    assert_same(&start, &live.snapshot(), "the tree later");
    // Processes that map an orphan see what they wrote, and get no SIGBUS.
    puppet.gives(
        "[bytes(m[:2]) for m in (changed, removed, replaced, renamed, added)]",
        "[b'AB', b'AB', b'AB', b'AB', b'AB']",
    );
    puppet.run("for m in (changed, removed, replaced, renamed, added): m.flush()");
    puppet.gives("same[0]", "45");
    puppet.run("for m in (changed, removed, replaced, renamed, added): m.close()");
    assert_same(&start, &live.snapshot(), "the tree after the end of the mappings");
    live.checkpoint("again");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree after another checkpoint");
}

#[test]
fn a_mapping_of_an_unchanged_file_goes_on() {
    let live = Live::new(BASE);
    live.sh("echo y > y; printf + | dd of=same conv=notrunc status=none");
    live.checkpoint("start");
    let mut puppet = mapper(&live);
    puppet.run("same, base = mapped('same'), mapped('base')");
    puppet.gives("same[0], base[0]", "(43, 45)");
    live.sh("echo z > y; rm x");
    live.restore("start");
    puppet.run("dirty(same, 65); dirty(base, 66); same.flush(); base.flush()");
    assert_eq!((marks(&live, "same"), marks(&live, "base")), ("AAAA".into(), "BBBB".into()));
    live.sh("printf w | dd of=same bs=1 seek=4096 conv=notrunc status=none");
    puppet.gives("same[4096]", "119");
    puppet.run("dirty(same, 67)");
    live.checkpoint("later");
    live.restore("start");
    assert_eq!(marks(&live, "same"), "+---");
    live.restore("later");
    assert_eq!(marks(&live, "same"), "CCCC");
}

#[test]
fn a_mapping_of_an_orphan_keeps_its_old_content() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let mut puppet = mapper(&live);
    live.sh("tr - o < base > changed; tr - o < base > added; head -c 100000 base > removed; \
        rm replaced");
    puppet.run("changed, added, removed = mapped('changed'), mapped('added'), mapped('removed')");
    live.restore("start");
    // No page was read before, so each page is requested only now.
    for page in 0..4 {
        puppet.gives(
            &format!("changed[{}], added[{}]", page * 4096 + 7, page * 4096 + 8),
            "(111, 111)",
        );
    }
    live.sh(": > changed; rm -f added");
    std::fs::write("/proc/sys/vm/drop_caches", "1\n").unwrap_or_default();
    puppet.gives(
        "bytes(changed[:]) == b'o' * 16384, bytes(added[:]) == b'o' * 16384",
        "(True, True)",
    );
    puppet.run("dirty(changed, 65); changed.flush()");
    assert_eq!(live.read("changed"), "");
}

#[test]
fn a_private_mapping_stays_private() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut puppet = mapper(&live);
    puppet.run(
        "fd = os.open('same', os.O_RDWR); m = mmap.mmap(fd, 0, mmap.MAP_PRIVATE); dirty(m, 65)",
    );
    live.checkpoint("private");
    live.restore("private");
    assert_same(&start, &live.snapshot(), "the tree");
    puppet.gives("m[0]", "65");
}

/// With the writeback cache, plain writes are still in the kernel when a checkpoint or a restore
/// begins.
#[test]
fn with_a_writeback_cache_plain_writes_belong_to_the_right_state() {
    let live = Live::with_options(BASE, &["-o", "writeback"]);
    let mut puppet = mapper(&live);
    puppet.run("fd = os.open('same', os.O_RDWR); os.pwrite(fd, b'A', 0); write('new', b'new')");
    live.checkpoint("start");
    puppet.run(
        "os.pwrite(fd, b'B', 0); n = os.open('new', os.O_RDWR | os.O_APPEND); \
         os.write(n, b' late')",
    );
    live.restore("start");
    assert_eq!((marks(&live, "same"), live.read("new")), ("A---".into(), "new".into()));
    live.sh("sync");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!((marks(&live, "same"), live.read("new")), ("A---".into(), "new".into()));
    let here = live.snapshot();
    live.checkpoint("same");
    live.sh("rm -rf same new");
    live.restore("same");
    assert_same(&here, &live.snapshot(), "the tree");
}
