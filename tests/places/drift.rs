//! Drift: other programs change the base. The mount notices it where it matters, reports it, and
//! never mixes old and new content.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::device::{EXT4, on_image};
use crate::harness::{Live, shell};
use crate::refused;

/// Waits for a condition: invalidations come from another thread.
#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < end, "it does not come: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The whole content of a file. `None` if the read failed because the file is another one now.
fn read(path: &Path) -> Option<Vec<u8>> {
    match std::fs::read(path) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.raw_os_error() == Some(libc::EIO) => None,
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// The changes of `part` in the base. The tree has a changed byte in the file.
const CHANGES: &[(&str, &str)] = &[
    ("edited in place", "echo more >> part"),
    ("the same size", "printf X | dd of=part bs=1 seek=9000 conv=notrunc status=none"),
    (
        "the same size and time",
        "touch -r part t; printf X | dd of=part bs=1 seek=9000 conv=notrunc status=none; \
         touch -r t part; rm t",
    ),
    ("truncated", "truncate -s 5000 part"),
    ("emptied", ": > part"),
    ("removed", "rm part"),
    ("replaced", "seq 9000 > fresh; mv fresh part"),
    ("a directory", "rm part; mkdir part; echo x > part/x"),
    ("a link", "rm part; ln -s whole part"),
    ("a fifo", "rm part; mkfifo part"),
    ("its directory replaced", "mkdir ../new; cp -a . ../new; cd ..; mv DIR former; mv new DIR"),
];

#[test]
fn every_change_of_a_copied_up_file_in_the_base_is_reported_and_never_mixed() {
    let mut live = Live::new(&format!(
        "for n in $(seq 0 {}); do mkdir d$n; seq 9000 > d$n/part; echo whole > d$n/whole; \
         echo all > d$n/all; done",
        CHANGES.len()
    ));
    live.applied = true;
    live.sh("for d in d*; do printf Y | dd of=$d/part bs=1 seek=20000 conv=notrunc status=none; \
        echo mine > $d/all; done");
    let known = live.read("d0/part").into_bytes();
    live.sh("cat d*/part > /dev/null");
    let mut held: Vec<File> = Vec::new();
    for n in 0..CHANGES.len() {
        held.push(File::open(live.mnt.join(format!("d{n}/part"))).unwrap());
    }
    live.checkpoint("before");
    for (n, (what, change)) in CHANGES.iter().enumerate() {
        shell(&live.base.join(format!("d{n}")), &change.replace("DIR", &format!("d{n}")));
        // Reads from the page cache give the former content. Other reads fail.
        let seen = read(&live.mnt.join(format!("d{n}/part")));
        assert!(seen.as_ref().is_none_or(|seen| *seen == known), "{what}: another content");
        let mut bytes = vec![0; known.len()];
        match held[n].read_exact_at(&mut bytes, 0) {
            Ok(()) => assert_eq!(bytes, known, "{what}: through a descriptor"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO), "{what}"),
        }
    }
    drop(held);
    let before = crate::harness::snapshot(&live.base, true);
    let (status, output) = (live.jailfs(&["status"]), refused(&live.mnt, &["apply"], 3));
    for (n, (what, _)) in CHANGES.iter().enumerate() {
        // If a directory was replaced, the status reports the directory.
        let named =
            |text: &str| text.contains(&format!("d{n}/part")) || text.contains(&format!(" d{n}:"));
        assert!(named(&status), "{what}: {status}");
        assert!(named(&output), "{what}: {output}");
    }
    assert_eq!(before, crate::harness::snapshot(&live.base, true), "something was written");
    // The page cache is empty.
    live.remount();
    for (n, (what, _)) in CHANGES.iter().enumerate() {
        assert_eq!(read(&live.mnt.join(format!("d{n}/part"))), None, "{what}");
        assert_eq!(
            live.read(&format!("d{n}/all")),
            "mine\n",
            "{what}: copied-up files are not affected"
        );
        // A file that is written completely is whole again, and still a conflict.
        live.sh(&format!("echo mine > d{n}/part"));
        assert_eq!(live.read(&format!("d{n}/part")), "mine\n");
    }
    let output = refused(&live.mnt, &["apply"], 3);
    assert!((0..CHANGES.len()).all(|n| output.contains(&format!("d{n}"))), "{output}");
    live.jailfs(&["check"]);
}

