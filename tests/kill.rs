//! Kills the daemon again and again at random moments, while several writers and verbs run in
//! several heads. After each remount, each head holds exactly its own acknowledged operations, in
//! order, and perhaps the operations that were in flight.
//!
//! `JAILFS_KILLS=N` kills N times. `JAILFS_THREADS=N` has N threads serve each mount.
//! `JAILFS_KILL_SEED=N` chooses the moments and the load; timing also matters, so a seed that
//! failed is tried several times. A failure prints its seed and the last actions.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, prints its figures, and programs call \
        what they like"
)]

#[path = "kill/files.rs"]
mod files;
#[path = "kill/forks.rs"]
mod forks;
#[expect(dead_code, reason = "other tests use the rest of it")]
#[path = "common/live.rs"]
mod harness;
#[path = "kill/head.rs"]
mod head;
#[path = "kill/programs.rs"]
mod programs;
#[path = "model/rng.rs"]
mod rng;
#[path = "kill/round.rs"]
mod round;
#[path = "kill/span.rs"]
mod span;
#[path = "kill/verbs.rs"]
mod verbs;
#[path = "kill/world.rs"]
mod world;
#[path = "kill/writer.rs"]
mod writer;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use harness::Live;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use world::World;

/// The number of kills that take about half a minute in a debug build.
const KILLS: u64 = 12;
/// The number of last actions that a failure prints.
const LOG_LINES: usize = 40;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

#[test]
fn every_acknowledged_operation_survives_every_kill() {
    let kills = number("JAILFS_KILLS").unwrap_or(KILLS);
    let by_the_clock =
        || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 % 1_000_000;
    let seed = number("JAILFS_KILL_SEED").unwrap_or_else(by_the_clock);
    eprintln!("JAILFS_KILL_SEED={seed} JAILFS_KILLS={kills}");
    let mut world = World::new(seed, kills);
    let done = catch_unwind(AssertUnwindSafe(|| {
        for round in 1.. {
            world.round();
            if world.kills >= kills {
                break;
            }
            if round % 50 == 0 {
                eprintln!("{}", world.figures());
            }
        }
    }));
    eprintln!("{}", world.figures());
    if let Err(panic) = done {
        eprintln!(
            "JAILFS_KILL_SEED={seed} failed after {} kills; the last that was done:",
            world.kills
        );
        for line in &world.log[world.log.len().saturating_sub(LOG_LINES)..] {
            eprintln!("  {line}");
        }
        world.keep();
        resume_unwind(panic);
    }
}

#[test]
fn a_checkpoint_that_is_reported_before_its_sync_survives_a_kill() {
    let mut live = Live::new("mkdir d");
    for round in 0..6 {
        let name = format!("c{round}");
        live.sh(&format!("cd d; for n in $(seq 300); do echo {round} $n > f$n; done"));
        let made = live.try_jailfs(&["checkpoint", "--no-sync", &name]);
        kill(live.pid(), Signal::SIGKILL).unwrap();
        assert!(made.status.success(), "{made:?}");
        live.wait_until_dead();
        live.mount();
        live.sh("rm d/f*");
        let restored = live.try_jailfs(&["restore", &name]);
        assert!(restored.status.success(), "{restored:?}");
        assert_eq!(
            live.sh("cat d/f*"),
            live.sh(&format!("cd d; for n in f*; do echo {round} ${{n#f}}; done"))
        );
    }
}

