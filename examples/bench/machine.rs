//! Describes the machine, and measures the CPU time and memory of a process.

use std::path::Path;

use crate::Res;

/// The first three numbers of `/proc/loadavg`.
pub fn load() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// Kernel, processors, memory, filesystem and the cost of waking a processor, in two lines.
pub fn describe(dir: &Path) -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let kernel = read("/proc/sys/kernel/osrelease");
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let model = read("/proc/cpuinfo");
    let model = model.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or_default();
    let memory = read("/proc/meminfo");
    let memory = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap_or_default();
    format!(
        "Linux {}, {cpus} CPUs ({}), memory {}\n{} on {}; {}",
        kernel.trim(),
        model.trim_matches([':', '\t', ' ']),
        memory.trim(),
        dir.display(),
        filesystem(dir).unwrap_or_else(|| "an unknown filesystem".to_owned()),
        polling(),
    )
}

/// The value of `/dev/cpu_dma_latency` if no program has set a limit, in microseconds.
const NO_LIMIT: i32 = 2_000_000_000;

/// How an idle processor waits: the cpuidle driver, and for how many nanoseconds the guest and the
/// host poll before it halts, and the longest wake-up latency that other programs permit. It
/// decides what a message between two processes costs.
fn polling() -> String {
    let read = |path: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.is_empty() { "unknown".to_owned() } else { text.trim().to_owned() }
    };
    let latency = std::fs::read("/dev/cpu_dma_latency").ok();
    let latency = latency.and_then(|bytes| bytes.first_chunk().copied()).map(i32::from_ne_bytes);
    format!(
        "cpuidle driver {}, guest_halt_poll_ns {}, halt_poll_ns of KVM {}, cpu_dma_latency {}",
        read("/sys/devices/system/cpu/cpuidle/current_driver"),
        read("/sys/module/haltpoll/parameters/guest_halt_poll_ns"),
        read("/sys/module/kvm/parameters/halt_poll_ns"),
        match latency {
            None => "unknown".to_owned(),
            Some(NO_LIMIT..) => "without a limit".to_owned(),
            Some(us) => format!("{us} us"),
        },
    )
}

/// The type and the mount options of the filesystem that holds a directory, and whether an ext4 has
/// a journal.
fn filesystem(dir: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").ok()?;
    let at = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let [device, point, kind, options, ..] = words.as_slice() else { return None };
        let journal = match (*kind, device.strip_prefix("/dev/")) {
            ("ext4", Some(name)) if Path::new(&format!("/proc/fs/jbd2/{name}-8")).exists() => {
                " with a journal"
            }
            ("ext4", _) => " without a journal of its own",
            _ => "",
        };
        Some(((*point).to_owned(), format!("{kind}{journal} ({options})")))
    };
    let mounts = mounts.lines().filter_map(at).filter(|(point, _)| dir.starts_with(point));
    mounts.max_by_key(|(point, _)| point.len()).map(|(_, kind)| kind)
}

/// The CPU time and memory that a process has used so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// Seconds of CPU, in user and kernel.
    pub cpu: f64,
    /// Bytes of memory now, and at the peak.
    pub rss: u64,
    pub peak: u64,
}

/// Returns the usage of a process, which must be alive.
pub fn usage(pid: u32) -> Res<Usage> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name in brackets may have spaces; utime and stime are the 12th and 13th after it
    // (proc_pid_stat(5)).
    let after = stat.rsplit_once(')').map(|(_, rest)| rest).ok_or("a stat without a name")?;
    let ticks: u64 =
        after.split_whitespace().skip(11).take(2).filter_map(|n| n.parse::<u64>().ok()).sum();
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.unwrap_or(100);
    Ok(Usage { cpu: ticks as f64 / per_second as f64, rss: kib("VmRSS:"), peak: kib("VmHWM:") })
}
