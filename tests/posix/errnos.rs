//! The errno for names that are too long, too many links, loops, and unsupported calls.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;

use jailfs::internals::fuse::MountOptions;
use nix::errno::Errno;

use crate::both::{as_user, same};
use crate::common::Bench;

#[test]
fn names_that_are_too_long_fail_with_enametoolong() {
    same(
        |_| (),
        |side| {
            let (fits, long) = ("x".repeat(255), "x".repeat(256));
            side.tried("a name of 255", fs::write(side.at(&fits), ""));
            side.tried("of 256", fs::write(side.at(&long), ""));
            side.tried("of 256, a directory", fs::create_dir(side.at(&long)));
            side.tried("of 256, a link", symlink("x", side.at(&long)));
            side.tried("of 256, a second name", fs::hard_link(side.at(&fits), side.at(&long)));
            side.tried("of 256, renamed", fs::rename(side.at(&fits), side.at(&long)));
            side.tried("of 256, looked for", fs::metadata(side.at(&long)).map(|_| ()));
            side.tried("of 256, removed", fs::remove_file(side.at(&long)));
            // The limit counts bytes, not characters.
            side.tried("128 umlauts", fs::write(side.at(&"ä".repeat(128)), ""));
            side.tried("127 umlauts", fs::write(side.at(&"ä".repeat(127)), ""));
            side.tried("a text of 4095", symlink("t".repeat(4095), side.at("link")));
            side.tried("of 4096", symlink("t".repeat(4096), side.at("link2")));
            side.tried("of nothing", symlink("", side.at("link3")));
            side.tried("a path of 5000", fs::metadata(side.at(&"x/".repeat(2500))).map(|_| ()));
        },
    );
}

/// A path as deep as PATH_MAX allows, and deeper in steps.
#[test]
fn directories_can_be_deeper_than_any_path() {
    same(
        |dir| fs::create_dir_all(dir.join("base/of/it")).unwrap(),
        |side| {
            side.sh("cd base/of/it; n=0; while [ $n -lt 60 ]; do d=$(printf %0100d $n); \
                mkdir $d && cd -P ./$d || exit 1; n=$((n+1)); done; echo deep > file; cat file; \
                cd ../../..; ls | wc -l");
            side.sh("find . -type d | wc -l; find . -type f -exec cat {} +; rm -rf base; ls");
        },
    );
}

#[test]
fn a_loop_of_links_fails_with_eloop() {
    same(
        |dir| {
            symlink("b", dir.join("a")).unwrap();
            symlink("a", dir.join("b")).unwrap();
            symlink("self", dir.join("self")).unwrap();
        },
        |side| {
            symlink("new-b", side.at("new-a")).unwrap();
            symlink("new-a", side.at("new-b")).unwrap();
            for name in ["a", "b", "self", "new-a", "self/x"] {
                side.tried(name, File::open(side.at(name)).map(|_| ()));
                side.tried(name, fs::metadata(side.at(name)).map(|_| ()));
                side.tried(name, fs::write(side.at(name), ""));
            }
            let mut follow_not = OpenOptions::new();
            follow_not.read(true).custom_flags(libc::O_NOFOLLOW);
            side.tried("not followed", follow_not.open(side.at("a")).map(|_| ()));
            // 40 links one after another are followed, 41 are not.
            fs::write(side.at("0"), "found").unwrap();
            for n in 1..=41 {
                symlink(format!("{}", n - 1), side.at(&format!("{n}"))).unwrap();
            }
            side.tried("40", fs::read_to_string(side.at("40")));
            side.tried("41", fs::read_to_string(side.at("41")));
        },
    );
}

