//! Bringing home what programs wrote through shared mappings, and with the writeback cache in any way: it is in the kernel until
//! somebody asks for it.
//!
//! syncfs(2) only starts that. There are two ways to wait for it:
//!
//! * Each file that can have such bytes is opened through the mount and synced. Without the writeback cache these are the
//!   files with a live shared mapping, as close and munmap sync by themselves.
//! * With the writeback cache, and where a process cannot be looked into, it may be any file that the kernel holds. Then we start
//!   it for all and wait until the kernel has no request left that was not answered ([`Connection::waiting`]).
//!   What it may still hold back then is of files that it was about to write back or to cut a moment ago: these are
//!   synced one by one. Where the kernel does not tell how many requests there are, or there is always one, all files that it holds
//!   are.
//!
//! A file that we may not open (its mode, or that of a directory above it, does not let our own user in) goes the second way, too. What
//! the kernel held back of it is on its way a moment later, so it is waited for a second moment without requests then. And where such a moment
//! cannot be had, the kernel is told to forget the content of the file: it writes back what is dirty first, and returns when that is
//! answered.
//!
//! Either way this process asks its own mount. If it is killed meanwhile, the thread that asks waits for an answer that nobody
//! gives, and no signal ends that. The kernel gives a mount up when its device is closed; so this thread must not be one
//! of those that have it open, or the mount hangs for ever, with everybody in it: see [`Asker`].

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{Mode, fstat};
use nix::unistd::syncfs;
use parking_lot::Mutex;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fuse::kernel::{Mount, Root};
use crate::sys;
use crate::sys::fusectl::Connection;
use crate::types::{Ino, NodeId, TreePath};

/// How long a file is looked for that is renamed again and again meanwhile.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long it is waited for a moment without requests.
const QUIET_LIMIT: Duration = Duration::from_millis(100);
/// The kernel lets go what it held back of a file when the thread runs on that waited for the answer: for so long we think of
/// the file.
const RECENT: Duration = Duration::from_secs(1);
/// From so many files on, those that are not recent any more are forgotten.
const MANY: usize = 1024;

/// Files that the kernel wrote back or cut a moment ago.
#[derive(Default)]
pub(super) struct Homeward(Mutex<HashMap<NodeId, Instant>>);

impl Homeward {
    /// A page of a file was written back, or it was cut. To be called before that is answered.
    pub(super) fn note(&self, id: NodeId) {
        let now = Instant::now();
        let mut files = self.0.lock();
        if files.len() >= MANY && files.len().is_power_of_two() {
            files.retain(|_, noted| now.duration_since(*noted) < RECENT);
        }
        files.insert(id, now);
    }

    /// Those that were noted within the last moment.
    fn recent(&self) -> Vec<NodeId> {
        let now = Instant::now();
        let mut files = self.0.lock();
        files.retain(|_, noted| now.duration_since(*noted) < RECENT);
        files.keys().copied().collect()
    }
}

impl Mount {
    /// Brings everything home.
    ///
    /// # Errors
    /// When a file cannot be synced, or `/proc` not be read.
    pub(super) fn bring_home(&self) -> Result<()> {
        let scan = sys::proc::shared_maps(self.dev, self.all_users)
            .attempt(|| "find out who has files of the mount mapped")?;
        let mut files: BTreeSet<Ino> =
            scan.files.iter().flat_map(|(number, _)| self.fs.meant_by(*number)).collect();
        let any_file = self.writeback || !scan.unreadable.is_empty();
        if files.is_empty() && !any_file {
            return Ok(());
        }
        std::thread::scope(|scope| {
            let asker = Asker::start(scope, &self.root, self.dev).attempt(|| "start a thread")?;
            if any_file {
                if asker.is_quiet()? {
                    files.extend(self.fs.live_files(&self.homeward.recent()));
                } else {
                    files.extend(self.fs.held_files());
                }
            }
            let mut closed = BTreeSet::new();
            for ino in files {
                if self.flush_file(&asker, ino)? == Way::Closed {
                    closed.insert(ino);
                }
            }
            self.flush_closed(&asker, &closed)
        })
    }

