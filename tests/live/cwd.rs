//! Processes whose working directory is in the mount, while the tree below them is replaced.
//!
//! No change of the directory lets a process leave the mount, or work in a tree that is not the
//! present one.

use crate::harness::{Live, Shell, assert_same};

const BASE: &str = "
    mkdir -p stay/sub gone/deep/deeper moved/sub/subsub a/in b/in
    echo s > stay/file; echo g > gone/deep/deeper/file; echo m > moved/sub/file
    echo a > a/in/which; echo b > b/in/which
";

/// Each `..` leads to a directory of the mount, or fails: a removed directory is no way out.
fn cannot_climb_out(live: &Live, shell: &mut Shell, depth: usize) {
    std::fs::write(live.outside().join("secret"), "of the host").unwrap();
    for levels in 1..=depth {
        let up = vec![".."; levels].join("/");
        let seen = shell.run(&format!("ls -a {up} 2>&1; cat {up}/secret {up}/etc/passwd 2>&1"));
        assert!(!seen.contains("secret\n") && !seen.contains("etc\n"), "{up}: {seen}");
        assert_eq!(
            seen.matches("No such file").count(),
            2 + usize::from(seen.contains("ls:")),
            "{up}: {seen}"
        );
    }
}

#[test]
fn a_shell_in_a_kept_directory_works_on_in_the_restored_tree() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut shell = Shell::start(&live.mnt.join("stay"));
    shell.gives("ls; echo changed > file; echo new > new; mkdir -p sub/x", "file\nsub");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree");
    shell.gives("ls", "file\nsub");
    shell.gives("cat file", "s");
    shell.gives("pwd -P", live.mnt.join("stay").to_str().unwrap());
    shell.gives("cd .. && ls stay && cd stay/sub && cd .. && ls", "file\nsub\nfile\nsub");
    shell.gives("echo again > new && cat new", "again");
    assert_eq!(live.read("stay/new"), "again\n");
    live.restore("start");
    shell.gives("ls; cat new", "file\nsub\ncat: new: No such file or directory\nstatus 1");
}

#[test]
fn a_shell_in_a_directory_that_the_restore_removes_has_a_dead_directory() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    live.sh("mkdir -p new/deep/deeper; echo x > new/deep/deeper/x");
    let mut shell = Shell::start(&live.mnt.join("new/deep/deeper"));
    let mut above = Shell::start(&live.mnt.join("new"));
    shell.gives("cat x; ls", "x\nx");
    above.gives("ls -R", ".:\ndeep\n\n./deep:\ndeeper\n\n./deep/deeper:\nx");
    live.restore("start");
    for (shell, depth) in [(&mut shell, 3), (&mut above, 1)] {
        shell.gives("ls", "");
        assert!(shell.run("echo y > y").contains("No such file or directory"));
        assert!(shell.run("mkdir y").contains("No such file or directory"));
        assert!(shell.run("pwd -P; /bin/pwd").contains("No such file or directory"));
        cannot_climb_out(&live, shell, depth);
    }
    assert!(!live.exists("new"));
    live.sh("mkdir -p new/deep/deeper");
    assert!(shell.run("echo y > y").contains("No such file or directory"));
    shell.gives("cd \"$PWD\" 2> /dev/null && echo y > y && ls", "y");
    assert_eq!(live.read("new/deep/deeper/y"), "y\n");
}

#[test]
fn a_shell_in_a_directory_that_the_restore_brings_back_enters_it_again_by_path() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut shell = Shell::start(&live.mnt.join("gone/deep/deeper"));
    shell.gives("cat file", "g");
    live.sh("rm -rf gone");
    assert!(shell.run("ls file").contains("No such file or directory"));
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree");
    assert!(shell.run("touch late").contains("No such file or directory"));
    cannot_climb_out(&live, &mut shell, 3);
    shell.gives("cd \"$PWD\" && ls && cat file && cd ../.. && ls", "file\ng\ndeep");
    assert_same(&start, &live.snapshot(), "the tree");
}