#[test]
fn a_changed_base_file_that_was_not_copied_up_fails_once_and_then_shows_its_new_content() {
    let mut live = Live::new("head -c 300000 /dev/zero | tr '\\0' a > f");
    live.applied = true;
    let seen = live.mnt.join("f");
    let held = File::open(&seen).unwrap();
    let mut bytes = vec![0; 300_000];
    held.read_exact_at(&mut bytes, 0).unwrap();
    std::fs::write(live.base.join("f"), vec![b'b'; 200_000]).unwrap();
    // The page cache has the former content, completely.
    held.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|b| *b == b'a'));
    let advice = nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    nix::fcntl::posix_fadvise(&held, 0, 0, advice).unwrap();
    let refused = held.read_at(&mut bytes, 0).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EIO));
    until("it is shown as it is", || read(&seen).is_some_and(|now| now == vec![b'b'; 200_000]));
    assert!(live.jailfs(&["status"]).contains("changed in the base while the kernel cached it"));
}

#[test]
fn no_write_lands_at_an_offset_that_the_former_content_determined() {
    let mut live = Live::new("head -c 10000 /dev/zero | tr '\\0' a > f");
    live.applied = true;
    let mut file =
        std::fs::OpenOptions::new().append(true).read(true).open(live.mnt.join("f")).unwrap();
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 10_000);
    std::fs::write(live.base.join("f"), "short").unwrap();
    let error = file.write_all(b" more").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    // A program that stats the file again finds its end.
    until("it can be written", || {
        file.metadata().unwrap().len() == 5 && file.write_all(b" more").is_ok()
    });
    let mut all = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut all).unwrap();
    assert_eq!(all.replace('\0', "0"), "short more");
    drop(file);
    // A program that overwrites the whole file does not depend on its former content.
    std::fs::write(live.base.join("f"), "another").unwrap();
    std::fs::write(live.mnt.join("f"), "mine").unwrap();
    assert_eq!(live.read("f"), "mine");
}

/// ext4 gives the inode number of a removed file to the next file.
#[test]
fn a_reused_inode_number_is_another_file() {
    let fill = "mkdir d; seq 3000 > d/covered; mkdir sub; echo x > sub/x";
    let (mut live, _below, _) = on_image(EXT4, fill);
    live.sh("echo mine >> d/covered; touch sub/new");
    live.checkpoint("before");
    live.umount();
    let number = |path: &str| std::fs::metadata(live.base.join(path)).unwrap().ino();
    let (file, dir) = (number("d/covered"), number("sub"));
    std::fs::remove_file(live.base.join("d/covered")).unwrap();
    std::fs::remove_dir_all(live.base.join("sub")).unwrap();
    let mut again = (false, false);
    for n in 0..2000 {
        let (f, d) = (format!("f{n}"), format!("g{n}"));
        std::fs::create_dir(live.base.join(&d)).unwrap();
        std::fs::write(live.base.join(&f), format!("file {n}\n")).unwrap();
        again = (again.0 || number(&f) == file, again.1 || number(&d) == dir);
        if again == (true, true) {
            break;
        }
    }
    assert!(again.0 || again.1, "the host reuses the number");
    live.mount();
    for entry in std::fs::read_dir(&live.mnt).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if let Some(n) = name.strip_prefix('f') {
            assert_eq!(live.read(&name), format!("file {n}\n"));
        } else if name.starts_with('g') {
            assert_eq!(std::fs::read_dir(live.mnt.join(&name)).unwrap().count(), 0, "{name}");
        }
    }
    let found = live.sh("find . -type f -o -type d | xargs stat -c %i | sort | uniq -d");
    assert_eq!(found, "", "two nodes have one number");
    assert_eq!(read(&live.mnt.join("d/covered")), None);
    assert!(live.jailfs(&["status"]).contains("d/covered"));
    live.umount();
}

