//! Operations of programs between a switch and the end of its invalidations; and how the kernel
//! learns of failures.

use std::collections::BTreeMap;

use crate::harness::Live;

const MANY: usize = 1200;

const WORK: &str = "
def change(round):
    for n in range(1200):
        write(f'many/{n}', b'%d' % round)
        if n % 3 == 0: exchange(f'many/{n}', f'many/{(n + 7) % 1200}')
        if n % 40 == 0: os.rename(f'dirs/{n}', f'dirs/old{n}'); os.mkdir(f'dirs/{n}')

# Each once, as far as it is there, to a name that nothing had.
def move(round, seconds):
    moved = 0
    for n in range(1200):
        for dir in ('many', 'dirs') if n % 40 == 0 else ('many',):
            try: os.rename(f'{dir}/{n}', f'{dir}/m{n}.{round}')
            except FileNotFoundError: pass
            else: moved += 1
        time.sleep(seconds / 1200)
    return moved

def seen(dir): return {name: os.stat(f'{dir}/{name}').st_ino for name in os.listdir(dir)}
";

#[test]
fn a_rename_during_the_invalidations_of_a_restore_ends_where_the_tree_has_it() {
    let live = Live::new("mkdir many dirs");
    let mut worker = live.puppet("");
    worker.run(WORK);
    worker.run("for n in range(1200): write(f'many/{n}', b'first')");
    worker.run("for n in range(0, 1200, 40): os.mkdir(f'dirs/{n}')");
    live.checkpoint("start");
    let mut mover = live.puppet("");
    mover.run(WORK);
    let mut moved = 0;
    for round in 0..6 {
        worker.run(&format!("change({round})"));
        mover.begin(&format!("move({round}, 0.0{round})"));
        live.restore("start");
        moved += mover.answer().unwrap().parse::<usize>().unwrap();
        for dir in ["many", "dirs"] {
            let nodes = live.json(&["show", &format!("@:{dir}")]);
            let name = |node: &serde_json::Value| {
                node["path"].as_str().unwrap()[dir.len() + 1..].to_owned()
            };
            let tree: BTreeMap<String, u64> =
                nodes.iter().map(|node| (name(node), node["ino"].as_u64().unwrap())).collect();
            let seen: BTreeMap<String, u64> = serde_json::from_str(
                worker.run(&format!("json.dumps(seen('{dir}'))")).trim_matches('\''),
            )
            .unwrap();
            assert_eq!(seen, tree, "round {round}: {dir}");
        }
        worker.gives("{read('many/' + name) for name in os.listdir('many')}", "{b'first'}");
        live.restore("start");
        assert_eq!(live.sh("ls many | wc -l; ls dirs | wc -l"), format!("{MANY}\n{}\n", MANY / 40));
    }
    assert!(moved > MANY, "only {moved} moves");
}

/// After a partial copy, the kernel must know the new length and show the copied bytes.
#[test]
fn a_copy_that_meets_the_limit_has_the_length_that_was_copied() {
    let mut live = Live::with_options(
        "head -c 20000000 /dev/urandom > from",
        &["-o", "max-bytes=8M,history=0"],
    );
    let mut puppet = live.puppet("");
    puppet.run("from_ = os.open('from', os.O_RDONLY); to = os.open('to', os.O_RDWR | os.O_CREAT)");
    let copied: u64 = puppet.run("os.copy_file_range(from_, to, 20000000)").parse().unwrap();
    assert!((1 << 20..8 << 20).contains(&copied), "{copied}");
    assert_eq!(puppet.fail("os.copy_file_range(from_, to, 20000000)"), "ENOSPC");
    puppet.gives("os.fstat(to).st_size", &copied.to_string());
    puppet.run(
        "os.ftruncate(to, 3 << 20); fd = os.open('to', os.O_WRONLY | os.O_APPEND); \
         os.write(fd, b'end'); os.close(fd)",
    );
    drop(puppet);
    let seen = "stat -c %s to; cmp -n 3145728 to from && tail -c 3 to";
    assert_eq!(live.sh(seen), "3145731\nend");
    live.remount();
    assert_eq!(live.sh(seen), "3145731\nend");
}

/// An unlinked file that is emptied again and again takes only the space of its present content.
#[test]
fn an_unlinked_file_frees_the_blocks_that_are_cut_off() {
    let live = Live::with_options("echo base > base", &["-o", "max-bytes=48M"]);
    let mut puppet = live.puppet("");
    puppet.run(
        "fd = os.open('gone', os.O_RDWR | os.O_CREAT); os.unlink('gone'); \
         some = bytes(range(256)) * 4096",
    );
    for _ in 0..12 {
        puppet.run("os.ftruncate(fd, 0); [os.pwrite(fd, some, at << 20) for at in range(8)]");
        puppet.run("os.posix_fallocate(fd, 0, 1)");
    }
    puppet.gives(
        "os.pread(fd, 1 << 20, 7 << 20) == some and os.fstat(fd).st_size == 8 << 20",
        "True",
    );
    // Also in the middle.
    puppet.run("PUNCH, KEEP = 2, 1");
    for _ in 0..12 {
        puppet.run(
            "libc.fallocate(fd, PUNCH | KEEP, ctypes.c_long(1 << 20), ctypes.c_long(6 << 20)) and \
             1 / 0",
        );
        puppet.gives("os.pread(fd, 4096, 1 << 20) == bytes(4096)", "True");
        puppet.run("[os.pwrite(fd, some, at << 20) for at in range(1, 7)]");
    }
    puppet.gives("os.pread(fd, 8 << 20, 0) == some * 8", "True");
}