/// A flush writes through the daemon's own mount. If the daemon is killed while it waits for its
/// own answer, it must still end, and release the processes that wait for it.
#[test]
fn a_daemon_killed_during_a_flush_leaves_no_thread_and_no_hanging_mount() {
    let mut live = Live::new("mkdir d");
    for round in 0..4 {
        let mut puppet = live.puppet("d");
        puppet.run("import mmap");
        puppet.run("maps = []");
        puppet.run(
            "for n in range(500):\n f = open(str(n), 'w+b'); f.truncate(4096); \
             maps.append(mmap.mmap(f.fileno(), 4096)); f.close()",
        );
        puppet.run("for n in range(500): maps[n][0] = 65");
        let words = ["checkpoint", &format!("c{round}")];
        std::thread::scope(|scope| {
            let asking = scope.spawn(|| live.try_jailfs(&words));
            let pid = live.pid();
            while !is_flushing(pid) && !asking.is_finished() {
                std::thread::yield_now();
            }
            kill(pid, Signal::SIGKILL).unwrap();
            live.wait_until_dead();
            asking.join().unwrap();
        });
        drop(puppet);
        live.mount();
        assert!(live.exists("d/499"));
    }
}

/// Whether a daemon has a thread that is flushing.
fn is_flushing(pid: nix::unistd::Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.into_iter().any(|name| name == "flush\n")
}

/// An invalidation takes the lock of the directory. Another process may hold that lock while it
/// waits for an answer. If the daemon is killed in that moment, the two would wait for each other.
#[test]
fn a_daemon_killed_during_an_invalidation_leaves_no_thread_and_no_hanging_mount() {
    let mut live = Live::new("mkdir d");
    live.sh("cd d; for n in $(seq 1500); do echo $n > f$n; done");
    live.checkpoint("then");
    for _ in 0..3 {
        live.sh("cd d; for n in $(seq 1500); do echo now > f$n; done; ls -l > /dev/null");
        let dir = live.mnt.join("d");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let path = dir.join(format!("writer{writer}"));
                // Until no daemon answers.
                scope.spawn(move || {
                    while std::fs::write(&path, "")
                        .and_then(|()| std::fs::remove_file(&path))
                        .is_ok()
                    {}
                });
            }
            let asking = scope.spawn(|| live.try_jailfs(&["restore", "then"]));
            let pid = live.pid();
            while !waits_for_a_lock(pid) && !asking.is_finished() {
                std::thread::yield_now();
            }
            kill(pid, Signal::SIGKILL).unwrap();
            live.wait_until_dead();
            asking.join().unwrap();
        });
        live.mount();
        assert!(live.exists("d/f1500"));
    }
}

/// While a mount begins, the daemon asks for its space once. If the daemon is killed in that
/// moment, its main thread waits for an answer that never comes, and keeps the connection open.
#[test]
fn a_daemon_killed_while_its_mount_begins_leaves_no_hanging_mount() {
    let mut live = Live::new("echo base > f");
    live.umount();
    let mut hits = 0;
    for _ in 0..100 {
        let mut child = Command::new(env!("CARGO_BIN_EXE_jailfs"))
            .args(["mount", "-f"])
            .args([&live.base, &live.mnt])
            .arg("--store")
            .arg(&live.store)
            .current_dir("/")
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let wchan = format!("/proc/{}/wchan", child.id());
        let until = Instant::now() + Duration::from_millis(300);
        let mut is_asking = false;
        while !is_asking && Instant::now() < until {
            is_asking = std::fs::read_to_string(&wchan).unwrap().starts_with("request_wait");
        }
        child.kill().unwrap();
        let until = Instant::now() + Duration::from_secs(20);
        while child.try_wait().unwrap().is_none() {
            if Instant::now() >= until {
                // A forced unmount aborts the connection.
                let aborted = umount2(&live.mnt, MntFlags::MNT_FORCE);
                panic!("the killed daemon waits for its own mount; aborted: {aborted:?}");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        hits += u32::from(is_asking);
        if hits == 8 {
            break;
        }
    }
    assert!(hits > 0, "no kill hit the moment");
    live.mount();
    assert_eq!(live.sh("cat f"), "base\n");
}

/// Whether a daemon has a thread that waits for a lock in the kernel.
fn waits_for_a_lock(pid: nix::unistd::Pid) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let places = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("wchan")).ok());
    places.into_iter().any(|place| place.starts_with("fuse_reverse_inval"))
}
