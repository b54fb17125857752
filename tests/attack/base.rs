//! The base under a live mount: mounts inside it, and changes while the mount reads.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use nix::mount::{MsFlags, mount};

use crate::common::Stop;
use crate::place::{JAILFS, Place};

const FILES: usize = 600;

fn place() -> Place {
    let place = Place::new(Duration::from_secs(120));
    for dir in ["base/d/deep", "mnt", "home", "out/deep"] {
        fs::create_dir_all(place.at(dir)).unwrap();
    }
    place
}

#[test]
fn a_mount_in_the_base_appears_empty_and_status_reports_it() {
    let place = place();
    let none = None::<&str>;
    mount(Some("none"), &place.at("base/d"), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    fs::write(place.at("base/d/secret"), "secret").unwrap();
    fs::create_dir(place.at("base/d/in")).unwrap();
    mount(Some("none"), &place.at("base/d/in"), Some("tmpfs"), MsFlags::empty(), none).unwrap();
    place.ok(&["mount", "base", "mnt"]);
    assert_eq!(fs::read_dir(place.at("mnt/d")).unwrap().count(), 0);
    assert!(fs::read(place.at("mnt/d/secret")).is_err());
    let status = place.ok(&["-C", "mnt", "status", "--json"]);
    let problems: Vec<&str> = status.lines().filter(|line| line.contains("base_problem")).collect();
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(
        problems[0].contains(r#""path":"d""#)
            && problems[0].contains("something else is mounted there"),
        "{problems:?}"
    );
    let text = place.ok(&["-C", "mnt", "status"]);
    assert!(
        text.contains(
            "problems with the base:\n  d: something else is mounted there; it is shown empty"
        ),
        "{text}"
    );
    place.umount();
}

#[test]
fn an_apply_at_a_mount_point_of_the_base_is_refused_before_it_writes() {
    let place = place();
    fs::write(place.at("base/a"), "old").unwrap();
    mount(Some("none"), &place.at("base/d/deep"), Some("tmpfs"), MsFlags::empty(), None::<&str>)
        .unwrap();
    fs::write(place.at("base/d/deep/theirs"), "theirs").unwrap();
    place.ok(&["mount", "base", "mnt"]);
    fs::write(place.at("mnt/a"), "new").unwrap();
    fs::remove_dir(place.at("mnt/d/deep")).unwrap();
    fs::remove_dir(place.at("mnt/d")).unwrap();
    fs::write(place.at("mnt/d"), "a file").unwrap();
    let mut apply = Command::new(JAILFS);
    place.environment(apply.args(["-C", "mnt", "apply"]).current_dir(place.top()));
    let output = apply.output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && message.contains("something is mounted"), "{output:?}");
    assert_eq!(fs::read_to_string(place.at("base/a")).unwrap(), "old");
    assert_eq!(fs::read_to_string(place.at("base/d/deep/theirs")).unwrap(), "theirs");
    // The rest is applied.
    place.ok(&["-C", "mnt", "apply", "a"]);
    assert_eq!(fs::read_to_string(place.at("base/a")).unwrap(), "new");
    place.umount();
}

/// Another process exchanges a directory of the base for a link to one outside, with files of the
/// same names. With the calls of this kernel, and where openat2(2) is missing or forbidden.
#[test]
fn a_mount_never_shows_the_outside_while_its_base_is_exchanged_for_a_link() {
    for mask in ["", "ENOSYS", "EPERM"] {
        let place = place();
        for n in 0..FILES {
            for (dir, text) in [("base/d", "inside"), ("out", "outside")] {
                fs::write(place.at(&format!("{dir}/f{n}")), text).unwrap();
                fs::write(place.at(&format!("{dir}/deep/f{n}")), text).unwrap();
            }
        }
        symlink("../out", place.at("base/l")).unwrap();
        let mut command = Command::new(if mask.is_empty() { JAILFS } else { "/usr/bin/python3" });
        if !mask.is_empty() {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/common/mask.py");
            command.args(["-I", script, mask, JAILFS]);
        }
        place.environment(command.args(["mount", "base", "mnt"]).current_dir(place.top()));
        assert!(command.status().unwrap().success());
        // A node that the kernel knows as a directory does not become a link.
        assert!(fs::metadata(place.at("mnt/d/deep")).unwrap().is_dir());
        let (stop, swaps) = (Stop::default(), AtomicU64::new(0));
        let (mut inside, mut refused) = (0, 0);
        std::thread::scope(|scope| {
            let _at_the_end = stop.at_the_end();
            scope.spawn(|| {
                let [d, l] = ["base/d", "base/l"].map(|name| place.at(name));
                while !stop.is_said() {
                    renameat2(AT_FDCWD, &d, AT_FDCWD, &l, RenameFlags::RENAME_EXCHANGE).unwrap();
                    swaps.fetch_add(1, Ordering::Relaxed);
                }
            });
            // Each name once, so that the kernel has none of them cached.
            for n in 0..FILES {
                for path in [format!("mnt/d/f{n}"), format!("mnt/d/deep/f{n}")] {
                    match fs::read_to_string(place.at(&path)) {
                        Ok(text) => {
                            assert_eq!(text, "inside", "{mask}: {path}");
                            inside += 1;
                        }
                        Err(_) => refused += 1,
                    }
                }
            }
        });
        let swaps = swaps.into_inner();
        eprintln!("openat2 {mask}: {swaps} swaps, {inside} reads inside, {refused} refused");
        assert!(swaps > 100 && inside > 0 && refused > 0, "{mask}: {swaps} {inside} {refused}");
        place.umount();
    }
}
