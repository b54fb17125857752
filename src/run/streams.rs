//! Keeps files of the host out of the command's descriptors.
//!
//! A descriptor of a host file is a way around every wall: with it the command could change the
//! file's mode, owner, times, attributes and length, or reopen it. So the process outside replaces
//! each such descriptor by a pipe, and a thread copies between pipe and file.
//!
//! * The command inherits only unnamed pipes, sockets, the plain devices and its terminal. The
//!   devices and the terminal are reopened in the view, whose mounts are read-only
//!   ([`reopen_devices`]).
//! * When [`Relays::finish`] returns, everything that the command wrote is in its file, in the
//!   order of its writes. Descriptors of one open file (`> log 2>&1`) share one pipe.
//! * The offset of an input file is moved back by the bytes that the command did not read.
//!
//! A file that is open for reading and writing gets one direction: input as descriptor 0, output as
//! 1 and 2. Under other numbers it is closed, and so are devices, directories and O_PATH
//! descriptors.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{major, minor};
use nix::unistd::{dup2_stderr, dup2_stdin, dup2_stdout, pipe2, read, write};

use crate::error::{Attempt, Error, Result};
use crate::sys::{file, process};

/// Bytes per copy.
const CHUNK: usize = 256 << 10;
/// Bytes that a pipe holds, where the kernel allows this size.
const PIPE_SIZE: i32 = 1 << 20;
/// Bytes that a named pipe or a device takes without blocking, once poll(2) reports it writable
/// (pipe(7)).
const ATOMIC: usize = 4096;
/// How long a named pipe without a reader can delay the end of a run, in milliseconds.
const PATIENCE: u16 = 1000;

/// The device numbers of null, zero, full, random, urandom and tty, which every view has.
const PLAIN: &[(u64, u64)] = &[(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0)];

/// How the command gets a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Unchanged: it leads to no file of the host.
    Passes,
    /// The command reads it through a pipe.
    Input,
    /// The command writes it through a pipe.
    Output,
    /// Not at all.
    Closed,
}

/// An end of a pipe, and its descriptor number in the command.
pub(super) type Given = (OwnedFd, RawFd);

/// The pipes of one command, before it starts.
pub(super) struct Streams {
    /// Replacements for the descriptors of the host.
    pub given: Vec<Given>,
    routes: Vec<Route>,
}

/// A file of the host, and our end of its pipe.
struct Route {
    number: RawFd,
    role: Role,
    host: File,
    ours: OwnedFd,
    /// The command's end of an input pipe, from which the unread bytes are counted.
    theirs: Option<OwnedFd>,
}

/// The threads that copy.
#[derive(Debug, Default)]
pub(super) struct Relays {
    threads: Vec<JoinHandle<io::Result<()>>>,
    names: Vec<RawFd>,
    /// Closed when the command has ended.
    until: Option<OwnedFd>,
}

/// Keeps the descriptors above 2 of this process from the commands that it starts. Call it before
/// any thread starts.
///
/// # Errors
/// /proc cannot be read, or a descriptor cannot be changed.
pub fn keep_descriptors() -> Result<()> {
    let attempt = || "keep open files from the commands";
    for number in descriptors().attempt(attempt)?.into_iter().filter(|number| *number > 2) {
        // The descriptor of the listing itself is closed by now.
        if flags_of(number).is_some_and(|flags| flags & libc::O_CLOEXEC == 0) {
            // It stays open here, for whatever the caller keeps it open for.
            let _open = process::inherited(number).attempt(attempt)?.into_raw_fd();
        }
    }
    Ok(())
}

impl Streams {
    /// The streams of a command that gets pipes of its own.
    pub(super) fn of_pipes(given: Vec<Given>) -> Streams {
        Streams { given, routes: Vec::new() }
    }

    /// Finds the descriptors that a child would inherit, and makes the pipes. A directory among the
    /// three standard streams becomes `/dev/null`.
    ///
    /// # Errors
    /// Those of pipe(2) and fcntl(2).
    pub(super) fn prepare(in_view: bool) -> io::Result<Streams> {
        let mut streams = Streams { given: Vec::new(), routes: Vec::new() };
        for number in descriptors()? {
            let Some(flags) =
                flags_of(number).filter(|flags| number <= 2 || flags & libc::O_CLOEXEC == 0)
            else {
                continue;
            };
            match role_of(number, flags, in_view) {
                Role::Passes => {}
                Role::Closed => close(number)?,
                role => streams.route(number, role)?,
            }
        }
        Ok(streams)
    }

