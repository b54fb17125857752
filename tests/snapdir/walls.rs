//! Checkpoints are read-only, and their symlinks do not lead out of their tree.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::{Live, assert_same, shell, snapshot};
use crate::programs::without_numbers;

/// The attempts, as root, and the expected errno. The puppet is in the root of the mount; `c` is
/// the tree of a checkpoint, `h` the history of a file with one entry.
const REFUSED: &[(&str, &str)] = &[
    ("os.write(os.open(c + '/f', os.O_WRONLY), b'x')", "EROFS"),
    ("os.write(os.open(c + '/f', os.O_RDWR | os.O_APPEND), b'x')", "EROFS"),
    ("os.open(c + '/f', os.O_WRONLY | os.O_TRUNC)", "EROFS"),
    ("os.open(c + '/new', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.open(c + '/d/new', os.O_WRONLY | os.O_CREAT | os.O_EXCL)", "EROFS"),
    ("os.truncate(c + '/f', 0)", "EROFS"),
    ("os.posix_fallocate(os.open(c + '/f', os.O_WRONLY), 0, 100)", "EROFS"),
    ("os.copy_file_range(os.open('f', os.O_RDONLY), os.open(c + '/f', os.O_WRONLY), 3)", "EROFS"),
    ("os.mkdir(c + '/new')", "EROFS"),
    ("os.mkdir(c + '/d/new')", "EROFS"),
    ("os.mkdir('.jailfs/new')", "EROFS"),
    ("os.mkfifo(c + '/new')", "EROFS"),
    ("os.symlink('f', c + '/new')", "EROFS"),
    ("os.mknod(c + '/new', 0o100644)", "EROFS"),
    ("os.unlink(c + '/f')", "EROFS"),
    ("os.rmdir(c + '/empty')", "EROFS"),
    ("os.rmdir(c)", "EPERM"),
    ("os.rmdir('.jailfs/checkpoints')", "EROFS"),
    ("os.rmdir('.jailfs')", "EROFS"),
    ("os.unlink('.jailfs/status')", "EROFS"),
    ("os.unlink('.jailfs/checkpoints/' + number)", "EROFS"),
    ("os.open('.jailfs/status', os.O_WRONLY | os.O_TRUNC)", "EROFS"),
    ("os.open('.jailfs/checkpoints/z', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.symlink('/etc', '.jailfs/checkpoints/z')", "EROFS"),
    ("os.rename(c + '/f', c + '/g')", "EROFS"),
    ("os.rename(c + '/f', 'taken')", "EROFS"),
    ("os.rename('f', c + '/f')", "EROFS"),
    ("os.rename('f', c + '/new')", "EROFS"),
    ("os.rename('d', '.jailfs')", "EROFS"),
    ("os.rename('d', '.jailfs/d')", "EROFS"),
    ("os.rename('.jailfs', 'mine')", "EROFS"),
    ("os.rename(c, '.jailfs/checkpoints/other')", "EROFS"),
    ("os.rename('.jailfs/checkpoints', 'mine')", "EROFS"),
    ("exchange('f', c + '/f')", "EROFS"),
    ("exchange('d', '.jailfs')", "EROFS"),
    ("os.link(c + '/f', 'taken')", "EROFS"),
    ("os.link('f', c + '/new')", "EROFS"),
    ("os.link(c + '/f', c + '/new')", "EROFS"),
    ("linkat('/proc/self/fd/' + str(os.open(c + '/f', os.O_RDONLY)), 'taken')", "EROFS"),
    ("os.link('f', '.jailfs/f')", "EROFS"),
    ("os.mkdir('.jailfs')", "EEXIST"),
    ("os.symlink('f', '.jailfs')", "EEXIST"),
    ("os.open('.jailfs', os.O_WRONLY | os.O_CREAT)", "EISDIR"),
    ("os.chmod(c + '/f', 0o777)", "EROFS"),
    ("os.chmod(c, 0o777)", "EROFS"),
    ("os.chmod('.jailfs', 0o777)", "EROFS"),
    ("os.chown(c + '/f', 1, 1)", "EROFS"),
    ("os.lchown(c + '/in', 1, 1)", "EROFS"),
    ("os.utime(c + '/f', (1, 1))", "EROFS"),
    ("os.utime(c + '/in', (1, 1), follow_symlinks=False)", "EROFS"),
    ("os.utime('.jailfs/checkpoints')", "EROFS"),
    ("os.setxattr(c + '/f', 'user.new', b'x')", "EROFS"),
    ("os.setxattr(c + '/f', 'user.jailfs.origin', b'x')", "EROFS"),
    ("os.setxattr(c + '/f', 'trusted.x', b'x')", "EROFS"),
    ("os.removexattr(c + '/f', 'user.note')", "EROFS"),
    ("os.write(os.open(c + '/in', os.O_WRONLY), b'x')", "EROFS"),
    ("os.open(c + '/into/new', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.open('to-checkpoint/new', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.truncate('to-checkpoint/f', 0)", "EROFS"),
    ("os.unlink('to-checkpoint/f')", "EROFS"),
    ("os.link('to-checkpoint/f', 'taken')", "EROFS"),
    ("os.write(os.open(h + '/1', os.O_WRONLY), b'x')", "EROFS"),
    ("os.open(h + '/1', os.O_WRONLY | os.O_TRUNC)", "EROFS"),
    ("os.open(h + '/2', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.open('.jailfs/history/new', os.O_WRONLY | os.O_CREAT)", "EROFS"),
    ("os.truncate(h + '/1', 0)", "EROFS"),
    ("os.posix_fallocate(os.open(h + '/1', os.O_WRONLY), 0, 100)", "EROFS"),
    ("os.copy_file_range(os.open('f', os.O_RDONLY), os.open(h + '/1', os.O_WRONLY), 3)", "EROFS"),
    ("os.mkdir(h + '/new')", "EROFS"),
    ("os.mkdir('.jailfs/history/new')", "EROFS"),
    ("os.symlink('1', h + '/new')", "EROFS"),
    ("os.unlink(h + '/1')", "EROFS"),
    ("os.rmdir(h)", "EROFS"),
    ("os.rmdir('.jailfs/history')", "EROFS"),
    ("os.rename(h + '/1', h + '/2')", "EROFS"),
    ("os.rename(h + '/1', 'taken')", "EROFS"),
    ("os.rename('f', h + '/1')", "EROFS"),
    ("os.rename(h, '.jailfs/history/g')", "EROFS"),
    ("os.rename('.jailfs/history', 'mine')", "EROFS"),
    ("exchange('f', h + '/1')", "EROFS"),
    ("os.link(h + '/1', 'taken')", "EROFS"),
    ("os.link('f', h + '/new')", "EROFS"),
    ("os.chmod(h + '/1', 0o777)", "EROFS"),
    ("os.chmod(h, 0o777)", "EROFS"),
    ("os.chown(h + '/1', 1, 1)", "EROFS"),
    ("os.utime(h + '/1', (1, 1))", "EROFS"),
    ("os.setxattr(h + '/1', 'user.new', b'x')", "EROFS"),
    ("os.removexattr(h + '/1', 'user.note')", "EROFS"),
    ("os.getxattr(h + '/1', 'user.jailfs.origin')", "ENODATA"),
    ("os.readlink(h + '/1')", "EINVAL"),
    ("os.truncate('to-edit', 0)", "EROFS"),
    ("os.open(h + '/1/x', os.O_RDONLY)", "ENOTDIR"),
];

