//! Owners, groups and modes for several users in one mount (`allow_other`, the default for root).

use std::fs;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;

use crate::both::{Side, as_user, same};

const ALICE: u32 = 4001;
const BOB: u32 = 4002;
const TEAM: u32 = 4100;

/// Every way to use a file or directory, as a user with some groups.
fn uses(side: &mut Side, who: &str, user: u32, groups: &[u32]) {
    let names = ["open", "private", "group", "read", "dir/in", "shut/in", "list/in", "enter/in"];
    let paths: Vec<_> = names.iter().map(|name| side.at(name)).collect();
    let root = side.at("");
    let code = |result: std::io::Result<()>| {
        result.map_err(|e| nix::errno::Errno::from_raw(e.raw_os_error().unwrap()))
    };
    let found = as_user(user, groups, || {
        let mut found = Vec::new();
        for path in &paths {
            let options = |write: bool| {
                let mut options = fs::OpenOptions::new();
                options.read(!write).write(write).custom_flags(libc::O_NOFOLLOW);
                options
            };
            found.push(("stat", code(fs::metadata(path).map(|_| ()))));
            found.push(("read", code(options(false).open(path).map(|_| ()))));
            found.push(("write", code(options(true).open(path).map(|_| ()))));
            found.push((
                "chmod",
                code(fs::metadata(path).and_then(|m| fs::set_permissions(path, m.permissions()))),
            ));
            found.push(("chown", code(chown(path, Some(user), None))));
            found.push(("chgrp", code(chown(path, None, Some(TEAM)))));
            let beside = path.with_extension("beside");
            found.push(("make beside", code(fs::write(&beside, ""))));
            drop(fs::remove_file(&beside));
            found.push(("rename", code(fs::rename(path, &beside))));
            drop(fs::rename(&beside, path));
        }
        for dir in ["dir", "shut", "list", "enter"] {
            found.push((dir, code(fs::read_dir(root.join(dir)).map(|_| ()))));
        }
        found
    });
    side.note(who, found);
}

fn base(dir: &Path) {
    let make = |name: &str, mode: u32, user: u32, group: u32| {
        let path = dir.join(name);
        fs::write(&path, name).unwrap();
        chown(&path, Some(user), Some(group)).unwrap();
        fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
    };
    for (name, mode) in [("dir", 0o755), ("shut", 0o700), ("list", 0o744), ("enter", 0o711)] {
        fs::create_dir(dir.join(name)).unwrap();
        make(&format!("{name}/in"), 0o644, ALICE, TEAM);
        chown(dir.join(name), Some(ALICE), Some(TEAM)).unwrap();
        fs::set_permissions(dir.join(name), PermissionsExt::from_mode(mode)).unwrap();
    }
    make("open", 0o666, ALICE, ALICE);
    make("private", 0o600, ALICE, ALICE);
    make("group", 0o660, ALICE, TEAM);
    make("read", 0o444, BOB, BOB);
}

#[test]
fn modes_decide_what_each_user_may_do() {
    same(base, |side| {
        for (who, user, groups) in [
            ("the owner", ALICE, &[TEAM][..]),
            ("the owner outside of the group", ALICE, &[]),
            ("another in the group", BOB, &[TEAM]),
            ("another", BOB, &[]),
            ("a third", 4003, &[]),
            ("root", 0, &[]),
        ] {
            uses(side, who, user, groups);
        }
    });
}

#[test]
fn new_files_belong_to_the_user_who_made_them() {
    same(
        |dir| fs::set_permissions(dir, PermissionsExt::from_mode(0o777)).unwrap(),
        |side| {
            for (name, user) in [("alice", ALICE), ("bob", BOB), ("root", 0)] {
                let dir = side.at("");
                as_user(user, &[TEAM], || {
                    fs::write(dir.join(name), "").unwrap();
                    fs::create_dir(dir.join(format!("{name}-dir"))).unwrap();
                    std::os::unix::fs::symlink("x", dir.join(format!("{name}-link"))).unwrap();
                });
                for kind in ["", "-dir", "-link"] {
                    let stat = fs::symlink_metadata(side.at(&format!("{name}{kind}"))).unwrap();
                    side.note(name, (stat.uid(), stat.gid(), format!("{:o}", stat.mode())));
                }
            }
        },
    );
}

const SETUP: &str = "chmod 777 .; umask 0";