    fn route(&mut self, number: RawFd, role: Role) -> io::Result<()> {
        let is_same =
            |route: &&Route| route.role == role && process::is_same_open_file(route.number, number);
        if let Some(earlier) = self.routes.iter().find(is_same).map(|route| route.number) {
            let shared = self.given.iter().find(|(_, known)| *known == earlier);
            let end = shared.ok_or(Errno::EBADF)?.0.try_clone()?;
            self.given.push((end, number));
            return Ok(());
        }
        let host = File::from(process::duplicate(number)?);
        let (read_end, write_end) = pipe2(OFlag::O_CLOEXEC)?;
        if let Err(error) = fcntl(&read_end, FcntlArg::F_SETPIPE_SZ(PIPE_SIZE)) {
            log::debug!("make a pipe larger: {error}");
        }
        let (ours, given, theirs) = match role {
            Role::Input => (write_end, read_end.try_clone()?, Some(read_end)),
            _ => (read_end, write_end, None),
        };
        fcntl(&ours, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        self.given.push((given, number));
        self.routes.push(Route { number, role, host, ours, theirs });
        Ok(())
    }

    /// Starts the copying threads. Closes the command's ends of the pipes.
    ///
    /// # Errors
    /// Those of pipe(2), and of starting a thread.
    pub(super) fn relay(self) -> io::Result<Relays> {
        let mut relays = Relays::default();
        if self.routes.is_empty() {
            return Ok(relays);
        }
        let (stop, until) = pipe2(OFlag::O_CLOEXEC)?;
        relays.until = Some(until);
        for route in self.routes {
            let stop = Stop { fd: stop.try_clone()?, is_over: false };
            relays.names.push(route.number);
            let copy = move || {
                if route.role == Role::Input {
                    copy_in(route, stop)
                } else {
                    copy_out(&route, stop)
                }
            };
            relays.threads.push(std::thread::Builder::new().name("relay".to_owned()).spawn(copy)?);
        }
        Ok(relays)
    }
}

impl Relays {
    /// Waits until the content of all pipes is copied, and returns the failures. No process of the
    /// command lives any more.
    pub(super) fn finish(mut self) -> Vec<Error> {
        self.end()
    }

