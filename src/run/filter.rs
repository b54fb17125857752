//! The filter on system calls (seccomp(2)), compiled by the crate `seccompiler`.
//!
//! * [`ENTRIES`] is the whole list. The filter is compiled from it, and a test compares it with
//!   `docs/SYSCALLS.md`.
//! * A denied call fails with EPERM, or with ENOSYS where programs fall back to another call only
//!   on ENOSYS.
//! * A call by the numbers of another architecture (a 32-bit program) kills the process. On x86_64
//!   each entry also denies the number of the x32 interface.
//!
//! The list denies calls instead of allowing them, so that the tools of developers keep working. It
//! names the parts of the kernel that no namespace limits, and those that attacks on the kernel
//! have used repeatedly.

use std::collections::BTreeMap;

use nix::libc;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};

/// The bit that marks the numbers of the x32 interface (`__X32_SYSCALL_BIT`).
const X32: i64 = 0x4000_0000;

/// A group of calls that `run --allow` gives back to the command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Allow {
    /// New user namespaces, and the calls that a nested sandbox needs.
    NestedSandbox,
    /// The kernel's key management.
    Keyrings,
    /// BPF programs.
    Bpf,
    /// Performance counters.
    Perf,
    /// Page faults handled in user space.
    Userfaultfd,
    /// io_uring.
    IoUring,
    /// All socket families, and all netlink protocols.
    Sockets,
}

impl Allow {
    /// Every option with its word on the command line.
    pub const ALL: &'static [(&'static str, Allow)] = &[
        ("nested-sandbox", Allow::NestedSandbox),
        ("keyrings", Allow::Keyrings),
        ("bpf", Allow::Bpf),
        ("perf", Allow::Perf),
        ("userfaultfd", Allow::Userfaultfd),
        ("io-uring", Allow::IoUring),
        ("sockets", Allow::Sockets),
    ];
}

/// The error of a denied call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Eperm,
    Enosys,
}