#[test]
fn a_shell_in_a_directory_that_the_restore_moves_back_is_in_neither_place() {
    for forth in ["mv moved stay/moved", "mv moved elsewhere", "mkdir -p n/n; mv moved n/n/moved"] {
        let live = Live::new(BASE);
        live.checkpoint("start");
        let start = live.snapshot();
        let mut in_moved = Shell::start(&live.mnt.join("moved"));
        let mut below = Shell::start(&live.mnt.join("moved/sub/subsub"));
        live.sh(forth);
        in_moved.gives("cat sub/file", "m");
        below.gives("cat ../file", "m");
        live.restore("start");
        assert_same(&start, &live.snapshot(), "the tree");
        for (shell, depth) in [(&mut in_moved, 1), (&mut below, 3)] {
            assert!(shell.run("echo x > late").contains("No such file or directory"), "{forth}");
            assert!(shell.run("mkdir late").contains("No such file or directory"), "{forth}");
            cannot_climb_out(&live, shell, depth);
        }
        in_moved.gives("cd \"$PWD\" && cat sub/file && cd ../stay && ls", "m\nfile\nsub");
        below
            .gives("cd \"$PWD\" && cat ../file && cd ../../.. && ls", "m\na\nb\ngone\nmoved\nstay");
        assert_same(&start, &live.snapshot(), "the tree");
    }
}

#[test]
fn a_shell_that_entered_a_directory_at_its_later_place_has_a_dead_directory() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    live.sh("mkdir -p x/y; mv moved x/y/moved");
    live.checkpoint("later");
    let later = live.snapshot();
    let mut shell = Shell::start(&live.mnt.join("x/y/moved/sub"));
    live.restore("start");
    cannot_climb_out(&live, &mut shell, 2);
    assert!(shell.run("touch late").contains("No such file or directory"));
    live.restore("later");
    assert_same(&later, &live.snapshot(), "the tree");
    assert!(
        shell.run("touch late").contains("No such file or directory"),
        "also when it is there again"
    );
    cannot_climb_out(&live, &mut shell, 4);
    shell.gives("cd \"$PWD\" && ls", "file\nsubsub");
}

#[test]
fn shells_in_exchanged_directories_find_the_right_one_by_path_only() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let start = live.snapshot();
    let mut in_a = Shell::start(&live.mnt.join("a/in"));
    let mut in_b = Shell::start(&live.mnt.join("b"));
    let mut puppet = live.puppet("");
    puppet.run("exchange('a', 'b')");
    in_a.gives("cat which", "a");
    in_b.gives("cat in/which", "b");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "the tree");
    for (shell, depth) in [(&mut in_a, 2), (&mut in_b, 1)] {
        assert!(shell.run("touch late").contains("No such file or directory"));
        cannot_climb_out(&live, shell, depth);
    }
    in_a.gives("cd \"$PWD\" && cat which", "a");
    in_b.gives("cd \"$PWD\" && cat in/which", "b");
    puppet.run("exchange('a', 'b/in')");
    live.restore("start");
    assert_same(&start, &live.snapshot(), "a directory exchanged with one below another");
}

#[test]
fn a_name_in_a_dead_directory_does_not_resolve_although_its_file_is_open() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    let mut holder = live.puppet("moved/sub");
    holder.run("fd = os.open('file', os.O_RDWR)");
    let mut shell = Shell::start(&live.mnt.join("moved/sub"));
    shell.gives("cat file", "m");
    live.sh("mv moved stay/moved");
    live.restore("start");
    // The file did not change, so its holder goes on. The directory did, so none of its names
    // resolves.
    holder.run("os.pwrite(fd, b'M', 0)");
    assert_eq!(live.read("moved/sub/file"), "M\n");
    assert!(shell.run("echo late > file").contains("No such file or directory"));
    assert!(shell.run("cat file").contains("No such file or directory"));
    assert!(shell.run("mv file ../../x").contains("No such file or directory"));
    assert_eq!(live.read("moved/sub/file"), "M\n");
}

