//! Flushes dirty pages: writes reach the layer that the kernel still holds in its page cache.
//!
//! Programs make dirty pages through shared mappings and, with the writeback cache, by every write.
//! syncfs(2) starts their writeback but does not wait for it. There are three ways to wait:
//!
//! * **Wait for an idle connection.** Start the writeback of all files and wait until no request is
//!   pending ([`Connection::waiting`]). Then sync the files that were written back or truncated
//!   within the last second, because the kernel may still keep pages of these back. This costs the
//!   same however many processes there are.
//! * **Sync each file.** If the connection does not become idle, or many files are recent, open
//!   every candidate through the mount and sync it. Without the writeback cache, the candidates are
//!   the files with a live shared mapping, by `/proc/*/maps`: close(2) and munmap(2) flush. With
//!   it, or if some process cannot be inspected, any file that the kernel holds is a candidate.
//! * **Invalidate.** The daemon's user may lack permission to open a file. Wait for an idle
//!   connection, and once more a second later if the file is recent. If the connection does not
//!   become idle, invalidate the file's pages: the kernel writes dirty pages back before it
//!   returns.
//!
//! In each case this process sends requests to its own mount. If the process is killed meanwhile,
//! the requesting thread waits for a reply that never comes, and no signal ends that wait. The
//! kernel aborts a connection once its device is unopenable. So the requesting thread must not have
//! the device open, or the mount hangs for ever: see [`FlushThread`].

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::syncfs;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::mount::{Mount, Root};
use crate::fuse::recent_writeback::RECENT;
use crate::sys;
use crate::sys::fusectl::Connection;
use crate::types::{Ino, TreePath};

/// How long a file is looked up again that is renamed at each attempt.
const RENAME_RETRY_LIMIT: Duration = Duration::from_secs(10);
/// How long to wait for a moment without pending requests, where the alternative is to sync every
/// file that the kernel holds.
const IDLE_LIMIT: Duration = Duration::from_millis(100);
/// The same, where the alternative is to read the mappings of every process.
const SHORT_IDLE_LIMIT: Duration = Duration::from_millis(5);
/// Files that are synced in one task, at most. The paths of all are looked up before the first one
/// is opened, so more of them would be renamed in between.
const MAX_FILES: usize = 64;
/// Above this number of recent files, the mappings of all processes are read instead.
const MAX_RECENT: usize = 512;

impl Mount {
    /// Flushes every dirty page of the mount.
    ///
    /// # Errors
    /// When a file cannot be synced, or `/proc` cannot be read.
    pub(super) fn flush_dirty_pages(&self) -> Result<()> {
        std::thread::scope(|scope| {
            let thread = FlushThread::start(scope, self).attempt(|| "start a thread")?;
            let files: Vec<Ino> = self.start_writeback(&thread)?.into_iter().collect();
            let mut unopenable = BTreeSet::new();
            for some in files.chunks(MAX_FILES) {
                unopenable.extend(self.flush_files(&thread, some.to_vec())?);
            }
            self.flush_unopenable(&thread, &unopenable)
        })
    }

    /// Starts the writeback of all files, and waits for it where that is possible. Returns the
    /// files that must be synced one by one.
    fn start_writeback(&self, thread: &FlushThread) -> Result<BTreeSet<Ino>> {
        let recent = || self.fs.live_files(&self.recent_writeback.recent());
        if !self.writeback {
            if thread.start_writeback_and_wait(SHORT_IDLE_LIMIT)? {
                let recent = recent();
                if recent.len() <= MAX_RECENT {
                    return Ok(recent.into_iter().collect());
                }
            }
            let scan = sys::proc::shared_maps(self.dev, self.all_users)
                .attempt(|| "look for processes that map files of the mount")?;
            if scan.unreadable.is_empty() {
                let mapped = scan.files.iter();
                return Ok(mapped
                    .flat_map(|(number, _)| self.fs.nodes_numbered(*number))
                    .collect());
            }
        }
        let is_idle = thread.start_writeback_and_wait(IDLE_LIMIT)?;
        Ok(if is_idle { recent() } else { self.fs.held_files() }.into_iter().collect())
    }

