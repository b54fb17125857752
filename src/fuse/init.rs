//! Negotiates the session's features in INIT, the kernel's first message.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use fuser::{Config, Filesystem, InitFlags, KernelConfig, Notifier, Request, Session, SessionACL};
use parking_lot::Mutex;

use crate::fuse::wire::Layout;
use crate::sys;

/// The most bytes that the kernel may read or write in one request.
pub(super) const MAX_REQUEST: u32 = 1 << 20;
/// How many background requests, such as read-ahead, the kernel may have pending.
const MAX_BACKGROUND: u16 = 64;

/// Features to enable, each with the consequence if the kernel lacks it. SEMANTICS or ARCHITECTURE
/// explains the promise or the saving behind each.
const WANTED: &[(InitFlags, &str)] = &[
    (InitFlags::FUSE_NO_OPEN_SUPPORT, "opening a file costs a message"),
    (InitFlags::FUSE_NO_OPENDIR_SUPPORT, "opening a directory costs a message"),
    (InitFlags::FUSE_PARALLEL_DIROPS, "lookups in one directory wait for each other"),
    // Always, and not only when the kernel expects a benefit (FUSE_READDIRPLUS_AUTO): the server
    // chooses by itself which names come with a node.
    (InitFlags::FUSE_DO_READDIRPLUS, "each file of a listing that is looked at costs a message"),
    (InitFlags::FUSE_POSIX_ACL, "there are no ACLs"),
    (InitFlags::FUSE_DONT_MASK, "default ACLs are combined with the umask"),
    (InitFlags::FUSE_SETXATTR_EXT, "an ACL that is set from outside the group keeps setgid"),
    (InitFlags::FUSE_HANDLE_KILLPRIV_V2, "each write asks for capabilities first"),
    (InitFlags::FUSE_MAX_PAGES, "requests are at most 128 KiB"),
    (InitFlags::FUSE_EXPLICIT_INVAL_DATA, "a changed size drops cached pages"),
    (InitFlags::FUSE_ASYNC_DIO, "direct requests wait for each other"),
];

/// The features that the kernel supports.
#[derive(Default)]
pub(super) struct Negotiated {
    /// ENOSYS to OPEN makes the kernel never send OPEN again.
    pub(super) no_open: bool,
    /// The same for OPENDIR.
    pub(super) no_opendir: bool,
    /// A dentry can be expired: it is looked up again, but stays in place until then.
    pub(super) can_expire_dentries: bool,
    /// Which fields SETXATTR has.
    pub(super) layout: Layout,
}

/// From this kernel version on, FUSE_NOTIFY_INVAL_ENTRY for an unknown name does not take the lock
/// of the directory (`fuse_reverse_inval_entry`). A switch then cannot wait until the kernel has
/// processed earlier replies.
const NO_LOCK: (u32, u32) = (6, 19);

/// Answers INIT. Returns what was agreed, and what sends notifications.
///
/// # Errors
/// As read(2) of the device, and if the kernel begins in another way.
pub(super) fn begin(device: OwnedFd, writeback: bool) -> io::Result<(Negotiated, Notifier)> {
    let agreed = Arc::default();
    let handshake = Handshake { writeback, agreed: Arc::clone(&agreed) };
    let session = Session::from_fd(handshake, device, SessionACL::All, Config::default())?;
    let agreed = std::mem::take(&mut *agreed.lock());
    Ok((agreed, session.notifier()))
}

/// The part of a filesystem that fuser asks.
struct Handshake {
    writeback: bool,
    agreed: Arc<Mutex<Negotiated>>,
}

impl Filesystem for Handshake {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        *self.agreed.lock() = negotiate(config, self.writeback);
        Ok(())
    }
}

/// Enables the wanted features, and logs those that the kernel lacks.
fn negotiate(config: &mut KernelConfig, writeback: bool) -> Negotiated {
    let waits_for_locks = sys::proc::kernel_release().is_some_and(|release| release < NO_LOCK);
    if !waits_for_locks {
        log::warn!(
            "this kernel is newer than Linux 6.18, or its version is unknown: a lookup or rename \
             during a restore may leave an outdated name in the kernel's cache"
        );
    }
    for (flag, without) in WANTED {
        // The kernel takes longest to process READDIRPLUS replies, so the race would be widest.
        if *flag == InitFlags::FUSE_DO_READDIRPLUS && !waits_for_locks {
            continue;
        }
        if config.add_capabilities(*flag).is_err() {
            log::warn!("this kernel lacks {flag:?}: {without}");
        }
    }
    let has_long_setxattr = config.capabilities().contains(InitFlags::FUSE_SETXATTR_EXT);
    let agreed = Negotiated {
        layout: Layout { has_long_setxattr },
        no_open: config.capabilities().contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
        no_opendir: config.capabilities().contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        can_expire_dentries: config.capabilities().contains(InitFlags::FUSE_HAS_EXPIRE_ONLY),
    };
    if writeback && config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE).is_err() {
        log::warn!("this kernel has no writeback cache: writes are not cached");
    }
    let limits = [
        config.set_max_write(MAX_REQUEST).err(),
        config.set_max_background(MAX_BACKGROUND).err().map(u32::from),
        config.set_time_granularity(Duration::from_nanos(1)).err().map(|_| 0),
    ];
    if limits.iter().any(Option::is_some) {
        log::warn!("the kernel refused limits of the session: {limits:?}");
    }
    agreed
}
