//! stress-ng: its filesystem stressors, which verify their operations. Afterwards nothing is left
//! in the daemon.

use std::process::Command;
use std::time::Duration;

use crate::harness::Live;

/// Stressors of the class that are left out: those that do not use the given filesystem (`getdent`
/// reads all of /tmp, and so the base beneath the mount), and, the last two, those of calls that
/// FUSE has no message for, which would skip themselves.
const LEFT_OUT: &str = "bind-mount,binderfs,eventfd,fanotify,getdent,procfs,fiemap,verity";

/// The memory of the daemon in KiB, and its peak.
fn memory(pid: u64) -> (u64, u64) {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.split_whitespace().next().unwrap().parse().unwrap()
    };
    (field("VmRSS:"), field("VmHWM:"))
}

#[test]
fn stress_ng_finds_no_fault_and_leaves_nothing_in_the_daemon() {
    let options = ["-o", "allow_other,dev,suid"];
    let live = Live::with_limit("mkdir -m 777 work", &options, Duration::from_secs(240));
    let pid = live.json(&["status"])[0]["pid"].as_u64().unwrap();
    let (before, _) = memory(pid);

    let mut command = Command::new("stress-ng");
    command.args(["--class", "filesystem", "--sequential", "1", "-x", LEFT_OUT]);
    command.args(["--timeout", "1", "--verify", "--temp-path"]).arg(live.mnt.join("work"));
    let output = command.current_dir(live.outside()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("fail:") && !said.contains("skipping"), "{said}");

    // The kernel drops unused nodes, and then the daemon drops them too.
    live.sh("rm -rf work && mkdir work");
    let holds = |live: &Live| live.json(&["status"])[0]["kernel_nodes"].as_u64().unwrap();
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    assert!(
        holds(&live) <= 3,
        "the kernel forgot all nodes, and the daemon still holds {}",
        holds(&live)
    );
    let (after, most) = memory(pid);
    eprintln!(
        "stress-ng: memory of the daemon {before} KiB before, {after} KiB after, {most} KiB at most"
    );
    assert!(most < 200 * 1024, "the daemon grew from {before} to {most} KiB");
}