#[test]
fn a_descriptor_of_an_orphaned_directory_creates_nothing() {
    let live = Live::new(BASE);
    live.checkpoint("start");
    live.sh("mkdir new; echo x > new/x");
    let start = live.snapshot();
    live.checkpoint("with new");
    let mut puppet = live.puppet("");
    puppet.run("kept = os.open('stay', os.O_RDONLY)");
    puppet.run("gone = os.open('new', os.O_RDONLY)");
    live.restore("start");
    for code in [
        "os.mkdir('d', dir_fd=gone)",
        "os.mkfifo('p', dir_fd=gone)",
        "os.symlink('x', 'l', dir_fd=gone)",
        "os.open('f', os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=gone)",
        "os.rename('stay/file', 'f', dst_dir_fd=gone)",
        "os.link('stay/file', 'f', dst_dir_fd=gone)",
        "os.rename('x', 'stay/x', src_dir_fd=gone)",
        "os.unlink('x', dir_fd=gone)",
        "os.stat('x', dir_fd=gone)",
    ] {
        assert_eq!(puppet.fail(code), "ENOENT", "{code}");
    }
    puppet.gives("os.listdir(gone), os.fstat(gone).st_nlink", "([], 0)");
    live.restore("with new");
    assert_same(&start, &live.snapshot(), "the tree");
    assert_eq!(
        puppet.fail("os.mkdir('d', dir_fd=gone)"),
        "ENOENT",
        "also when its name is there again"
    );
    puppet.run("os.mkdir('d', dir_fd=kept); os.rmdir('d', dir_fd=kept)");
    puppet.gives("sorted(os.listdir(kept))", "['file', 'sub']");
    puppet.gives("os.stat(kept).st_ino == os.stat('stay').st_ino", "True");
}

#[test]
fn a_reader_of_a_directory_goes_on_with_the_names_of_the_restored_tree() {
    let live = Live::new("mkdir many; cd many; for i in $(seq 3000); do : > name$i; done");
    live.checkpoint("start");
    let mut puppet = live.puppet("");
    puppet.run("many = os.scandir('many'); first = [next(many).name for _ in range(10)]");
    live.sh("rm many/name2*; for i in $(seq 200); do : > many/other$i; done");
    puppet.run("other = os.scandir('many'); next(other)");
    live.restore("start");
    // No name appears twice, and none that existed all the time is missing.
    puppet.run("rest = [e.name for e in many]; names = first + rest");
    puppet.gives("len(names) == len(set(names))", "True");
    puppet.gives("{f'name{i}' for i in range(3000, 3001)} <= set(names)", "True");
    puppet.gives(
        "{n for n in (f'name{i}' for i in range(1, 3001)) if not n.startswith('name2')} - \
         set(names)",
        "set()",
    );
    puppet.gives("len(os.listdir('many'))", "3000");
    puppet.run("seen = [e.name for e in other]");
    puppet.gives("len(seen) == len(set(seen))", "True");
}

#[test]
fn a_restore_changes_more_than_twenty_thousand_names_under_a_shell() {
    let live = Live::new("mkdir -p here/sub; echo x > here/file; mkdir there; echo y > there/y");
    live.checkpoint("start");
    let mut shell = Shell::start(&live.mnt.join("here"));
    let mut gone = live.puppet("there");
    let mut maker = live.puppet("");
    maker.run("fd = os.open('here/file', os.O_RDWR)");
    maker.run(
        "for d in range(2): os.mkdir(f'there/{d}'); [os.mknod(f'there/{d}/{i}') for i in \
         range(10050)]",
    );
    live.sh("mv there here/there");
    live.restore("start");
    shell.gives("ls", "file\nsub");
    shell.gives("cd .. && ls there && cd here/sub && cd .. && echo z > z && ls", "y\nfile\nsub\nz");
    shell.gives("pwd -P", live.mnt.join("here").to_str().unwrap());
    maker.gives("os.pwrite(fd, b'late', 0)", "4");
    assert_eq!(live.read("here/file"), "late");
    gone.gives("os.listdir('.')", "[]");
    assert_eq!(gone.fail("os.mkdir('x')"), "ENOENT");
    assert!(!live.exists("here/there"));
    assert_eq!(live.sh("find . | wc -l").trim(), "7");
}