#[test]
fn a_directory_that_is_not_empty_cannot_be_removed() {
    same(
        |dir| {
            fs::create_dir_all(dir.join("full/sub")).unwrap();
            fs::create_dir(dir.join("one")).unwrap();
            fs::write(dir.join("one/file"), "").unwrap();
            fs::create_dir(dir.join("dot")).unwrap();
            fs::write(dir.join("dot/.hidden"), "").unwrap();
        },
        |side| {
            for name in ["full", "one", "dot"] {
                side.tried(name, fs::remove_dir(side.at(name)));
                side.tried("by a rename", {
                    drop(fs::create_dir(side.at("empty")));
                    fs::rename(side.at("empty"), side.at(name))
                });
            }
            fs::remove_file(side.at("one/file")).unwrap();
            side.tried("emptied", fs::remove_dir(side.at("one")));
            side.tried("a file of it", fs::remove_dir(side.at("dot/.hidden")));
            side.tried("a dot", fs::remove_dir(side.at("full/.")));
            side.tried("two dots", fs::remove_dir(side.at("full/sub/..")));
            side.tried("a directory as a file", fs::remove_file(side.at("full")));
            side.tried("nothing", fs::remove_dir(side.at("nothing")));
            side.tried("through a file", fs::remove_dir(side.at("dot/.hidden/x")));
        },
    );
}

#[test]
fn a_file_has_at_most_65000_names() {
    same(
        |dir| {
            fs::write(dir.join("file"), "").unwrap();
            fs::create_dir(dir.join("names")).unwrap();
            (1..64_999).for_each(|n| {
                fs::hard_link(dir.join("file"), dir.join(format!("names/{n}"))).unwrap()
            });
        },
        |side| {
            side.tried("the last", fs::hard_link(side.at("file"), side.at("last")));
            side.tried("one more", fs::hard_link(side.at("file"), side.at("more")));
            side.tried("by another name", fs::hard_link(side.at("names/7"), side.at("more")));
            side.note(
                "names",
                std::os::unix::fs::MetadataExt::nlink(&fs::metadata(side.at("last")).unwrap()),
            );
            fs::remove_file(side.at("names/1")).unwrap();
            side.tried("in its place", fs::hard_link(side.at("last"), side.at("more")));
        },
    );
}

/// Every way to change something, and its errno.
fn changes(dir: &Path) -> Vec<(&'static str, Option<Errno>)> {
    let code = |result: std::io::Result<()>| {
        result.err().map(|e| Errno::from_raw(e.raw_os_error().unwrap()))
    };
    let at = |name: &str| dir.join(name);
    let open = |options: &mut OpenOptions| options.open(at("file")).map(|_| ());
    let xattr = |value| {
        let file = File::open(at("file")).unwrap();
        match value {
            Some(value) => jailfs::internals::sys::xattr::set(&file, b"user.a", value),
            None => jailfs::internals::sys::xattr::remove(&file, b"user.a"),
        }
    };
    let now = std::time::SystemTime::now();
    vec![
        ("write", code(open(OpenOptions::new().write(true)))),
        ("append", code(open(OpenOptions::new().append(true)))),
        ("truncate", code(open(OpenOptions::new().write(true).truncate(true)))),
        ("create", code(fs::write(at("new"), ""))),
        ("mkdir", code(fs::create_dir(at("new")))),
        ("symlink", code(symlink("x", at("new")))),
        ("link", code(fs::hard_link(at("file"), at("new")))),
        ("rename", code(fs::rename(at("file"), at("new")))),
        ("unlink", code(fs::remove_file(at("file")))),
        ("rmdir", code(fs::remove_dir(at("sub")))),
        (
            "chmod",
            code(fs::set_permissions(
                at("file"),
                std::os::unix::fs::PermissionsExt::from_mode(0o600),
            )),
        ),
        ("chown", code(std::os::unix::fs::chown(at("file"), Some(1), None))),
        ("times", code(File::open(at("file")).unwrap().set_modified(now))),
        ("setxattr", code(xattr(Some(b"v")))),
        ("removexattr", code(xattr(None))),
    ]
}

#[test]
fn a_read_only_mount_refuses_every_change() {
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let bench = Bench::with(&options, |base| {
        fs::write(base.join("file"), "of the base").unwrap();
        fs::create_dir(base.join("sub")).unwrap();
    });
    for (what, errno) in changes(&bench.at("")) {
        assert_eq!(errno, Some(Errno::EROFS), "{what}");
    }
    assert_eq!(fs::read_to_string(bench.at("file")).unwrap(), "of the base");
    assert!(!bench.fs.upper_is_changed());
    let code = as_user(1000, &[], || fs::write(bench.at("new"), "").unwrap_err().raw_os_error());
    assert_eq!(code, Some(Errno::EROFS as i32), "before permissions are checked");
}