#[test]
fn a_umask_clears_its_bits_and_no_others() {
    same(
        |_| (),
        |side| {
            for umask in ["000", "022", "027", "077", "0777", "0111"] {
                side.sh(&format!(
                    "umask {umask}; touch f; mkdir d; mkfifo p; ln -s x l; cp /bin/true x; \
                     mkdir -m 7777 m; stat -c '%n %a' *; rm -rf *"
                ));
            }
        },
    );
}

#[test]
fn a_setgid_directory_passes_its_group_on() {
    same(
        |dir| {
            fs::create_dir(dir.join("of-base")).unwrap();
            chown(dir.join("of-base"), None, Some(TEAM)).unwrap();
            fs::set_permissions(dir.join("of-base"), PermissionsExt::from_mode(0o2777)).unwrap();
        },
        |side| {
            side.sh(&format!("{SETUP}; mkdir new; chgrp {TEAM} new; chmod 2777 new"));
            for dir in ["of-base", "new"] {
                for user in [0, ALICE] {
                    side.as_user(
                        user,
                        &format!(
                            "cd {dir}; umask 002; touch f{user}; mkdir d{user}; \
                             mkdir d{user}/below; mkfifo p{user}; ln -s x l{user}; \
                             touch d{user}/below/f; (umask 0; mkdir -m 0755 m{user}); \
                             stat -c '%n %a %u %g' f{user} d{user} p{user} l{user} d{user}/below \
                             d{user}/below/f m{user}"
                        ),
                    );
                    // A user cannot create a setgid program for a group that the user is not in.
                    side.as_user(
                        user,
                        &format!(
                            "cd {dir}; python3 -c 'import os\n\
                             os.umask(0)\n\
                             os.close(os.open(\"prog{user}\", os.O_CREAT | os.O_WRONLY, 0o2755))\n\
                             os.close(os.open(\"lock{user}\", os.O_CREAT | os.O_WRONLY, 0o2644))'; \
                             stat -c '%n %a %g' prog{user} lock{user}"
                        ),
                    );
                }
            }
            side.sh(
                "mv new/f0 of-base/moved; mv of-base/d0 .; stat -c '%n %a %g' of-base/moved d0 \
                 d0/below",
            );
        },
    );
}

#[test]
fn in_a_sticky_directory_only_owners_can_remove() {
    same(
        |dir| {
            fs::create_dir(dir.join("tmp")).unwrap();
            fs::set_permissions(dir.join("tmp"), PermissionsExt::from_mode(0o1777)).unwrap();
            for (name, owner) in [("tmp/alice", ALICE), ("tmp/bob", BOB), ("tmp/root", 0)] {
                fs::write(dir.join(name), "").unwrap();
                fs::set_permissions(dir.join(name), PermissionsExt::from_mode(0o666)).unwrap();
                chown(dir.join(name), Some(owner), Some(owner)).unwrap();
            }
        },
        |side| {
            side.as_user(ALICE, "cd tmp; touch a-new; mkdir a-dir; ls");
            side.as_user(BOB, "cd tmp; rm -f alice; rm -f a-new; rmdir a-dir; rm -f root; ls");
            side.as_user(
                BOB,
                "cd tmp; mv alice x; mv bob alice; touch over; mv -f over a-new; echo y > alice; \
                 ls",
            );
            side.as_user(BOB, "cd tmp; mv a-dir b-dir; ln alice second; rm second; ls");
            side.as_user(ALICE, "cd tmp; mv a-dir b-dir; rm alice a-new; ls");
            side.as_user(BOB, "cd tmp; rm bob; ls");
            side.sh("chown 4001 tmp");
            side.as_user(ALICE, "cd tmp; rm -f root; ls");
            side.sh("chmod -t tmp; touch tmp/left; stat -c %a tmp");
            side.as_user(BOB, "cd tmp; rm -f left; ls");
        },
    );
}