#[test]
fn a_copied_up_directory_that_is_removed_in_the_base_is_reported() {
    let mut live = Live::new("mkdir -p d/e; echo x > d/e/x; echo y > d/y");
    live.applied = true;
    live.sh("echo new > d/new");
    live.umount();
    shell(&live.base, "mv d elsewhere");
    live.mount();
    assert_eq!(live.sh("ls d; ls elsewhere"), "new\ne\ny\n");
    let status = live.jailfs(&["status"]);
    assert!(status.contains('d') && (status.contains("was removed from the base")), "{status}");
    let output = refused(&live.mnt, &["apply"], 3);
    assert!(output.contains('d'), "{output}");
    // A file in its place.
    live.umount();
    shell(&live.base, "echo file > d");
    live.mount();
    assert_eq!(live.sh("ls d"), "new\n");
    refused(&live.mnt, &["apply"], 3);
    assert_eq!(std::fs::read_to_string(live.base.join("d")).unwrap(), "file\n");
}

/// Reads a file until the mount shows its present content. Before that, reads may fail or give the
/// former content, but never a mix.
#[track_caller]
fn shown(live: &Live, path: &str, wanted: &[u8], former: &[u8]) {
    let seen = live.mnt.join(path);
    until(path, || match read(&seen) {
        Some(now) if now == wanted => true,
        None => false,
        Some(now) => {
            let begin = String::from_utf8_lossy(&now[..now.len().min(100)]);
            assert!(now == former, "{path} is mixed, {} bytes: {begin:?}", now.len());
            // A file that is completely in the page cache is read without a request.
            let held = File::open(&seen).unwrap();
            nix::fcntl::posix_fadvise(
                &held,
                0,
                0,
                nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED,
            )
            .unwrap();
            false
        }
    });
}

/// Reads only the first page of a file into the page cache.
fn remember_a_page(path: &Path) {
    let file = File::open(path).unwrap();
    nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM)
        .unwrap();
    assert!(file.read_at(&mut [0; 4096], 0).unwrap() > 0);
}

/// The kernel goes on using pages that it read before. Later changes are compared with that
/// content.
#[test]
fn a_change_of_the_base_after_a_switch_is_not_mixed_with_earlier_reads() {
    for verb in [&["apply"][..], &["restore", "first"], &["discard"]] {
        let mut live = Live::new(
            "echo begun > log; echo un > un; echo shut > shut; seq 90000 > big; cp big wide",
        );
        live.applied = true;
        live.checkpoint("first");
        live.sh("cat log un shut");
        live.sh("echo agent line >> log; chmod 600 shut wide; cat log un shut");
        ["big", "wide"].iter().for_each(|path| remember_a_page(&live.mnt.join(path)));
        live.jailfs(verb);
        let all = ["log", "un", "shut", "big", "wide"];
        let former = all.map(|path| std::fs::read(live.base.join(path)).unwrap());
        shell(
            &live.base,
            "for path in log un shut; do echo user line >> $path; done; tr 0-9 a-j < big > t; \
             cat t > big; cat t > wide; rm t",
        );
        for (path, former) in all.iter().zip(former) {
            shown(&live, path, &std::fs::read(live.base.join(path)).unwrap(), &former);
        }
    }
}

/// Operations that copy `f` up, and its path afterwards.
const RECORDS: &[(&str, &str)] = &[
    ("mv f g", "g"),
    ("ln f g", "g"),
    ("chmod 600 f", "f"),
    ("touch -d @5 f", "f"),
    ("setfattr -n user.x -v y f", "f"),
    ("rm f", "/proc/self/fd"),
    ("echo over > g; mv g f", "/proc/self/fd"),
];

#[test]
fn cached_pages_of_a_former_content_do_not_stay_in_a_copied_up_file() {
    let mut live = Live::new(&format!(
        "for n in $(seq 0 {}); do mkdir log$n big$n; echo line > log$n/f; seq 90000 > big$n/f; \
         done",
        RECORDS.len() - 1
    ));
    live.applied = true;
    for (n, (record, path)) in RECORDS.iter().enumerate() {
        for (dir, change) in
            [("log", "echo user line >> f"), ("big", "tr 0-9 a-j < f > t; cat t > f; rm t")]
        {
            let dir = format!("{dir}{n}");
            let held = File::open(live.mnt.join(&dir).join("f")).unwrap();
            let former = std::fs::read(live.base.join(&dir).join("f")).unwrap();
            remember_a_page(&live.mnt.join(&dir).join("f"));
            shell(&live.base.join(&dir), change);
            shell(&live.mnt.join(&dir), record);
            let path = match *path {
                "/proc/self/fd" => {
                    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&held))
                }
                name => format!("{dir}/{name}"),
            };
            shown(&live, &path, &std::fs::read(live.base.join(&dir).join("f")).unwrap(), &former);
        }
    }
}