    /// Flushes files that the daemon may not open.
    fn flush_unopenable(&self, thread: &FlushThread, unopenable: &BTreeSet<Ino>) -> Result<()> {
        if unopenable.is_empty() {
            return Ok(());
        }
        let mut is_clean = thread.start_writeback_and_wait(IDLE_LIMIT)?;
        let recent = self.fs.live_files(&self.recent_writeback.recent());
        if is_clean && recent.iter().any(|ino| unopenable.contains(ino)) {
            std::thread::sleep(RECENT);
            is_clean = thread.start_writeback_and_wait(IDLE_LIMIT)?;
        }
        if !is_clean {
            let ids = unopenable.iter().filter_map(|ino| self.fs.id_of(*ino));
            ids.for_each(|id| self.channel.invalidate_pages(id));
        }
        Ok(())
    }

    /// Flushes files. Returns those that the daemon may not open. A file without a name is
    /// skipped: only processes that still have it open can see its bytes.
    fn flush_files(&self, thread: &FlushThread, mut files: Vec<Ino>) -> Result<Vec<Ino>> {
        let (mut end, mut unopenable) = (None, Vec::new());
        while !files.is_empty() {
            let named: Vec<(Ino, TreePath)> =
                files.iter().filter_map(|ino| Some((*ino, self.fs.path_of(*ino)?))).collect();
            files.clear();
            let synced = thread.sync(named.clone())?;
            let end = *end.get_or_insert_with(|| Instant::now() + RENAME_RETRY_LIMIT);
            for ((ino, path), synced) in named.iter().zip(synced) {
                match self.outcome(*ino, path, synced)? {
                    FileFlush::Done => {}
                    FileFlush::Moved if Instant::now() <= end => files.push(*ino),
                    FileFlush::Moved => {
                        log::debug!("'{path}' led elsewhere at each attempt to flush it");
                        unopenable.push(*ino);
                    }
                    FileFlush::Unopenable => unopenable.push(*ino),
                }
            }
        }
        Ok(unopenable)
    }

    /// Judges the sync of one file.
    fn outcome(&self, ino: Ino, path: &TreePath, synced: OpenAndSync) -> Result<FileFlush> {
        let errno = match synced {
            OpenAndSync::Synced(synced) => {
                return synced.attempt(|| format!("flush '{path}'")).map(|()| FileFlush::Done);
            }
            OpenAndSync::NotOpened(errno) => errno,
        };
        // A hidden file has no reachable pages: nothing in the mount leads to it.
        if errno == Errno::EACCES && self.is_unwritable(ino, path) || self.is_hidden(ino, path) {
            return Ok(FileFlush::Done);
        }
        Ok(match errno {
            // Its new name may last longer.
            Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP => FileFlush::Moved,
            Errno::EACCES => FileFlush::Unopenable,
            // A path longer than PATH_MAX, or something mounted over it.
            errno => {
                log::debug!("open '{path}' to flush it: {errno}");
                FileFlush::Unopenable
            }
        })
    }

    fn is_hidden(&self, ino: Ino, path: &TreePath) -> bool {
        let state = self.fs.state();
        state.resolve(path).is_ok_and(|found| found.ino() == Some(ino) && state.is_hidden(&found))
    }

    /// Whether no process in the mount may open this file either: it belongs to another user, and
    /// only the daemon's user may enter.
    fn is_unwritable(&self, ino: Ino, path: &TreePath) -> bool {
        let state = self.fs.state();
        let found = state.resolve(path).ok().filter(|found| found.ino() == Some(ino));
        let owner = found.and_then(|found| state.attr(&found)).map(|attr| attr.meta.uid);
        !self.all_users && owner.is_some_and(|owner| owner != nix::unistd::geteuid().as_raw())
    }
}

