//! What is agreed with the kernel in its first message.

use std::time::Duration;

use fuser::{InitFlags, KernelConfig};

use crate::sys;

/// What the kernel may send in one request.
pub(super) const MAX_REQUEST: u32 = 1 << 20;
/// Requests that nobody waits for, such as read-ahead, that the kernel has under way at once.
const MAX_BACKGROUND: u16 = 64;

/// What is asked of the kernel if it offers it; each is a promise or a saving that SEMANTICS or ARCHITECTURE explains.
const WANTED: &[(InitFlags, &str)] = &[
    (InitFlags::FUSE_NO_OPEN_SUPPORT, "opening a file costs a message"),
    (InitFlags::FUSE_NO_OPENDIR_SUPPORT, "opening a directory costs a message"),
    (InitFlags::FUSE_PARALLEL_DIROPS, "lookups in one directory wait for each other"),
    // Each time, and not only when it expects that nodes are wanted (FUSE_READDIRPLUS_AUTO): we know better.
    (InitFlags::FUSE_DO_READDIRPLUS, "each file of a listing that is looked at costs a message"),
    (InitFlags::FUSE_POSIX_ACL, "there are no ACLs"),
    (InitFlags::FUSE_DONT_MASK, "default ACLs are combined with the umask"),
    (InitFlags::FUSE_HANDLE_KILLPRIV_V2, "each write asks for capabilities first"),
    (InitFlags::FUSE_MAX_PAGES, "requests are at most 128 KiB"),
    (InitFlags::FUSE_EXPLICIT_INVAL_DATA, "a changed size drops cached pages"),
    (InitFlags::FUSE_ASYNC_DIO, "direct requests wait for each other"),
];

/// What the kernel will not ask, if it is answered so once.
pub(super) struct Agreed {
    /// It takes ENOSYS to OPEN for "never ask again".
    pub(super) open_unasked: bool,
    /// The same of OPENDIR.
    pub(super) opendir_unasked: bool,
    /// It can be told to ask for a name again, and keeps what it has of it.
    pub(super) lets_names_expire: bool,
}

/// From this kernel on FUSE_NOTIFY_INVAL_ENTRY does not wait for the lock of the directory if it knows no such name
/// (`fuse_reverse_inval_entry`). So a switch cannot know that the kernel has taken in what was answered before.
const NO_LOCK: (u32, u32) = (6, 19);

/// Asks for what is wanted, and says in the log what there is not.
pub(super) fn agree(config: &mut KernelConfig, writeback: bool) -> Agreed {
    let waits_for_locks = sys::proc::kernel_release().is_some_and(|release| release < NO_LOCK);
    if !waits_for_locks {
        log::warn!(
            "this kernel is newer than Linux 6.18, or does not say how old it is: what is looked up or moved in the very moment of a \
             restore may stay what it was"
        );
    }
    for (flag, without) in WANTED {
        // Its answers take the longest to be taken in.
        if *flag == InitFlags::FUSE_DO_READDIRPLUS && !waits_for_locks {
            continue;
        }
        if config.add_capabilities(*flag).is_err() {
            log::warn!("this kernel lacks {flag:?}: {without}");
        }
    }
    let agreed = Agreed {
        open_unasked: config.capabilities().contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
        opendir_unasked: config.capabilities().contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        lets_names_expire: config.capabilities().contains(InitFlags::FUSE_HAS_EXPIRE_ONLY),
    };
    if writeback && config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE).is_err() {
        log::warn!("this kernel has no writeback cache: writes go through");
    }
    let limits = [
        config.set_max_write(MAX_REQUEST).err(),
        config.set_max_background(MAX_BACKGROUND).err().map(u32::from),
        config.set_time_granularity(Duration::from_nanos(1)).err().map(|_| 0),
    ];
    if limits.iter().any(Option::is_some) {
        log::warn!("limits of the session were refused: {limits:?}");
    }
    agreed
}