/// A path that is longer than any system call accepts.
#[test]
fn a_mapping_deep_in_the_tree_does_not_prevent_checkpoints_and_restores() {
    let live = Live::new("echo base > base");
    let mut puppet = live.puppet("");
    puppet.run("for n in range(18): os.mkdir(str(n) * 100); os.chdir(str(n) * 100)");
    puppet.run("write('f', b'-' * 8192); m = mapped('f'); m[0:5] = b'first'; m.flush()");
    live.checkpoint("one");
    puppet.run("m[0:5] = b'later'");
    live.checkpoint("two");
    puppet.run("m[0:5] = b'never'");
    live.restore("one");
    puppet.gives("read('f')[:5]", "b'first'");
    live.restore("two");
    puppet.gives("read('f')[:5]", "b'later'");
}

#[test]
fn with_a_writeback_cache_open_files_go_on_across_an_apply() {
    let mut live = Live::with_options("echo base > base; echo log > log", &["-o", "writeback"]);
    live.applied = true;
    let mut puppet = live.puppet("");
    puppet.run("fd = os.open('log', os.O_WRONLY | os.O_APPEND); os.write(fd, b'one\\n')");
    live.sh("echo mine > mine; cat mine log > /dev/null");
    live.jailfs(&["apply"]);
    puppet.run("os.write(fd, b'two\\n')");
    assert_eq!((live.read("log"), live.read("mine")), ("log\none\ntwo\n".into(), "mine\n".into()));
    live.jailfs(&["apply"]);
    assert_eq!(std::fs::read_to_string(live.base.join("log")).unwrap(), "log\none\ntwo\n");
}

#[test]
fn with_a_writeback_cache_a_restore_also_restores_times() {
    let live = Live::with_options("echo base > base; seq 100 > f", &["-o", "writeback"]);
    live.sh("echo mine > mine; touch -d 2001-01-01 mine f; cat mine f base > /dev/null");
    let was = live.sh("stat -c '%n %s %Y %Z %a' mine f base");
    live.checkpoint("start");
    live.sh("touch -d 2011-01-01 mine f base; chmod 600 f; cat mine f base > /dev/null; \
        stat mine f base > /dev/null");
    live.restore("start");
    assert_eq!(live.sh("stat -c '%n %s %Y %Z %a' mine f base"), was);
    live.sh("setfattr -n user.k -v v mine; sync");
    live.checkpoint("again");
    assert_eq!(live.sh("stat -c '%n %Y' mine"), "mine 978307200\n");
    let secs = |file: &str| live.json(&["show", file])[0]["secs"].as_i64().unwrap();
    assert_eq!((secs("@:mine"), secs("start:mine")), (978_307_200, 978_307_200));
}

/// With a writeback cache the kernel keeps mtime itself. It sends each new one, but truncate(2) to
/// the same size sets none.
#[test]
fn with_a_writeback_cache_a_truncate_to_the_same_size_keeps_the_visible_time() {
    const CUT: &str = "import os
for f in 'mine', 'base': os.truncate(f, os.stat(f).st_size)
f = os.open('open', os.O_WRONLY); os.ftruncate(f, os.fstat(f).st_size)
os.close(os.open('empty', os.O_WRONLY | os.O_TRUNC)); os.truncate('short', 2)
os.truncate('long', 9999)";
    let live =
        Live::with_options("seq 100 > base; seq 100 > open; true > empty", &["-o", "writeback"]);
    live.sh("for f in mine short long; do seq 100 > $f; done; touch -d 2001-01-01 *; sync");
    let mut puppet = live.puppet("");
    puppet.run(CUT);
    let look = || live.sh("stat -c '%n %.9Y %s' mine base open empty short long");
    let seen = look();
    live.checkpoint("cut");
    for line in seen.lines() {
        let mut words = line.split(' ');
        let shown = live.json(&["show", &format!("cut:{}", words.next().unwrap())]);
        let (secs, nanos) =
            (shown[0]["secs"].as_i64().unwrap(), shown[0]["nanos"].as_u64().unwrap());
        assert_eq!(words.next().unwrap(), format!("{secs}.{nanos:09}"), "{line}");
    }
    live.sh("for f in mine base open empty short long; do echo more >> $f; done; sync");
    live.restore("cut");
    assert_eq!(look(), seen);
}