const BASE: &str =
    "echo one > f; setfattr -n user.note -v x f; mkdir d empty; ln -s f in; ln -s d into";

#[test]
fn nothing_in_the_snapshot_directory_can_be_changed_in_any_way() {
    for options in [&[][..], &["-o", "links=rewrite,snapdir=visible"], &["-o", "writeback"]] {
        let live = Live::with_options(BASE, options);
        live.sh("echo two >> f; ln -s .jailfs/checkpoints/x to-checkpoint; \
            ln -s .jailfs/history/f/1 to-edit");
        live.checkpoint("x");
        let number = live.json(&["log"])[0]["id"].to_string();
        let past = live.mnt.join(".jailfs/checkpoints/x");
        let before = (without_numbers(snapshot(&past, false)), without_numbers(live.snapshot()));
        let history = || {
            live.sh(
                "find .jailfs/history -printf '%p %m %s %U %G\n' | sort; cat .jailfs/history/f/1",
            )
        };
        let edits = history();
        let mut root = live.puppet("");
        root.run(&format!(
            "c, h, number = '.jailfs/checkpoints/x', '.jailfs/history/f', '{number}'"
        ));
        for (what, errno) in REFUSED {
            assert_eq!(root.fail(what), *errno, "{what} with {options:?}");
        }
        root.end();
        assert_same(&before.0, &without_numbers(snapshot(&past, false)), "the checkpoint");
        assert_same(&before.1, &without_numbers(live.snapshot()), "the tree");
        assert_eq!(history(), edits, "with {options:?}");
        assert_eq!(live.jailfs(&["diff", "@-1"]), "");
    }
}

