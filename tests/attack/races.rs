//! Races on real mounts: some threads change names as fast as they can, others resolve links
//! meanwhile.
//!
//! Beside the tree, and in each directory above it, lie files that no process in it may reach.
//! Inside are files with the same names and other bytes. After each attack the outside must be
//! unchanged, and no attacker may have seen a byte of it. The same attacks on a kernel overlayfs
//! must be seen to get out.
//!
//! `JAILFS_RACE_SECONDS` is the total time of all attacks.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, RenameFlags, openat, renameat2};
use nix::sys::stat::Mode;
use nix::unistd::linkat;

use crate::common::Stop;
use crate::place::{JAILFS, Place};

/// The content inside, and the content outside.
const INSIDE: &str = "inside";
const OUTSIDE: &str = "this is outside of the mount";
/// How long an attack on an overlayfs may take to get out.
const PATIENCE: Duration = Duration::from_secs(20);

/// An attack: its setup, the threads that change names, and the links that the others follow. `l`
/// is a link to a file `hit` in the root of the tree, `d` one to the root itself.
struct Attack {
    name: &'static str,
    setup: fn(&Path),
    mischief: &'static [fn(&Path, &mut u64)],
    files: &'static [&'static str],
    dirs: &'static [&'static str],
}

fn mv(root: &Path, from: &str, to: &str, done: &mut u64) {
    *done += u64::from(fs::rename(root.join(from), root.join(to)).is_ok());
}

fn exchange(root: &Path, a: &str, b: &str, done: &mut u64) {
    let swapped =
        renameat2(AT_FDCWD, &root.join(a), AT_FDCWD, &root.join(b), RenameFlags::RENAME_EXCHANGE);
    *done += u64::from(swapped.is_ok());
}

fn unlink(root: &Path, path: &str, done: &mut u64) {
    *done += u64::from(fs::remove_file(root.join(path)).is_ok());
}

fn link(root: &Path, text: &str, path: &str, done: &mut u64) {
    *done += u64::from(symlink(text, root.join(path)).is_ok());
}

fn hard_link(root: &Path, from: &str, to: &str, done: &mut u64) {
    let linked = linkat(AT_FDCWD, &root.join(from), AT_FDCWD, &root.join(to), AtFlags::empty());
    *done += u64::from(linked.is_ok());
}

/// Makes the tree equal to the base. Only in our own mount.
fn restore(root: &Path, done: &mut u64) {
    let restored = Command::new(JAILFS).arg("-C").arg(root).args(["restore", "base"]).output();
    *done += u64::from(restored.is_ok_and(|output| output.status.success()));
}

fn anew(root: &Path, path: &str, text: &str, done: &mut u64) {
    unlink(root, path, done);
    link(root, text, path, done);
}