    /// Brings home what is dirty of files that we may not open.
    fn flush_closed(&self, asker: &Asker, closed: &BTreeSet<Ino>) -> Result<()> {
        if closed.is_empty() {
            return Ok(());
        }
        let mut is_home = asker.is_quiet()?;
        let recent = self.fs.live_files(&self.homeward.recent());
        if is_home && recent.iter().any(|ino| closed.contains(ino)) {
            std::thread::sleep(RECENT);
            is_home = asker.is_quiet()?;
        }
        if !is_home {
            let ids = closed.iter().filter_map(|ino| self.fs.id_of(*ino));
            ids.for_each(|id| self.channel.forget_content(id));
        }
        Ok(())
    }

    /// Brings home what is dirty of one file; of one that is gone, its bytes belong to its holders alone.
    fn flush_file(&self, asker: &Asker, ino: Ino) -> Result<Way> {
        let end = Instant::now() + PATIENCE;
        loop {
            let Some(path) = self.fs.path_of(ino) else { return Ok(Way::Done) };
            let errno = match asker.flush(ino, &path)? {
                Flushed::Home(synced) => {
                    return synced.attempt(|| format!("bring home '{path}'")).map(|()| Way::Done);
                }
                Flushed::NotOpened(Errno::EACCES) if self.nobody_could_write(ino, &path) => {
                    return Ok(Way::Done);
                }
                // Nobody reads pages of it, nor writes any; and where it is covered nothing leads to it.
                Flushed::NotOpened(_) if self.is_hidden(ino, &path) => return Ok(Way::Done),
                Flushed::NotOpened(Errno::EACCES) => return Ok(Way::Closed),
                // Renamed between our question and the open: by now it may have a name that stays for long enough.
                Flushed::NotOpened(errno) => errno,
            };
            let renamed = matches!(errno, Errno::ESTALE | Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP);
            // A path that is too long to be opened at once, say, or over which something is mounted: there is another way.
            if !renamed || Instant::now() > end {
                log::debug!("open '{path}' to bring it home: {errno}");
                return Ok(Way::Closed);
            }
        }
    }

    fn is_hidden(&self, ino: Ino, path: &TreePath) -> bool {
        let state = self.fs.state();
        state.resolve(path).is_ok_and(|found| found.ino() == Some(ino) && state.is_hidden(&found))
    }

    /// Whether a file that we may not open is one that no process in the mount may open either: it is another user's, and
    /// only our own user may enter.
    fn nobody_could_write(&self, ino: Ino, path: &TreePath) -> bool {
        let state = self.fs.state();
        let found = state.resolve(path).ok().filter(|found| found.ino() == Some(ino));
        let owner = found.and_then(|found| state.attr(&found)).map(|attr| attr.meta.uid);
        !self.all_users && owner.is_some_and(|owner| owner != nix::unistd::geteuid().as_raw())
    }
}

/// What is asked of the mount.
enum Question {
    /// To start to bring all files home; whether a moment came in which the kernel had no request left.
    Quiet,
    /// To bring this file home.
    File(Ino, TreePath),
}

/// Whether a file is home.
#[derive(PartialEq, Eq)]
enum Way {
    /// Nothing of it is dirty that anybody but its holders will see.
    Done,
    /// It cannot be opened.
    Closed,
}

enum Answer {
    Quiet(bool),
    File(Flushed),
}

/// What came of one file.
enum Flushed {
    /// It was opened, and synced or not.
    Home(io::Result<()>),
    /// It could not be opened by this path; ESTALE if that is another file by now.
    NotOpened(Errno),
}

/// A thread that asks the mount, and has nothing open but what it asks for. It ends when this is dropped.
struct Asker {
    questions: Sender<Question>,
    answers: Receiver<Result<Answer>>,
}