#[test]
fn a_write_through_a_mapping_reaches_no_checkpoint_and_is_dropped() {
    let live = Live::new("echo one > f");
    live.sh("seq 1 5000 > f");
    live.checkpoint("x");
    let wanted = live.sh("md5sum < f");
    let mut writer = live.puppet("");
    // The kernel sends no OPEN, and root passes every mode, so the file can be opened for writing.
    writer.run("m = mapped('.jailfs/checkpoints/x/f')");
    writer.run("m.__setitem__(slice(0, 8), b'attacked')");
    let shown = live.jailfs(&["show", "x:f"]);
    assert!(shown.starts_with("1\n2\n"), "the content in the store is unchanged");
    live.restore("x");
    assert_eq!(live.sh("md5sum < f"), wanted);
    // The daemon drops the written page and invalidates it in the kernel. No sync fails by it.
    writer.run("m.flush()");
    writer.run("m.__setitem__(slice(0, 8), b'attacked')");
    live.checkpoint("y");
    assert_eq!(live.jailfs(&["diff", "x", "y"]), "");
    writer.end();
    let end = Instant::now() + Duration::from_secs(30);
    while live.sh("md5sum < .jailfs/checkpoints/x/f") != wanted {
        assert!(Instant::now() < end, "the kernel still shows the bytes written into its pages");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn endless_writes_through_a_mapping_of_a_checkpoint_stop_no_reader() {
    const SIZE: usize = 32 << 20;
    let live = Live::new(&format!("head -c {SIZE} /dev/urandom > big; sync big; echo one > f"));
    live.checkpoint("x");
    let wanted = live.sh("md5sum < big");
    let [mut writer, mut reader] = [live.puppet(""), live.puppet("")];
    writer.run("m = mapped('.jailfs/checkpoints/x/big')");
    // Every page is read before it is written, and its neighbours are written back and invalidated
    // meanwhile.
    writer.begin(&format!(
        "for n in range(6):\n for at in range(0, {SIZE}, 65536): m[at] = 7\n m.flush()"
    ));
    // The disk is read each time, by the test and so by the daemon.
    reader.run(&format!(
        "below, past = [os.open(p, os.O_RDONLY) for p in ('{}', '.jailfs/checkpoints/x/big')]",
        live.base.join("big").display()
    ));
    reader.begin(&format!(
        "for n in range(6):\n for at in range(0, {SIZE}, 1 << 20):\n  [os.posix_fadvise(f, 0, 0, \
         4) for f in (below, past)]\n  os.pread(past, 65536, at)"
    ));
    writer.answer().unwrap();
    reader.answer().unwrap();
    writer.end();
    reader.end();
    let end = Instant::now() + Duration::from_secs(30);
    while live.sh("md5sum < .jailfs/checkpoints/x/big") != wanted {
        assert!(Instant::now() < end, "the kernel still shows the bytes written into its pages");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Links, their READLINK text, and the result of following them.
#[test]
fn a_link_in_a_checkpoint_leads_neither_out_nor_into_the_live_tree() {
    for policy in ["deny", "show", "rewrite", "literal"] {
        let mut live = Live::with_options(
            "mkdir -p a/b; echo then > f; echo deep > a/b/g; ln -s g a/b/near",
            &[],
        );
        live.umount();
        let (mnt, base) = (live.mnt.display().to_string(), live.base.display().to_string());
        let mount = format!(
            "{} mount base mnt --store store -o links={policy}",
            env!("CARGO_BIN_EXE_jailfs")
        );
        shell(live.outside(), &mount);
        let secret = live.outside().join("secret");
        std::fs::write(&secret, "outside").unwrap();
        live.sh(&format!(
            "cd a/b; ln -s ../../f up; ln -s {mnt}/f by-mount; ln -s {base}/f by-base; \
             ln -s ../../../secret out
            ln -s ../../../../../../secret far; ln -s {out}/secret abs
            ln -s ../../.jailfs/checkpoints/x/f past
            ln -s ../b/../../f odd; ln -s {mnt} root; ln -s /proc/self/cwd/f magic; ln ../../f hard
            ln up up-too",
            out = live.outside().display()
        ));
        live.checkpoint("x");
        live.sh("rm f; echo now > f; rm -r a");
        let past = live.mnt.join(".jailfs/checkpoints/x/a/b");
        let read = |name: &str| {
            std::fs::read_to_string(past.join(name)).map_err(|e| e.raw_os_error().unwrap())
        };
        for name in ["up", "by-mount", "by-base", "odd", "root/f", "hard", "up-too"] {
            assert_eq!(read(name).as_deref(), Ok("then\n"), "{name} with links={policy}");
        }
        assert_eq!(read("near").as_deref(), Ok("deep\n"));
        for name in ["out", "far", "abs", "magic"] {
            assert_eq!(read(name), Err(libc::EXDEV), "{name} with links={policy}");
        }
        // There is no `.jailfs` in a checkpoint.
        assert_eq!(read("past"), Err(libc::ENOENT), "with links={policy}");
        if matches!(policy, "show" | "literal") {
            for (name, text) in
                [("up", "../../f"), ("out", "../../../secret"), ("by-mount", &format!("{mnt}/f"))]
            {
                assert_eq!(
                    std::fs::read_link(past.join(name)).unwrap().to_str(),
                    Some(text),
                    "{name}"
                );
            }
        }
        let lines = live.json(&["status"]);
        assert!(lines.iter().any(|line| line["type"] == "refused_link"
            && line["path"].as_str().is_some_and(|path| path.starts_with(".jailfs/checkpoints/"))));
        std::fs::remove_file(&secret).unwrap();
        shell(live.outside(), &format!("{} umount mnt", env!("CARGO_BIN_EXE_jailfs")));
        live.mount();
    }
}

#[test]
fn dot_dot_from_a_checkpoint_leads_back_the_way_it_was_entered() {
    let live = Live::new("mkdir -p a/b; echo f > f");
    live.checkpoint("x");
    let mut inside = live.puppet(".jailfs/checkpoints/x/a/b");
    inside.gives("os.listdir('../..')", "['a', 'f']");
    inside.gives(
        "sorted(os.listdir('../../..')), sorted(os.listdir('../../../..'))",
        "(['x'], ['checkpoints', 'forks', 'history', 'log', 'status'])",
    );
    inside.gives("sorted(os.listdir('../../../../..'))", "['a', 'f']");
    inside.gives("os.stat('../../../../..').st_ino", "1");
    inside.gives(
        "os.path.samefile('../../../../../..', '/proc/self/root' + \
         os.path.dirname(os.getcwd().split('/.jailfs')[0]))",
        "True",
    );
}

fn mount(dir: &Path, options: &str) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_jailfs"))
        .args(["mount", "base", "mnt", "--store", "store", "-o", options])
        .current_dir(dir)
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_base_that_has_the_name_is_refused_or_shown_with_another_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    shell(dir, "mkdir -p base/.jailfs mnt; echo mine > base/.jailfs/f");
    let (mounted, said) = mount(dir, "snapdir=hidden");
    assert!(
        !mounted
            && said.contains("the tree has an entry with this name")
            && said.contains("snapname=NAME"),
        "{said}"
    );
    let umount = format!("{} umount mnt", env!("CARGO_BIN_EXE_jailfs"));
    assert!(mount(dir, "snapname=.past").0);
    shell(
        dir,
        "cat mnt/.jailfs/f; mkdir mnt/.past/checkpoints/x; cat mnt/.past/checkpoints/x/.jailfs/f",
    );
    shell(dir, &umount);
    assert!(mount(dir, "snapdir=off").0);
    assert_eq!(shell(dir, "cat mnt/.jailfs/f; rm -r mnt/.jailfs; ls -A mnt"), "mine\n");
    shell(dir, &umount);
    // When it is removed from the tree, the name is free.
    assert!(mount(dir, "snapdir=hidden").0);
    assert_eq!(shell(dir, "cat mnt/.jailfs/checkpoints/x/.jailfs/f; ls -A mnt"), "mine\n");
    shell(dir, &umount);
}

#[test]
fn other_users_can_read_checkpoints_and_not_make_them() {
    let live = Live::with_options(
        "echo f > f; echo p > private; chmod 600 private",
        &["-o", "allow_other"],
    );
    live.checkpoint("x");
    std::fs::set_permissions(live.outside(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let mut other = live.puppet("");
    other.run("os.setgid(65534)");
    other.run("os.setuid(65534)");
    other.gives("open('.jailfs/checkpoints/x/f').read()", "'f\\n'");
    assert_eq!(other.fail("open('.jailfs/checkpoints/x/private')"), "EACCES");
    assert_eq!(other.fail("os.mkdir('.jailfs/checkpoints/y')"), "EACCES");
}
