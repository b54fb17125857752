//! `-o wake=`: the daemon holds the latency of the CPUs only while requests follow each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::harness::Live;

const DEVICE: &str = "/dev/cpu_dma_latency";
/// Far longer than the daemon waits before it releases the latency.
const LIMIT: Duration = Duration::from_secs(20);

fn is_held(live: &Live) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", live.pid())).unwrap();
    let mut targets = descriptors.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets.any(|target| target.as_os_str() == DEVICE)
}

fn becomes(live: &Live, held: bool) -> bool {
    let end = Instant::now() + LIMIT;
    while is_held(live) != held && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
    is_held(live) == held
}

/// Runs `look` while another thread sends requests to the mount without a pause.
fn beside_requests<T>(live: &Live, look: impl FnOnce() -> T) -> T {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0.. {
                if ends.load(Ordering::Relaxed) {
                    return;
                }
                assert!(!live.exists(&format!("missing-{n}")));
            }
        });
        let seen = look();
        ends.store(true, Ordering::Relaxed);
        seen
    })
}

#[test]
fn the_latency_is_held_while_requests_follow_each_other_and_released_when_idle() {
    for options in [&["-o", "wake=latency"][..], &["-o", "wake=auto"], &[]] {
        let live = Live::with_options("echo x > x", options);
        for _ in 0..2 {
            assert!(becomes(&live, false), "{options:?}: an idle mount holds nothing");
            assert!(beside_requests(&live, || becomes(&live, true)), "{options:?}");
        }
        assert!(becomes(&live, false), "{options:?}: released after the last request");
    }
}

#[test]
fn the_device_is_never_opened_if_not_asked_for() {
    for options in [["-o", "wake=off"], ["-o", "wake=spin"]] {
        let live = Live::with_options("echo x > x", &options);
        let end = Instant::now() + Duration::from_millis(500);
        beside_requests(&live, || {
            while Instant::now() < end {
                assert!(!is_held(&live), "{options:?}");
            }
        });
    }
}

#[test]
fn an_unknown_value_is_refused() {
    let live = Live::new("echo x > x");
    for value in ["wake=maybe", "wake", "wake=500", "spin=500"] {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let command = command.arg("mount").args([&live.base, &live.mnt]).args(["-o", value]);
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains("hint: "), "{value}: {said}");
    }
}