impl Asker {
    fn start<'s>(scope: &'s Scope<'s, '_>, root: &'s Root, dev: u64) -> io::Result<Asker> {
        let ((questions, asked), (answer, answers)) = (channel(), channel());
        let body = move || {
            let kept = match root {
                Root::At(_) => None,
                Root::Held(root) => Some(root.as_fd()),
            };
            if let Err(error) = sys::process::own_open_files(kept) {
                log::warn!(
                    "if this process is killed while it flushes, the mount must be ended by force: {error}"
                );
            }
            let entered = enter(root, dev);
            for question in asked {
                let root = entered.as_ref().map_err(Error::clone);
                let answered = root.and_then(|root| match question {
                    Question::Quiet => is_quiet(root, dev).map(Answer::Quiet),
                    Question::File(ino, path) => Ok(Answer::File(flush(root, ino, &path))),
                });
                // Whoever asked has gone: there is nobody left to tell.
                if answer.send(answered).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("flush".to_owned()).spawn_scoped(scope, body)?;
        Ok(Asker { questions, answers })
    }

    fn ask(&self, question: Question) -> Result<Answer> {
        let ended = || Error::new(Kind::Failed, "bring home what was written", "its thread has ended");
        self.questions.send(question).map_err(|_| ended())?;
        self.answers.recv().map_err(|_| ended())?
    }

    fn is_quiet(&self) -> Result<bool> {
        // No other answer comes to this question.
        Ok(matches!(self.ask(Question::Quiet)?, Answer::Quiet(true)))
    }

    fn flush(&self, ino: Ino, path: &TreePath) -> Result<Flushed> {
        match self.ask(Question::File(ino, path.clone()))? {
            Answer::File(flushed) => Ok(flushed),
            Answer::Quiet(_) => Ok(Flushed::NotOpened(Errno::ESTALE)),
        }
    }
}

fn flush(root: &impl AsFd, ino: Ino, path: &TreePath) -> Flushed {
    match open_for_sync(root, path) {
        Ok(file) if fstat(&file).is_ok_and(|stat| stat.st_ino == ino.0) => {
            Flushed::Home(sys::file::sync_file_range_all(&file))
        }
        Ok(_) => Flushed::NotOpened(Errno::ESTALE),
        Err(errno) => Flushed::NotOpened(errno),
    }
}

/// Starts to bring all files home; whether a moment came in which the kernel had no request left.
fn is_quiet(root: &impl AsFd, dev: u64) -> Result<bool> {
    let connection = match Connection::open(dev) {
        Ok(connection) => connection,
        Err(error) => {
            log::debug!("the kernel does not tell how many requests it has: {error}");
            return Ok(false);
        }
    };
    let attempt = || "start to bring home what was written";
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let dir = openat(root, ".", flags, Mode::empty()).map_err(io::Error::from).attempt(attempt)?;
    syncfs(&dir).map_err(io::Error::from).attempt(attempt)?;
    let end = Instant::now() + QUIET_LIMIT;
    while Instant::now() < end {
        match connection.waiting() {
            Ok(0) => return Ok(true),
            Ok(_) => std::thread::sleep(Duration::from_micros(50)),
            Err(_) => return Ok(false),
        }
    }
    Ok(false)
}

/// A root that was opened for this, or one that somebody holds.
enum Entered<'r> {
    Opened(OwnedFd),
    Held(BorrowedFd<'r>),
}

impl AsFd for Entered<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Entered::Opened(root) => root.as_fd(),
            Entered::Held(root) => *root,
        }
    }
}

/// The root of the mount, by which its files are opened.
fn enter(root: &Root, dev: u64) -> Result<Entered<'_>> {
    let point = match root {
        Root::At(point) => point,
        Root::Held(root) => return Ok(Entered::Held(root.as_fd())),
    };
    let attempt = || format!("enter the mount '{}'", point.display());
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let root = open(point, flags, Mode::empty()).map_err(io::Error::from).attempt(attempt)?;
    let stat = fstat(&root).map_err(io::Error::from).attempt(attempt)?;
    if stat.st_dev != dev {
        return Err(Error::new(Kind::Failed, attempt(), "something else is mounted there"));
    }
    Ok(Entered::Opened(root))
}

/// Opens a file of the mount for reading or, where that is not allowed, for writing: the descriptor only names the file.
/// Neither a link nor another mount is entered on the way.
fn open_for_sync(root: &impl AsFd, path: &TreePath) -> nix::Result<OwnedFd> {
    match open_within(root, path, OFlag::O_RDONLY) {
        Err(Errno::EACCES) => open_within(root, path, OFlag::O_WRONLY),
        other => other,
    }
}

fn open_within(root: &impl AsFd, path: &TreePath, access: OFlag) -> nix::Result<OwnedFd> {
    let flags = access | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let within =
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_XDEV;
    match openat2(root, path.as_os_str(), OpenHow::new().flags(flags).resolve(within)) {
        // An old kernel, or a container that forbids it: the number of what was opened is checked in any case.
        Err(Errno::ENOSYS | Errno::EPERM) => openat(root, path.as_os_str(), flags, Mode::empty()),
        other => other,
    }
}