fn make(root: &Path, dirs: &[&str], links: &[(&str, &str)]) {
    for dir in dirs {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    for (path, text) in links {
        symlink(text, root.join(path)).unwrap();
    }
}

const ATTACKS: &[Attack] = &[
    Attack {
        name: "a name on the way is exchanged for a link",
        setup: |root| {
            make(
                root,
                &["a/b/c"],
                &[("a/l", "b/c/../../../hit"), ("a/d", "b/c/../../.."), ("a/b/u", "..")],
            );
        },
        mischief: &[|root, done| exchange(root, "a/b/c", "a/b/u", done)],
        files: &["a/l"],
        dirs: &["a/d"],
    },
    Attack {
        name: "the directory of the link moves up",
        setup: |root| {
            make(root, &["a/b/c"], &[("a/b/c/l", "../../../hit"), ("a/b/c/d", "../../..")]);
        },
        mischief: &[
            |root, done| {
                mv(root, "a/b/c", "c", done);
                mv(root, "c", "a/b/c", done);
            },
            // Links that were never read do not mark it.
            |root, done| {
                anew(root, "a/b/c/l", "../../../hit", done);
                anew(root, "a/b/c/d", "../../..", done);
            },
        ],
        files: &["a/b/c/l", "c/l"],
        dirs: &["a/b/c/d", "c/d"],
    },
    Attack {
        name: "it moves up when the link is gone",
        setup: |root| {
            make(
                root,
                &["a/b/c", "x/y/z"],
                &[("a/b/c/l", "../../../hit"), ("a/b/c/d", "../../..")],
            );
        },
        mischief: &[|root, done| {
            for (link_, text) in [("l", "../../../hit"), ("d", "../../..")] {
                unlink(root, &format!("a/b/c/{link_}"), done);
                mv(root, "a/b/c", "c", done);
                mv(root, "c", "a/b/c", done);
                link(root, text, &format!("a/b/c/{link_}"), done);
                mv(root, &format!("a/b/c/{link_}"), "x/y/z/k", done);
                mv(root, "a/b/c", "c", done);
                mv(root, "c", "a/b/c", done);
                mv(root, "x/y/z/k", &format!("a/b/c/{link_}"), done);
            }
        }],
        files: &["a/b/c/l", "c/l"],
        dirs: &["a/b/c/d", "c/d"],
    },
    Attack {
        name: "what is above the link moves up when the link has moved aside",
        setup: |root| {
            make(root, &["a/b/c", "x/y"], &[("a/b/c/l", "../../../hit"), ("a/b/c/d", "../../..")]);
        },
        mischief: &[|root, done| {
            mv(root, "a/b", "b", done);
            mv(root, "b", "a/b", done);
            mv(root, "a/b/c", "x/y/c", done);
            mv(root, "a/b", "b", done);
            mv(root, "b", "a/b", done);
            mv(root, "x/y/c", "a/b/c", done);
        }],
        files: &["a/b/c/l", "x/y/c/l", "b/c/l"],
        dirs: &["a/b/c/d", "x/y/c/d", "b/c/d"],
    },
    Attack {
        name: "the link moves down",
        setup: |root| make(root, &["a", "x/y"], &[("a/l", "../../hit"), ("a/d", "../..")]),
        mischief: &[|root, done| {
            for name in ["l", "d"] {
                mv(root, &format!("a/{name}"), &format!("x/y/{name}"), done);
                mv(root, &format!("x/y/{name}"), &format!("a/{name}"), done);
            }
        }],
        files: &["a/l", "x/y/l"],
        dirs: &["a/d", "x/y/d"],
    },
    Attack {
        name: "the directory of the link moves down",
        setup: |root| make(root, &["a", "x"], &[("a/l", "../../hit"), ("a/d", "../..")]),
        mischief: &[
            |root, done| {
                mv(root, "a", "x/a", done);
                for name in ["l", "d"] {
                    unlink(root, &format!("x/a/{name}"), done);
                }
                mv(root, "x/a", "a", done);
            },
            |root, done| {
                anew(root, "a/l", "../../hit", done);
                anew(root, "a/d", "../..", done);
            },
        ],
        files: &["a/l", "x/a/l"],
        dirs: &["a/d", "x/a/d"],
    },
    Attack {
        name: "two directories change places",
        setup: |root| {
            make(
                root,
                &["a", "x/y/z"],
                &[
                    ("a/l", "../hit"),
                    ("a/d", ".."),
                    ("x/y/z/l", "../../../hit"),
                    ("x/y/z/d", "../../.."),
                ],
            );
        },
        mischief: &[|root, done| {
            exchange(root, "a", "x/y/z", done);
            unlink(root, "a/l", done);
            link(root, "../../../hit", "a/l", done);
        }],
        files: &["a/l", "x/y/z/l"],
        dirs: &["a/d", "x/y/z/d"],
    },
    Attack {
        name: "one of two names of a link is removed",
        setup: |root| make(root, &["a", "x/y"], &[("x/y/l", "../../hit"), ("x/y/d", "../..")]),
        mischief: &[|root, done| {
            for name in ["l", "d"] {
                hard_link(root, &format!("x/y/{name}"), &format!("a/{name}"), done);
                unlink(root, &format!("a/{name}"), done);
            }
        }],
        files: &["a/l", "x/y/l"],
        dirs: &["a/d", "x/y/d"],
    },
    Attack {
        name: "a restore takes the directory of the link down again",
        setup: |root| {
            make(root, &["a/b/c"], &[("a/b/c/l", "../../../hit"), ("a/b/c/d", "../../..")]);
        },
        mischief: &[|root, done| {
            for name in ["l", "d"] {
                unlink(root, &format!("a/b/c/{name}"), done);
            }
            mv(root, "a/b/c", "c", done);
            link(root, "../../../hit", "c/l", done);
            link(root, "../../..", "c/d", done);
            restore(root, done);
        }],
        files: &["a/b/c/l", "c/l"],
        dirs: &["a/b/c/d", "c/d"],
    },
];

/// The counters of an attack.
#[derive(Debug, Default)]
struct Tally {
    /// Changes of names.
    changes: AtomicU64,
    /// Lookups through a link, and those that ended in the tree.
    tries: AtomicU64,
    inside: AtomicU64,
    /// The bytes of the outside that were seen.
    seen: Mutex<BTreeMap<String, u64>>,
}

impl Tally {
    fn seen(&self, how: &str) {
        *self.seen.lock().unwrap().entry(how.to_owned()).or_default() += 1;
    }

    fn is_out(&self) -> bool {
        !self.seen.lock().unwrap().is_empty()
    }
}

/// Follows the links in all ways, until it is stopped.
fn walk(attack: &Attack, root: &Path, me: usize, tally: &Tally, stop: &Stop) {
    let mut turn = me;
    let mut stand = None;
    while !stop.is_said() {
        turn += 1;
        let file = root.join(attack.files[turn % attack.files.len()]);
        let dir = root.join(attack.dirs[turn % attack.dirs.len()]);
        let mut inside = 0;
        // By path, and from a directory that was opened a while ago.
        if turn % 16 < 2 {
            stand = fs::File::open(file.parent().unwrap()).ok();
        }
        // Close on exec: a child of another test would keep the mount busy.
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        let from_here =
            stand.as_ref().map(|dir| openat(dir, file.file_name().unwrap(), flags, Mode::empty()));
        let from_here = from_here.and_then(Result::ok).map(fs::File::from);
        for mut open in from_here.into_iter().chain(fs::File::open(&file)) {
            let mut text = String::new();
            match open.read_to_string(&mut text) {
                Ok(_) if text == OUTSIDE => tally.seen("read"),
                Ok(_) => inside += 1,
                Err(_) => {}
            }
        }
        if let Ok(stat) = fs::metadata(&file) {
            if stat.len() == OUTSIDE.len() as u64 { tally.seen("stat") } else { inside += 1 }
        }
        // The effects of these outside are found by checking the outside afterwards.
        let mine = format!("made-{me}");
        inside += u64::from(fs::write(dir.join(&mine), "x").is_ok());
        inside += u64::from(fs::rename(dir.join(&mine), dir.join("renamed")).is_ok());
        inside += u64::from(fs::remove_file(dir.join("victim")).is_ok());
        inside += u64::from(fs::create_dir(dir.join(&mine)).is_ok());
        inside += u64::from(fs::remove_dir(dir.join(&mine)).is_ok());
        tally.tries.fetch_add(8, Ordering::Relaxed);
        tally.inside.fetch_add(inside, Ordering::Relaxed);
        // This creates a file that can be removed, inside or outside.
        let _there_or_not = fs::write(root.join("victim"), "inside");
    }
}

/// Every directory from the place's root down to that of the trees.
fn outside(place: &Place) -> Vec<PathBuf> {
    place
        .top()
        .ancestors()
        .take_while(|dir| dir.starts_with(place.root()))
        .map(Path::to_owned)
        .collect()
}

fn fill_outside(place: &Place) {
    for dir in outside(place) {
        fs::write(dir.join("hit"), OUTSIDE).unwrap();
        fs::write(dir.join("victim"), OUTSIDE).unwrap();
    }
}

/// Everything that is not as [`fill_outside`] left it.
fn damage(place: &Place) -> Vec<String> {
    let mut found = Vec::new();
    for dir in outside(place) {
        for name in ["hit", "victim"] {
            if fs::read_to_string(dir.join(name)).ok().as_deref() != Some(OUTSIDE) {
                found.push(format!("{name} in {}", dir.display()));
            }
        }
        for entry in fs::read_dir(&dir).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.starts_with("made-") || name == "renamed" {
                found.push(format!("{name} made in {}", dir.display()));
            }
        }
    }
    found
}