/// Editors and git save like this.
#[test]
fn a_file_that_is_replaced_in_the_base_shows_its_new_content() {
    let mut live = Live::new(
        "seq 90000 > f; mkdir -p d/e a b; echo x > d/x; echo y > d/e/y; cp f d/e/f; cp f a/f; \
         echo b > b/f; cp f gone; echo 1 > sub",
    );
    live.applied = true;
    live.sh("stat f gone a/f b/f d/x d/e/f d/e/y sub");
    for path in ["f", "gone", "a/f", "d/e/f"] {
        remember_a_page(&live.mnt.join(path));
    }
    let former = std::fs::read(live.base.join("f")).unwrap();
    shell(
        &live.base,
        "tr 0-9 a-j < f > t; mv t f; cp -r d other; echo new > other/new; echo z > other/e/f; \
         mv d former; mv other d
        mv a t; mv b a; mv t b; rm gone sub; mkdir sub; echo 2 > sub/2",
    );
    // A path lookup finds the new file at once.
    assert_eq!(live.sh("cat d/new; cat d/x"), "new\nx\n");
    let now = |path: &str| std::fs::read(live.base.join(path)).unwrap();
    for path in ["f", "d/e/f", "a/f", "b/f", "d/e/y", "d/x"] {
        let former = if path == "b/f" { b"b\n".to_vec() } else { former.clone() };
        shown(&live, path, &now(path), &former);
    }
    until("what was removed is gone", || match File::open(live.mnt.join("gone")) {
        Ok(mut file) => {
            let mut bytes = Vec::new();
            assert!(file.read_to_end(&mut bytes).is_err(), "it is still read");
            false
        }
        Err(error) => error.kind() == std::io::ErrorKind::NotFound,
    });
    for dir in ["d", "d/e", "a", "b", "former"] {
        until(dir, || {
            std::fs::read_dir(live.mnt.join(dir))
                .is_ok_and(|mut names| names.all(|name| name.is_ok()))
        });
    }
    assert_eq!(
        live.sh("ls d d/e a b former; cat former/x"),
        shell(&live.base, "ls d d/e a b former; cat former/x")
    );
    // A write goes to the new file.
    live.sh("echo mine > d/new; echo mine > f; mkdir d/e/made");
    assert_eq!(live.sh("cat d/new f; ls d/e"), "mine\nmine\nf\nmade\ny\n");
}

/// As `rsync --inplace --times` and `cp -p` do: only the change time differs.
#[test]
fn a_change_that_keeps_size_and_mtime_is_not_mixed_with_the_former_content() {
    let mut live = Live::new("for f in one two three; do seq 90000 > $f; done");
    live.applied = true;
    let former = std::fs::read(live.base.join("one")).unwrap();
    for path in ["one", "two", "three"] {
        remember_a_page(&live.mnt.join(path));
    }
    let was = std::fs::metadata(live.base.join("one")).unwrap().mtime_nsec();
    shell(
        &live.base,
        "for f in one two; do tr 0-9 a-j < $f > t; touch -r $f t; cat t > $f; touch -r t $f; rm t; \
         done",
    );
    let now = std::fs::metadata(live.base.join("one")).unwrap();
    assert_eq!((now.mtime_nsec(), now.len()), (was, former.len() as u64), "it looks as it did");
    live.sh("mv two moved");
    let wanted = std::fs::read(live.base.join("one")).unwrap();
    shown(&live, "one", &wanted, &former);
    shown(&live, "moved", &wanted, &former);
    // Other changes of ctime do not make a read fail.
    let held = File::open(live.mnt.join("three")).unwrap();
    for (n, change) in
        ["ln three link", "chmod 600 three", "rm link", "chown 5:6 three"].iter().enumerate()
    {
        shell(&live.base, change);
        let mut bytes = vec![0; 4096];
        let at = 100_000 * (n + 1);
        held.read_exact_at(&mut bytes, at as u64).unwrap();
        assert_eq!(bytes, &former[at..at + 4096], "{change}");
    }
}
