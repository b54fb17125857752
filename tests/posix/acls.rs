//! POSIX ACLs: set, inherited, masked, and checked by the kernel.

use std::fs;
use std::path::Path;

use crate::both::same;

fn base(dir: &Path) {
    fs::write(dir.join("file"), "content").unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    let output = std::process::Command::new("sh")
        .arg("-c")
        .arg(
            "chmod 755 . dir; chmod 640 file; mkdir given; setfacl -m \
             u:4001:rwx,d:u:4002:rwx,d:g:4100:r-x given; touch ours; setfacl -m u:4001:rw ours",
        )
        .current_dir(dir)
        .status();
    assert!(output.unwrap().success(), "this filesystem has ACLs");
}

#[test]
fn access_acls_are_set_listed_and_kept_in_step_with_the_mode() {
    same(base, |side| {
        for script in [
            "getfacl -n file given ours",
            "setfacl -m u:4001:rw,g:4100:r file; getfacl -n file; stat -c %a file",
            "chmod 604 file; getfacl -n file; stat -c %a file",
            "chmod g+rw file; getfacl -n file",
            "setfacl -m m::r file; getfacl -n file; stat -c %a file",
            "setfacl -x u:4001 file; getfacl -n file",
            "setfacl -b file; getfacl -n file; stat -c %a file",
            "setfacl -m u::rwx,g::r,o::- file; getfattr -m - file; stat -c %a file",
            "setfacl -k given; getfacl -n given",
            "setfacl -b given; getfattr -m - given; getfacl -n given",
            "setfacl -d -m u:4001:r file",
            "setfacl -m u:4001:rw nothing",
            "cp -a ours copy; getfacl -n copy; mv ours moved; getfacl -n moved; ln moved hard; \
             getfacl -n hard",
            "python3 -c 'import os\nos.setxattr(\"file\", \"system.posix_acl_access\", \
             b\"\\x02\\0\\0\\0junk\")'",
            "python3 -c 'import os\nos.setxattr(\"file\", \"system.posix_acl_access\", \
             b\"\\x02\\0\\0\\0\")'; stat -c %a file",
            "python3 -c 'import os\nos.setxattr(\"file\", \"system.posix_acl_access\", \
             b\"\\x01\\0\\0\\0\")'",
            "python3 -c 'import os\nos.removexattr(\"file\", \"system.posix_acl_access\")'; \
             getfacl -n file",
            "python3 -c 'import os\nos.getxattr(\"file\", \"system.posix_acl_access\")'",
        ] {
            // Of python's output only the last line, which names the errno.
            side.sh(&format!("({script}) 2>&1 | grep -v '^  \\|^Traceback'"));
        }
    });
}

#[test]
fn default_acls_are_inherited_and_override_the_umask() {
    same(base, |side| {
        side.sh("setfacl -m d:u:4001:rwx,d:g::r-x,d:o::- dir");
        for umask in ["022", "077", "0"] {
            for dir in ["dir", "given"] {
                side.sh(&format!(
                    "umask {umask}; cd {dir}; touch f; mkdir d; mkfifo p; ln -s x l; \
                     install -m 600 /dev/null i; mkdir -m 700 m; mkdir -p a/b/c; touch a/b/c/f; \
                     getfacl -n f d p i m a/b/c a/b/c/f; stat -c '%n %a' *; rm -rf *"
                ));
            }
        }
        // A default ACL that is equivalent to a mode.
        side.sh("setfacl -b dir; setfacl -m d:u::rwx,d:g::rx,d:o::- dir; umask 0; touch dir/f; \
            mkdir dir/d; getfacl -n dir/f dir/d");
    });
}

#[test]
fn acls_decide_access() {
    same(base, |side| {
        side.sh("chmod 600 file; setfacl -m u:4001:r,u:4002:rw,g:4003:r file");
        let tries = "cat file; (echo >> file) 2>/dev/null && echo written; test -r file; \
            echo r $?; test -w file; echo w $?";
        for user in [4001, 4002, 4003, 4004] {
            side.as_user(user, tries);
        }
        side.sh("setfacl -m m::r file");
        for user in [4001, 4002, 4003, 4004] {
            side.as_user(user, tries);
        }
        side.as_user(4001, "touch given/by-4001; getfacl -n given/by-4001; rm given/by-4001");
        side.as_user(4002, "touch given/by-4002");
        side.as_user(4001, "setfacl -m u:4001:rwx file");
        side.sh("chown 4001 file");
        side.as_user(4001, "setfacl -m u:4002:- file; getfacl -n file");
        side.as_user(4002, "cat file");
    });
}

/// If a caller outside the file's group sets an ACL, the file loses its setgid bit, as with
/// chmod(2).
#[test]
fn an_acl_set_from_outside_the_group_clears_setgid() {
    same(base, |side| {
        for (owner, group, user) in [(4001, 4001, 4001), (4001, 4100, 4001), (4001, 4100, 0)] {
            for setfacl in [
                "setfacl -m u:4002:rx",
                "setfacl -m g::rwx",
                "setfacl -b",
                "unshare -Ur setfacl -m u:0:rx",
            ] {
                side.sh(&format!(
                    "cp file p; setfacl -m u:4003:r p; chown {owner}:{group} p; chmod 2755 p"
                ));
                side.as_user(user, &format!("{setfacl} p; stat -c '%a' p; getfacl -n p"));
            }
        }
    });
}