/// Attacks a tree until `end`, or until it got out.
fn run(attack: &Attack, place: &Place, root: &Path, end: Instant) -> Tally {
    let (tally, stop) = (Tally::default(), Stop::default());
    std::thread::scope(|scope| {
        let _at_the_end = stop.at_the_end();
        for mischief in attack.mischief {
            let (tally, stop) = (&tally, &stop);
            scope.spawn(move || {
                while !stop.is_said() {
                    let mut done = 0;
                    mischief(root, &mut done);
                    tally.changes.fetch_add(done, Ordering::Relaxed);
                }
            });
        }
        for me in 0..3 {
            let (tally, stop) = (&tally, &stop);
            scope.spawn(move || walk(attack, root, me, tally, stop));
        }
        let nobody_came =
            || tally.inside.load(Ordering::Relaxed) == 0 && Instant::now() < end + PATIENCE;
        while (Instant::now() < end || nobody_came()) && !tally.is_out() {
            std::thread::sleep(Duration::from_millis(20));
            for what in damage(place) {
                tally.seen(&what);
            }
        }
    });
    tally
}

fn seconds() -> Duration {
    let given = std::env::var("JAILFS_RACE_SECONDS").ok();
    Duration::from_secs_f64(given.map_or(8.0, |text| text.parse().expect("a number of seconds")))
}

