//! Serves one head: its FUSE session, its kernel, and the requests that mean it.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::{Arc, Weak};

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use parking_lot::{RwLock, RwLockReadGuard};

use super::plan::{Choice, Links};
use crate::control::{MountedHead, Waiting};
use crate::error::{Error, Kind, Result};
use crate::fs::{Fs, Kernel, Limits};
use crate::fuse;
use crate::fuse::{Handed, Mounted, Unmounter};
use crate::sandbox::Sandbox;
use crate::sys::mountinfo;

/// A mounted head.
pub(super) struct ServedHead {
    name: String,
    choice: Choice,
    unmounter: Unmounter,
    /// A request must not keep the mount.
    kernel: Weak<dyn Kernel>,
    /// Whether the mount is in the mount namespace of this process.
    is_here: bool,
    /// The sandbox while it is served. A request holds the lock while it runs, except a long one
    /// that changes nothing.
    sandbox: RwLock<Option<Arc<Sandbox>>>,
    /// The clients that wait for the end of the head.
    waiting: Arc<Waiting>,
}

impl ServedHead {
    /// Mounts the head of `sandbox` in this mount namespace.
    ///
    /// # Errors
    /// `CannotMount`: the mount cannot be made.
    pub(super) fn mount(
        sandbox: Arc<Sandbox>,
        mount_point: &Path,
        choice: &Choice,
    ) -> Result<(ServedHead, Mounted)> {
        let options = choice.mount_options(sandbox.head_name());
        let mount = |fs, store: &Path| fuse::mount(fs, mount_point, store, &options);
        let (head, mounted) = ServedHead::start(sandbox, mount_point, choice, mount)?;
        Ok((ServedHead { is_here: true, ..head }, mounted))
    }

    /// Serves the head of `sandbox` in a mount that was made for it in another mount namespace.
    /// There it is visible at `mount_point`, in a view of its own. Symlinks keep their text,
    /// because none leads out of the view.
    ///
    /// # Errors
    /// The mount cannot be served.
    pub(super) fn adopt(
        sandbox: Arc<Sandbox>,
        handed: Handed,
        mount_point: &Path,
        choice: &Choice,
    ) -> Result<(ServedHead, Mounted)> {
        let options = choice.mount_options(sandbox.head_name());
        let mount = |fs, store: &Path| fuse::adopt(fs, handed, mount_point, store, &options);
        let choice = Choice { links: Links::Literal, ..choice.clone() };
        ServedHead::start(sandbox, mount_point, &choice, mount)
    }

    fn start(
        sandbox: Arc<Sandbox>,
        mount_point: &Path,
        choice: &Choice,
        mount: impl FnOnce(Arc<Fs>, &Path) -> Result<Mounted>,
    ) -> Result<(ServedHead, Mounted)> {
        sandbox.set_view(choice.view(mount_point)?)?;
        sandbox.set_dedup(!choice.no_dedup);
        sandbox.set_policy(choice.policy(), choice.max_bytes);
        sandbox.fs().set_limits(Limits { bytes: choice.max_bytes, files: choice.max_files });
        if !choice.read_only {
            sandbox.fs().set_edit_bounds(choice.history());
        }
        let mounted = mount(Arc::clone(sandbox.fs()), sandbox.store_path())
            .inspect_err(|_| sandbox.set_unmounted())?;
        sandbox.attach(mounted.kernel());
        let head = ServedHead {
            name: sandbox.head_name().to_owned(),
            choice: choice.clone(),
            unmounter: mounted.unmounter(),
            kernel: Arc::downgrade(&mounted.kernel()),
            is_here: false,
            sandbox: RwLock::new(Some(sandbox)),
            waiting: Arc::default(),
        };
        Ok((head, mounted))
    }

    /// The name of the head.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The options of the mount.
    pub(super) fn choice(&self) -> &Choice {
        &self.choice
    }

    /// The name and the mount point.
    pub(super) fn listed(&self) -> MountedHead {
        let mount_point = self.unmounter.mount_point().as_os_str().as_bytes().to_vec();
        MountedHead { head: self.name.clone(), mount_point }
    }