/// For which arguments a call is denied. The kernel takes these arguments as 32 bits.
#[derive(Clone, Copy, Debug)]
enum When {
    Always,
    /// The argument is one of these.
    Is(u8, &'static [u32]),
    /// The argument is none of these.
    IsNot(u8, &'static [u32]),
    /// The argument has this bit.
    Has(u8, u32),
    /// The first argument is the first value, and this argument is none of these.
    OfFirst(u32, u8, &'static [u32]),
}

/// One denied call.
struct Entry {
    #[cfg_attr(not(test), expect(dead_code, reason = "it names the row of docs/SYSCALLS.md"))]
    name: &'static str,
    number: i64,
    when: When,
    answer: Answer,
    /// The option that allows the call.
    option: Option<Allow>,
}

const fn deny(name: &'static str, number: i64, option: Option<Allow>) -> Entry {
    Entry { name, number, when: When::Always, answer: Answer::Eperm, option }
}

const fn absent(name: &'static str, number: i64, option: Option<Allow>) -> Entry {
    Entry { name, number, when: When::Always, answer: Answer::Enosys, option }
}

const fn partly(name: &'static str, number: i64, when: When, option: Option<Allow>) -> Entry {
    Entry { name, number, when, answer: Answer::Eperm, option }
}

const NESTED: Option<Allow> = Some(Allow::NestedSandbox);
const SOCKETS: Option<Allow> = Some(Allow::Sockets);
const NEW_USER: u32 = libc::CLONE_NEWUSER as u32;
/// AF_UNSPEC, AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK.
const FAMILIES: &[u32] = &[0, 1, 2, 10, 16];
/// NETLINK_ROUTE and NETLINK_AUDIT.
const NETLINK_PROTOCOLS: &[u32] = &[0, 9];
/// The values that Docker allows, each also with ADDR_NO_RANDOMIZE, which debuggers set.
const PERSONALITIES: &[u32] =
    &[0, 8, 0x2_0000, 0x2_0008, 0xffff_ffff, 0x4_0000, 0x4_0008, 0x6_0000, 0x6_0008];
/// Requests that inject terminal input.
const TERMINAL_INJECTION: &[u32] = &[libc::TIOCSTI as u32, libc::TIOCLINUX as u32];

/// Linux 6.15 and later, with the same number on all architectures. libc does not know it yet.
const OPEN_TREE_ATTR: i64 = 467;

/// Every denied call.
const ENTRIES: &[Entry] = &[
    deny("add_key", libc::SYS_add_key, Some(Allow::Keyrings)),
    deny("request_key", libc::SYS_request_key, Some(Allow::Keyrings)),
    deny("keyctl", libc::SYS_keyctl, Some(Allow::Keyrings)),
    deny("mount", libc::SYS_mount, NESTED),
    deny("umount2", libc::SYS_umount2, NESTED),
    deny("pivot_root", libc::SYS_pivot_root, NESTED),
    deny("open_tree", libc::SYS_open_tree, NESTED),
    deny("open_tree_attr", OPEN_TREE_ATTR, NESTED),
    deny("move_mount", libc::SYS_move_mount, NESTED),
    deny("fsopen", libc::SYS_fsopen, NESTED),
    deny("fsconfig", libc::SYS_fsconfig, NESTED),
    deny("fsmount", libc::SYS_fsmount, NESTED),
    deny("fspick", libc::SYS_fspick, NESTED),
    deny("mount_setattr", libc::SYS_mount_setattr, NESTED),
    deny("setns", libc::SYS_setns, NESTED),
    partly("unshare", libc::SYS_unshare, When::Has(0, NEW_USER), NESTED),
    partly("clone", libc::SYS_clone, When::Has(0, NEW_USER), NESTED),
    absent("clone3", libc::SYS_clone3, NESTED),
    deny("bpf", libc::SYS_bpf, Some(Allow::Bpf)),
    deny("perf_event_open", libc::SYS_perf_event_open, Some(Allow::Perf)),
    deny("userfaultfd", libc::SYS_userfaultfd, Some(Allow::Userfaultfd)),
    absent("io_uring_setup", libc::SYS_io_uring_setup, Some(Allow::IoUring)),
    absent("io_uring_enter", libc::SYS_io_uring_enter, Some(Allow::IoUring)),
    absent("io_uring_register", libc::SYS_io_uring_register, Some(Allow::IoUring)),
    partly("socket", libc::SYS_socket, When::IsNot(0, FAMILIES), SOCKETS),
    partly(
        "socket (netlink)",
        libc::SYS_socket,
        When::OfFirst(libc::AF_NETLINK as u32, 2, NETLINK_PROTOCOLS),
        SOCKETS,
    ),
    partly("ioctl", libc::SYS_ioctl, When::Is(1, TERMINAL_INJECTION), None),
    partly("personality", libc::SYS_personality, When::IsNot(0, PERSONALITIES), None),
    deny("kexec_load", libc::SYS_kexec_load, None),
    deny("kexec_file_load", libc::SYS_kexec_file_load, None),
    deny("init_module", libc::SYS_init_module, None),
    deny("finit_module", libc::SYS_finit_module, None),
    deny("delete_module", libc::SYS_delete_module, None),
    deny("fanotify_init", libc::SYS_fanotify_init, None),
    deny("open_by_handle_at", libc::SYS_open_by_handle_at, None),
    deny("syslog", libc::SYS_syslog, None),
    deny("acct", libc::SYS_acct, None),
    deny("quotactl", libc::SYS_quotactl, None),
    deny("swapon", libc::SYS_swapon, None),
    deny("swapoff", libc::SYS_swapoff, None),
    deny("reboot", libc::SYS_reboot, None),
    deny("settimeofday", libc::SYS_settimeofday, None),
    deny("clock_settime", libc::SYS_clock_settime, None),
    deny("vhangup", libc::SYS_vhangup, None),
    #[cfg(target_arch = "x86_64")]
    deny("modify_ldt", libc::SYS_modify_ldt, None),
    #[cfg(target_arch = "x86_64")]
    deny("iopl", libc::SYS_iopl, None),
    #[cfg(target_arch = "x86_64")]
    deny("ioperm", libc::SYS_ioperm, None),
];

/// Calls whose x32 number is not their x86_64 number with the x32 bit: ioctl(2) and kexec_load(2).
const X32_OWN_NUMBERS: &[(i64, i64)] = &[(libc::SYS_ioctl, 514), (libc::SYS_kexec_load, 528)];

/// Filters the system calls of this thread and all its children, for good. Also sets
/// no_new_privs.
///
/// # Errors
/// `Failed`: the kernel has no seccomp filters, or `seccompiler` does not know this architecture.
pub(super) fn apply(allowed: &[Allow]) -> Result<()> {
    let failed = |why: String| {
        Error::new(Kind::Failed, "filter the system calls of the command", why)
            .hint("the kernel needs CONFIG_SECCOMP_FILTER")
    };
    for answer in [Answer::Eperm, Answer::Enosys] {
        let program = program(allowed, answer).map_err(|why| failed(why.to_string()))?;
        apply_filter(&program).map_err(|why| failed(why.to_string()))?;
    }
    Ok(())
}

/// The filter of all entries with one answer.
fn program(
    allowed: &[Allow],
    answer: Answer,
) -> std::result::Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let is_denied = |entry: &&Entry| {
        entry.answer == answer && !entry.option.is_some_and(|option| allowed.contains(&option))
    };
    for entry in ENTRIES.iter().filter(is_denied) {
        for number in numbers(entry.number) {
            rules.entry(number).or_default().extend(entry.when.rules()?);
        }
    }
    let errno = match answer {
        Answer::Eperm => libc::EPERM,
        Answer::Enosys => libc::ENOSYS,
    };
    let action = SeccompAction::Errno(errno.cast_unsigned());
    let architecture = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::Allow, action, architecture)?.try_into()
}

/// The numbers of a call in the interfaces of this architecture.
fn numbers(number: i64) -> Vec<i64> {
    if !cfg!(target_arch = "x86_64") {
        return vec![number];
    }
    let own = X32_OWN_NUMBERS
        .iter()
        .filter(|(of_x86_64, _)| *of_x86_64 == number)
        .map(|(_, own)| own | X32);
    [number, number | X32].into_iter().chain(own).collect()
}

impl When {
    /// The rules, one of which must match. An empty list matches every call.
    fn rules(self) -> std::result::Result<Vec<SeccompRule>, seccompiler::BackendError> {
        let compare = |at: u8, how: SeccompCmpOp, value: u32| {
            SeccompCondition::new(at, SeccompCmpArgLen::Dword, how, value.into())
        };
        let is_not = |at: u8, values: &[u32]| {
            values
                .iter()
                .map(|value| compare(at, SeccompCmpOp::Ne, *value))
                .collect::<std::result::Result<Vec<_>, _>>()
        };
        match self {
            When::Always => Ok(Vec::new()),
            When::Is(at, values) => {
                let one =
                    |value: &u32| SeccompRule::new(vec![compare(at, SeccompCmpOp::Eq, *value)?]);
                values.iter().map(one).collect()
            }
            When::IsNot(at, values) => Ok(vec![SeccompRule::new(is_not(at, values)?)?]),
            When::Has(at, bit) => {
                let has = compare(at, SeccompCmpOp::MaskedEq(bit.into()), bit)?;
                Ok(vec![SeccompRule::new(vec![has])?])
            }
            When::OfFirst(first, at, values) => {
                let mut conditions = vec![compare(0, SeccompCmpOp::Eq, first)?];
                conditions.extend(is_not(at, values)?);
                Ok(vec![SeccompRule::new(conditions)?])
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::testing::raw_call;
    use nix::errno::Errno;

    const ARGUMENTS: [u64; 3] = [0, 0, 0];

    /// Arguments for which an entry denies its call, and with which the call is harmless if it
    /// passes.
    fn denied(when: When) -> [u64; 3] {
        let mut arguments = ARGUMENTS;
        let (at, value) = match when {
            When::Always => return arguments,
            When::Is(at, values) => (at, values[0]),
            When::IsNot(at, _) => (at, 40),
            When::Has(at, bit) => (at, bit),
            When::OfFirst(first, at, _) => {
                arguments[0] = first.into();
                // The kernel looks at the low 32 bits only.
                arguments[usize::from(at)] = 4;
                return arguments;
            }
        };
        arguments[usize::from(at)] = u64::from(value) | if at == 1 { 1 << 40 } else { 0 };
        arguments
    }

    #[test]
    fn every_entry_is_denied_with_its_answer_and_by_its_x32_number() {
        std::thread::spawn(|| {
            apply(&[]).unwrap();
            for entry in ENTRIES {
                let expected =
                    if entry.answer == Answer::Eperm { Errno::EPERM } else { Errno::ENOSYS };
                for number in numbers(entry.number) {
                    let errno = raw_call(number, denied(entry.when)).unwrap_err();
                    assert_eq!(errno, expected, "{} by number {number:#x}", entry.name);
                }
            }
            std::thread::spawn(|| {}).join().unwrap();
            assert!(
                std::fs::read("/proc/self/stat").is_ok()
                    && std::net::UdpSocket::bind("127.0.0.1:0").is_ok()
            );
            assert!(std::process::Command::new("/bin/true").status().unwrap().success());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn an_option_lifts_its_entries_and_no_others() {
        for (_, option) in Allow::ALL {
            std::thread::spawn(move || {
                apply(&[*option]).unwrap();
                let calls = [
                    (Allow::Keyrings, libc::SYS_keyctl, [0, 0, 0]),
                    (Allow::Userfaultfd, libc::SYS_userfaultfd, [u64::MAX, 0, 0]),
                    (Allow::IoUring, libc::SYS_io_uring_enter, [u64::MAX, 0, 0]),
                    (Allow::Bpf, libc::SYS_bpf, [u64::MAX, 0, 0]),
                    (Allow::NestedSandbox, libc::SYS_setns, [u64::MAX, 0, 0]),
                ];
                for (lifts, number, arguments) in calls {
                    let result = raw_call(number, arguments);
                    let refused = matches!(result, Err(Errno::EPERM | Errno::ENOSYS));
                    assert_eq!(
                        refused,
                        lifts != *option,
                        "{option:?} and call {number}: {result:?}"
                    );
                }
            })
            .join()
            .unwrap();
        }
    }

    #[test]
    fn the_table_equals_the_documentation() {
        let text = include_str!("../../docs/SYSCALLS.md");
        for entry in ENTRIES {
            let word = |option| Allow::ALL.iter().find(|(_, allow)| *allow == option).unwrap().0;
            let option = entry.option.map_or("none", word);
            let answer = if entry.answer == Answer::Eperm { "EPERM" } else { "ENOSYS" };
            let name = format!("| `{}` |", entry.name);
            let row =
                text.lines().find(|line| line.starts_with(&name) && line.split('|').count() == 7);
            let row =
                row.unwrap_or_else(|| panic!("docs/SYSCALLS.md does not list {}", entry.name));
            assert!(row.contains(answer) && row.contains(option), "{row}: {answer}, {option}");
        }
        let rows = text.lines().filter(|line| line.starts_with("| `")).count();
        assert_eq!(rows, ENTRIES.len() + Allow::ALL.len());
    }
}