fn prepare(place: &Place, root: &Path) {
    fill_outside(place);
    fs::write(root.join("hit"), INSIDE).unwrap();
}

#[test]
fn no_race_leads_out_of_the_mount() {
    let time = seconds();
    // One thread that serves, and several at the same time.
    let threads = ["threads=1", "parallel=4"];
    let each = time / u32::try_from(ATTACKS.len() * threads.len()).unwrap();
    let (mut changes, mut tries, mut inside) = (0, 0, 0);
    for (attack, threads) in ATTACKS.iter().flat_map(|one| threads.map(|threads| (one, threads))) {
        let place = Place::new(time + Duration::from_secs(60));
        for dir in ["base", "mnt", "home"] {
            fs::create_dir(place.at(dir)).unwrap();
        }
        (attack.setup)(&place.at("base"));
        prepare(&place, &place.at("base"));
        place.ok(&["mount", "base", "mnt", "-o", threads]);
        let tally = run(attack, &place, &place.at("mnt"), Instant::now() + each);
        assert!(!tally.is_out(), "{}: {tally:?}", attack.name);
        assert_eq!(damage(&place), Vec::<String>::new(), "{}", attack.name);
        let [made, tried, came] =
            [&tally.changes, &tally.tries, &tally.inside].map(|n| n.load(Ordering::Relaxed));
        let rate = |n: u64| (n as f64 / each.as_secs_f64()) as u64;
        eprintln!(
            "{}, {threads}: in {:.1} s {} changes and {} tries a second, {} of them inside, none \
             out",
            attack.name,
            each.as_secs_f64(),
            rate(made),
            rate(tried),
            rate(came)
        );
        assert!(
            tried > 0 && came > 0,
            "{}: no process went through a link: {tally:?}",
            attack.name
        );
        changes += made;
        tries += tried;
        inside += came;
        place.umount();
    }
    let all = time.as_secs_f64();
    eprintln!(
        "all races: {:.0} s, {changes} changes ({:.0}/s), {tries} tries ({:.0}/s), {inside} ended \
         inside, none outside",
        all,
        changes as f64 / all,
        tries as f64 / all
    );
}

/// This shows that the attacks are real.
#[test]
fn every_race_leads_out_of_an_overlayfs() {
    for attack in ATTACKS {
        let place = Place::new(PATIENCE * 2);
        // All of it in the upper layer, because overlayfs does not rename lower directories.
        let root = place.overlay("over");
        (attack.setup)(&root);
        prepare(&place, &root);
        let begun = Instant::now();
        let tally = run(attack, &place, &root, begun + PATIENCE);
        assert!(tally.is_out(), "{}: no attack ran: {tally:?}", attack.name);
        let seen = tally.seen.lock().unwrap();
        eprintln!(
            "{}: out of an overlayfs after {:.2} s: {seen:?}",
            attack.name,
            begun.elapsed().as_secs_f64()
        );
    }
}