/// A task of the flush thread.
enum Task {
    /// Start the writeback of all files and wait at most this long for an idle connection.
    WritebackAll(Duration),
    /// Open and sync these files.
    Sync(Vec<(Ino, TreePath)>),
}

/// Whether one file was flushed.
enum FileFlush {
    /// No dirty page is left that other processes can come to see.
    Done,
    /// Its path led elsewhere by the time it was opened.
    Moved,
    /// The file cannot be opened.
    Unopenable,
}

/// The result of a [`Task`].
enum TaskResult {
    /// Whether the connection became idle.
    WritebackAll(bool),
    /// In the order of the files.
    Synced(Vec<OpenAndSync>),
}

/// The outcome of a file of [`Task::Sync`].
enum OpenAndSync {
    /// The file was opened; this is the result of the sync.
    Synced(io::Result<()>),
    /// The path could not be opened; ESTALE if it is another file by now.
    NotOpened(Errno),
}

/// A thread that sends requests to the mount. It has a descriptor table of its own, without the
/// session's device. It ends when this is dropped.
struct FlushThread {
    tasks: Sender<Task>,
    results: Receiver<Result<TaskResult>>,
}

impl FlushThread {
    fn start<'s>(scope: &'s Scope<'s, '_>, mount: &'s Mount) -> io::Result<FlushThread> {
        let (root, dev) = (&mount.root, mount.dev);
        let ((tasks, queue), (sender, results)) = (channel(), channel());
        let body = move || {
            let kept = match root {
                Root::At(_) => None,
                Root::Held(root) => Some(root.as_fd()),
            };
            if let Err(error) = sys::process::own_open_files(kept) {
                log::warn!("a kill during this flush would leave a hanging mount: {error}");
            }
            let entered = enter(root, dev);
            for task in queue {
                let result = match (task, &entered) {
                    (Task::WritebackAll(limit), Ok(root)) => {
                        start_writeback_and_wait(root, (mount, limit)).map(TaskResult::WritebackAll)
                    }
                    // If any file is to be flushed, its task fails.
                    (Task::WritebackAll(_), Err(error)) => {
                        log::debug!("{error}");
                        Ok(TaskResult::WritebackAll(false))
                    }
                    (Task::Sync(files), Ok(root)) => {
                        let sync = |(ino, path)| open_and_sync(root, ino, &path);
                        Ok(TaskResult::Synced(files.into_iter().map(sync).collect()))
                    }
                    (Task::Sync(_), Err(error)) => Err(error.clone()),
                };
                // The requesting thread has gone, so nothing more is to do.
                if sender.send(result).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("flush".to_owned()).spawn_scoped(scope, body)?;
        Ok(FlushThread { tasks, results })
    }

    fn run(&self, task: Task) -> Result<TaskResult> {
        let ended = || Error::new(Kind::Failed, "flush dirty pages", "the flush thread has ended");
        self.tasks.send(task).map_err(|_| ended())?;
        self.results.recv().map_err(|_| ended())?
    }

    /// Starts the writeback of all files. Returns whether the connection became idle in time.
    fn start_writeback_and_wait(&self, limit: Duration) -> Result<bool> {
        Ok(matches!(self.run(Task::WritebackAll(limit))?, TaskResult::WritebackAll(true)))
    }

    /// Opens and syncs files. Returns an outcome for each, in their order.
    fn sync(&self, files: Vec<(Ino, TreePath)>) -> Result<Vec<OpenAndSync>> {
        match self.run(Task::Sync(files))? {
            TaskResult::Synced(synced) => Ok(synced),
            // Unreachable: each task has its own kind of result.
            TaskResult::WritebackAll(_) => {
                Err(Error::new(Kind::Failed, "flush dirty pages", "the flush thread is confused"))
            }
        }
    }
}

fn open_and_sync(root: &impl AsFd, ino: Ino, path: &TreePath) -> OpenAndSync {
    match open_for_sync(root, path) {
        Ok(file) if has_number(&file, ino) => {
            OpenAndSync::Synced(sys::file::sync_file_range_all(&file))
        }
        Ok(_) => OpenAndSync::NotOpened(Errno::ESTALE),
        Err(errno) => OpenAndSync::NotOpened(errno),
    }
}

/// Whether a file has this number. The daemon never gives a live file another one, so the number
/// that the kernel knows is enough. fstat(2) would send a request for each file that was written.
fn has_number(file: &OwnedFd, ino: Ino) -> bool {
    sys::file::known_inode_number(file) == Some(ino.0)
        || fstat(file).is_ok_and(|stat| stat.st_ino == ino.0)
}

/// Starts the writeback of all files. Returns whether, within `limit`, the kernel had no pending
/// request but those that wait for this flush. False also if it does not tell, or the root cannot
/// be opened.
fn start_writeback_and_wait(root: &impl AsFd, (mount, limit): (&Mount, Duration)) -> Result<bool> {
    let attempt = || "start the writeback of dirty pages";
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let dir = match openat(root, ".", flags, Mode::empty()) {
        Ok(dir) => dir,
        Err(errno) => {
            log::debug!("open the root of the mount: {errno}");
            return Ok(false);
        }
    };
    // With a writeback cache this also makes the kernel send the times of files.
    syncfs(&dir).map_err(io::Error::from).attempt(attempt)?;
    let connection = match Connection::open(mount.dev) {
        Ok(connection) => connection,
        Err(error) => {
            log::debug!("the number of pending requests is unknown: {error}");
            return Ok(false);
        }
    };
    let end = Instant::now() + limit;
    while Instant::now() < end {
        match mount.flush_waiters.are_alone(|| connection.waiting()) {
            Ok(true) => return Ok(true),
            Ok(false) => std::thread::sleep(Duration::from_micros(50)),
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

/// The root of the mount: opened for this flush, or held for as long as the mount.
enum EnteredRoot<'r> {
    Opened(OwnedFd),
    Held(BorrowedFd<'r>),
}

impl AsFd for EnteredRoot<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            EnteredRoot::Opened(root) => root.as_fd(),
            EnteredRoot::Held(root) => *root,
        }
    }
}

/// Opens the root of the mount. Fails if another filesystem is mounted at its path.
fn enter(root: &Root, dev: u64) -> Result<EnteredRoot<'_>> {
    let point = match root {
        Root::At(point) => point,
        Root::Held(root) => return Ok(EnteredRoot::Held(root.as_fd())),
    };
    let attempt = || format!("enter the mount '{}'", point.display());
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let root = open(point, flags, Mode::empty()).map_err(io::Error::from).attempt(attempt)?;
    let stat = fstat(&root).map_err(io::Error::from).attempt(attempt)?;
    if stat.st_dev != dev {
        return Err(Error::new(Kind::Failed, attempt(), "something else is mounted there"));
    }
    Ok(EnteredRoot::Opened(root))
}

/// Opens a file of the mount for reading or, if that is not permitted, for writing. The sync needs
/// any descriptor. No symlink is followed and no other mount is entered on the way.
fn open_for_sync(root: &impl AsFd, path: &TreePath) -> nix::Result<OwnedFd> {
    match open_within(root, path, OFlag::O_RDONLY) {
        Err(Errno::EACCES) => open_within(root, path, OFlag::O_WRONLY),
        other => other,
    }
}

fn open_within(root: &impl AsFd, path: &TreePath, access: OFlag) -> nix::Result<OwnedFd> {
    let flags = access | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let within = ResolveFlag::RESOLVE_BENEATH
        | ResolveFlag::RESOLVE_NO_SYMLINKS
        | ResolveFlag::RESOLVE_NO_XDEV;
    match openat2(root, path.as_os_str(), OpenHow::new().flags(flags).resolve(within)) {
        // An old kernel, or a container that forbids openat2(2). The caller compares the inode
        // number in any case.
        Err(Errno::ENOSYS | Errno::EPERM) => openat(root, path.as_os_str(), flags, Mode::empty()),
        other => other,
    }
}