    fn end(&mut self) -> Vec<Error> {
        self.until = None;
        let ended =
            self.threads.drain(..).zip(self.names.drain(..)).filter_map(|(thread, number)| {
                let result = thread
                    .join()
                    .unwrap_or_else(|_| Err(io::Error::other("the thread ended early")));
                let what = match number {
                    0 => "copy the standard input to the command".to_owned(),
                    1 => "copy the standard output of the command".to_owned(),
                    2 => "copy the standard error of the command".to_owned(),
                    _ => format!("copy descriptor {number} of the command"),
                };
                result.err().map(|error| Error::io(what, &error))
            });
        ended.collect()
    }
}

impl Drop for Relays {
    fn drop(&mut self) {
        self.end().iter().for_each(|error| log::warn!("{error}"));
    }
}

/// Reopens the plain devices and the terminal among the standard streams in the view. Its mounts
/// are read-only, so the command cannot change the mode or owner of the host's devices.
///
/// # Errors
/// Those of open(2) and dup2(2).
pub(super) fn reopen_devices() -> io::Result<()> {
    for number in 0..=2 {
        let link = PathBuf::from(format!("/proc/self/fd/{number}"));
        let (Ok(about), Some(flags)) = (std::fs::metadata(&link), flags_of(number)) else {
            continue;
        };
        if !about.file_type().is_char_device() {
            continue;
        }
        let access = flags & libc::O_ACCMODE;
        let opened = OpenOptions::new()
            .read(access != libc::O_WRONLY)
            .write(access != libc::O_RDONLY)
            .custom_flags(flags & (libc::O_APPEND | libc::O_NONBLOCK) | libc::O_NOCTTY)
            .open(in_view(about.rdev()).ok_or(Errno::ENXIO)?)?;
        replace(number, opened)?;
    }
    Ok(())
}

/// The device of the view with this device number.
fn in_view(device: u64) -> Option<PathBuf> {
    let names = ["console", "null", "zero", "full", "random", "urandom", "tty"];
    let mut paths = names.iter().map(|name| Path::new("/dev").join(name));
    paths.find(|path| std::fs::metadata(path).is_ok_and(|about| about.rdev() == device))
}

fn replace(number: RawFd, by: impl AsFd) -> io::Result<()> {
    match number {
        0 => dup2_stdin(by)?,
        1 => dup2_stdout(by)?,
        _ => dup2_stderr(by)?,
    }
    Ok(())
}

fn descriptors() -> io::Result<Vec<RawFd>> {
    let listed = std::fs::read_dir("/proc/self/fd")?;
    Ok(listed.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
}

/// The flags of an open descriptor (proc_pid_fdinfo(5)).
fn flags_of(number: RawFd) -> Option<i32> {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok()?;
    let digits = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    i32::from_str_radix(digits.trim(), 8).ok()
}

fn role_of(number: RawFd, flags: i32, in_view: bool) -> Role {
    let link = PathBuf::from(format!("/proc/self/fd/{number}"));
    let Ok(about) = std::fs::metadata(&link) else { return Role::Closed };
    let kind = about.file_type();
    if kind.is_dir() || flags & libc::O_PATH != 0 {
        return Role::Closed;
    }
    let path = std::fs::read_link(&link).unwrap_or_default();
    let passes = match () {
        () if kind.is_fifo() => path.as_os_str().as_encoded_bytes().starts_with(b"pipe:["),
        () if kind.is_char_device() && number > 2 => return Role::Closed,
        () if kind.is_char_device() => {
            let is_plain = PLAIN.contains(&(major(about.rdev()), minor(about.rdev())));
            !in_view || is_plain || super::terminal::path().is_some_and(|terminal| terminal == path)
        }
        () => !(kind.is_file() || kind.is_block_device()),
    };
    match flags & libc::O_ACCMODE {
        _ if passes => Role::Passes,
        libc::O_RDONLY => Role::Input,
        libc::O_WRONLY => Role::Output,
        _ if number == 0 => Role::Input,
        _ if number <= 2 => Role::Output,
        _ => Role::Closed,
    }
}

/// Closes a descriptor for the command. A standard stream becomes `/dev/null`.
fn close(number: RawFd) -> io::Result<()> {
    if number > 2 {
        drop(process::inherited(number)?);
        return Ok(());
    }
    replace(number, OpenOptions::new().read(true).write(true).open("/dev/null")?)
}

/// Signals that the command has ended.
struct Stop {
    fd: OwnedFd,
    is_over: bool,
}

impl Stop {
    /// Waits until `fd` is ready, and once the command has ended for at most `timeout`
    /// milliseconds. Returns whether it is ready.
    fn wait(&mut self, fd: impl AsFd, events: PollFlags, timeout: u16) -> io::Result<bool> {
        loop {
            let mut ready =
                [PollFd::new(fd.as_fd(), events), PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            let (watched, limit) = match self.is_over {
                true => (1, PollTimeout::from(timeout)),
                false => (2, PollTimeout::NONE),
            };
            match poll(ready.get_mut(..watched).unwrap_or_default(), limit) {
                Err(Errno::EINTR) => continue,
                other => other?,
            };
            let [is_ready, is_over] = ready.map(|one| one.any().unwrap_or(false));
            if is_ready || self.is_over {
                return Ok(is_ready);
            }
            self.is_over |= is_over;
        }
    }

    fn wait_for_end(&mut self) -> io::Result<()> {
        while !self.is_over {
            let mut ready = [PollFd::new(self.fd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut ready, PollTimeout::NONE) {
                Ok(_) => self.is_over = true,
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Copies the command's output into the file, up to the end of the pipe.
fn copy_out(route: &Route, mut stop: Stop) -> io::Result<()> {
    let is_file = route.host.metadata()?.is_file();
    let mut buffer = vec![0; CHUNK];
    loop {
        match read(&route.ours, &mut buffer) {
            Ok(0) => return Ok(()),
            Ok(len) => put(&route.host, is_file, buffer.get(..len).unwrap_or_default(), &mut stop)?,
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                if !stop.wait(&route.ours, PollFlags::POLLIN, 0)? {
                    return Ok(());
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Writes all bytes. A named pipe or a device is polled first, so that one without a reader does
/// not delay the end of a run.
fn put(host: &File, is_file: bool, mut bytes: &[u8], stop: &mut Stop) -> io::Result<()> {
    while !bytes.is_empty() {
        let most = if is_file { bytes.len() } else { bytes.len().min(ATOMIC) };
        if !is_file && !stop.wait(host, PollFlags::POLLOUT, PATIENCE)? {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its reader does not read"));
        }
        match write(host, bytes.get(..most).unwrap_or_default()) {
            Ok(len) => bytes = bytes.get(len..).unwrap_or_default(),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Copies the file to the command until either ends, and moves the file's offset back by the unread
/// bytes.
fn copy_in(route: Route, mut stop: Stop) -> io::Result<()> {
    let Route { host, ours, theirs, .. } = route;
    let is_file = host.metadata()?.is_file();
    let (mut buffer, mut left) = (vec![0; CHUNK], 0);
    while left == 0 && !stop.is_over {
        if !is_file && !stop.wait(&host, PollFlags::POLLIN, 0)? {
            break;
        }
        let len = match read(&host, &mut buffer) {
            Ok(0) => break,
            Ok(len) => len,
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            Err(error) => return Err(error.into()),
        };
        left = write_in(&ours, buffer.get(..len).unwrap_or_default(), &mut stop)?;
    }
    // The command reads what is left in the pipe, and then finds the end of the file.
    drop(ours);
    stop.wait_for_end()?;
    let unread = match &theirs {
        Some(theirs) => file::unread(theirs)? + left,
        None => left,
    };
    if is_file && unread > 0 {
        (&host).seek(SeekFrom::Current(-i64::try_from(unread).unwrap_or(0)))?;
    }
    Ok(())
}

/// Writes bytes to the command until it ends. Returns how many are left.
fn write_in(ours: &OwnedFd, mut bytes: &[u8], stop: &mut Stop) -> io::Result<usize> {
    while !bytes.is_empty() {
        match write(ours, bytes) {
            Ok(len) => bytes = bytes.get(len..).unwrap_or_default(),
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => {
                if !stop.wait(ours, PollFlags::POLLOUT, 0)? {
                    break;
                }
            }
            Err(Errno::EPIPE) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes.len())
}