/// All ways to lose setuid, setgid and file capabilities: as the owner, as another user with write
/// access, and as root.
#[test]
fn a_change_clears_privileges_as_on_the_host() {
    let ways = [
        "printf x >> p",
        "printf x | dd of=p conv=notrunc status=none",
        "truncate -s 3 p",
        "truncate -s 3 p; truncate -s 3 p",
        ": > p",
        "fallocate -l 100 p",
        "fallocate -p -o 0 -l 5 p",
        "unshare -Ur truncate -s 3 p",
        "unshare -Ur fallocate -l 100 p",
        "unshare -Ur sh -c 'printf x >> p'",
        "printf '' >> p",
        "touch p",
        "chmod 6755 p",
        "chmod g+s p",
        "chmod u-s p",
        "chown $(id -u) p",
        "chgrp $(id -g) p",
        "chown :$(id -g) p",
        "chown $(id -u):$(id -g) p",
        "setfattr -n user.a -v b p",
        "ln p q; rm q",
        "mv p q; mv q p",
        "dd if=/dev/zero of=p bs=4096 count=1 oflag=direct conv=notrunc status=none",
        "python3 -c 'import os\nf=os.open(\"p\", os.O_RDWR)\nos.truncate(f, 1)'",
        "python3 -c 'import os\nf=os.open(\"p\", os.O_RDWR)\nos.copy_file_range(f, f, 2, 0, 5)'",
    ];
    same(
        |dir| {
            fs::set_permissions(dir, PermissionsExt::from_mode(0o777)).unwrap();
            fs::write(dir.join("of-base"), "0123456789").unwrap();
        },
        |side| {
            let all: &[&str] = &["6777", "2767", "4766"];
            for (owner, user, modes) in
                [(ALICE, ALICE, all), (0, ALICE, all), (0, 0, &["6777"]), (ALICE, 0, &["2767"])]
            {
                for mode in modes {
                    for way in ways {
                        side.note("mode, owner, user", (mode, owner, user));
                        side.sh_with(
                            &format!(
                                "rm -f p; cp of-base p; chown {owner}:{owner} p; chmod {mode} p; \
                                 setcap cap_chown=ep p; setpriv --reuid={user} --regid={user} \
                                 --clear-groups sh -c \"$1\"; stat -c %a p; \
                                 stat -c '%a %u %g %s' p; getcap p"
                            ),
                            way,
                        );
                    }
                }
            }
        },
    );
}

/// A write through a mapping clears neither setuid nor setgid, as on the host. It clears file
/// capabilities, unlike the host's filesystems: changed content is no longer the trusted one.
#[test]
fn a_write_through_a_mapping_clears_only_capabilities() {
    let bench = crate::common::Bench::new();
    let script = "echo 0123456789 > p; chmod 6777 p; setcap cap_chown=ep p; \
        python3 -c 'import os, mmap\n\
        f=os.open(\"p\", os.O_RDWR)\nm=mmap.mmap(f, 4)\nm[0]=55\n\
        m.close()'; stat -c %a p; getcap p; cat p";
    let output =
        std::process::Command::new("sh").arg("-c").arg(script).current_dir(bench.at("")).output();
    assert_eq!(String::from_utf8_lossy(&output.unwrap().stdout), "6777\n7123456789\n");
}

#[test]
fn the_first_write_to_a_base_file_clears_its_capabilities() {
    same(
        |dir| {
            fs::write(dir.join("p"), "0123456789").unwrap();
            fs::write(dir.join("q"), "0123456789").unwrap();
            let mut set = std::process::Command::new("setcap");
            set.args(["cap_net_raw=ep", "p", "cap_net_raw=ep", "q"]);
            assert!(set.current_dir(dir).status().unwrap().success());
        },
        |side| {
            side.sh("getcap p q; printf x >> p; getcap p q; chmod 711 q; touch q; mv q r; \
                getcap r; chown 5 r; getcap r");
        },
    );
}

#[test]
fn owners_and_groups_change_as_permitted() {
    same(base, |side| {
        side.sh("chown 4002:4100 private; stat -c '%u %g' private; chown 4001 private; \
            stat -c '%u %g' private");
        side.sh("ln -s open link; chown -h 7:8 link; stat -c '%n %u %g' link open; \
            chown 4001:4001 link; stat -c '%u %g' open");
        let group = side.at("group");
        let tries = as_user(ALICE, &[TEAM, BOB], || {
            [
                (Some(BOB), None),
                (None, Some(BOB)),
                (None, Some(TEAM)),
                (None, Some(9)),
                (Some(ALICE), Some(TEAM)),
            ]
            .map(|(user, gid)| chown(&group, user, gid).map_err(|e| e.raw_os_error()))
        });
        side.note("the owner", tries);
        let tries = as_user(BOB, &[TEAM], || {
            [
                chown(&group, None, Some(BOB)),
                chown(&group, Some(BOB), None),
                chown(&group, None, None),
            ]
            .map(|tried| tried.map_err(|e| e.raw_os_error()))
        });
        side.note("another", tries);
        side.sh("chown 4294967294:4294967294 open; stat -c '%u %g' open");
    });
}