    /// Ends the mount from any thread.
    pub(super) fn unmounter(&self) -> &Unmounter {
        &self.unmounter
    }

    /// The clients that wait for the end of the head.
    pub(super) fn waiting(&self) -> &Arc<Waiting> {
        &self.waiting
    }

    /// The error for a client that wants to mount the head `wanted` while this one is mounted.
    pub(super) fn in_use(&self, wanted: &str) -> Error {
        let point = self.unmounter.mount_point().display();
        let attempt = format!("mount head '{wanted}'");
        let reason =
            format!("its sandbox is mounted at '{point}' (process {})", std::process::id());
        Error::new(Kind::InUse, attempt, reason).hint(format!(
            "work in it, or end it with 'jailfs umount {point}'; a second sandbox is a fork, made \
             by 'jailfs fork', or needs a store of its own: --store DIR"
        ))
    }

    /// The sandbox. It is not closed while the guard lives. `None` if it is closed already.
    pub(super) fn sandbox(&self) -> RwLockReadGuard<'_, Option<Arc<Sandbox>>> {
        self.sandbox.read()
    }

    /// The sandbox, without a wait. `None` if it is closed or being closed.
    pub(super) fn open_sandbox(&self) -> Option<Arc<Sandbox>> {
        self.sandbox.try_read().and_then(|open| open.clone())
    }

    /// Whether its FUSE connection is up.
    pub(super) fn is_connected(&self) -> bool {
        self.kernel.upgrade().is_some_and(|kernel| kernel.is_connected())
    }

    /// Whether its mount is visible in this mount namespace. When the connection has ended, another
    /// filesystem may have the number of its device.
    pub(super) fn is_visible(&self) -> bool {
        let mounts = mountinfo::read().unwrap_or_default();
        self.is_connected() && mounts.iter().any(|mount| mount.dev == self.unmounter.dev())
    }

    /// Whether its mount point does not lead to it any more, after a lazy unmount. That is not
    /// known of a mount in another mount namespace.
    pub(super) fn is_detached(&self) -> bool {
        self.is_here && !self.is_visible()
    }

    /// Unmounts, on behalf of a client.
    ///
    /// # Errors
    /// As [`Unmounter::unmount`].
    pub(super) fn unmount(&self) -> Result<()> {
        // With a bind mount of the tree left, the kernel does not flush its dirty pages by itself.
        if let Some(Err(error)) = self.kernel.upgrade().map(|kernel| kernel.flush()) {
            log::warn!("{error}");
        }
        self.unmounter.unmount(false)
    }

    /// Takes the sandbox away from further requests, and waits for those in progress that change
    /// it.
    pub(super) fn close(&self) -> Option<Arc<Sandbox>> {
        self.sandbox.write().take()
    }

    /// Has the kernel ask once. The session starts the thread that answers by itself, and ends if
    /// the host refuses it one. This thread waits for the answer, and no signal ends that wait. So
    /// the guard must watch the mount already.
    ///
    /// # Errors
    /// Why the session ended. The head is closed then.
    pub(super) fn have_it_answer(&self, mounted: Mounted) -> Result<Mounted> {
        let point = mounted.mount_point().to_owned();
        let answer = if self.is_here { statvfs(&point).map(drop) } else { Ok(()) };
        let Err(errno @ (Errno::ENOTCONN | Errno::ECONNABORTED)) = answer else {
            return Ok(mounted);
        };
        let ended = mounted.wait();
        if let Err(error) = self.unmounter.unmount(true) {
            log::warn!("{error}");
        }
        if let Some(sandbox) = self.close() {
            sandbox.set_unmounted();
        }
        let attempt = || format!("serve '{}'", point.display());
        let error = ended.err().unwrap_or_else(|| Error::io(attempt(), &errno.into()));
        Err(error.kind(Kind::CannotMount).hint("see 'ulimit -u' and 'ulimit -v'"))
    }
}
