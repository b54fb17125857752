//! A process that aborts the FUSE connection when the daemon has died.
//!
//! Usually the kernel does that itself when the last descriptor of the session is closed. But a
//! thread of the daemon may be invalidating a dentry. It then waits in the kernel for the lock of
//! the directory, which a process may hold that waits for our reply. No signal ends such a wait. So
//! if the daemon is killed at that moment, this thread stays with everything that the daemon had
//! open. No request in the mount would ever be answered, and the lock of the store would never be
//! free. A write to the `abort` file of the FUSE control filesystem aborts the connection all the
//! same, but a living process must do the write.
//!
//! The guard is this program again, and one guards all mounts. Its standard input is a pipe, and
//! its standard output a socket over which the daemon sends the `abort` file of each mount. Only
//! one thread of the daemon has the other end of the pipe open. This thread has its own table of
//! open files and never blocks in the kernel beyond signals. So the pipe ends with the daemon,
//! whatever the other threads do. If a mount is gone by then, its connection is too, and no other
//! connection has this file.
//!
//! ```text
//! message = b'+' | number u64 little-endian, with the abort file; or b'-' | number: the mount
//! ended
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::sys;

/// The hidden verb by which the program starts itself as a guard.
pub const VERB: &str = "__guard";
/// Tells the guard that the end of its pipe will mean the death of the daemon.
const READY: &[u8] = b"r";

/// A guard of the mounts of this process.
pub(super) struct Guard {
    socket: OwnedFd,
    /// The number of the last mount.
    last: u64,
}

impl Guard {
    /// Starts a guard for this process, which must be this program itself.
    ///
    /// # Errors
    /// No process or thread can be started, or the thread gets no own table of open files. Then
    /// there is no guard.
    pub(super) fn start() -> io::Result<Guard> {
        let (end, ours) = io::pipe()?;
        let (socket, theirs) = sys::socket::message_pair()?;
        // A stopped guard must not stop the daemon.
        fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        spawn(end, theirs)?;
        hold(ours)?;
        Ok(Guard { socket, last: 0 })
    }

    /// Has the guard abort a mount when this process has died. Returns the number of the mount.
    ///
    /// # Errors
    /// The guard has ended, or does not read.
    pub(super) fn watch(&mut self, abort: File) -> io::Result<u64> {
        self.last += 1;
        self.send(b'+', self.last, &[abort.into()])?;
        Ok(self.last)
    }

    /// Tells the guard that a mount has ended.
    pub(super) fn forget(&self, number: u64) {
        if let Err(error) = self.send(b'-', number, &[]) {
            log::debug!("tell the guard of the end of a mount: {error}");
        }
    }

    fn send(&self, what: u8, number: u64, files: &[OwnedFd]) -> io::Result<()> {
        let mut message = vec![what];
        message.extend_from_slice(&number.to_le_bytes());
        sys::socket::send(self.socket.as_raw_fd(), &message, files).map_err(io::Error::from)
    }
}

fn spawn(end: PipeReader, socket: OwnedFd) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    let command = command.arg0("jailfs").arg(VERB).current_dir("/");
    // It outlives this process, so init reaps it.
    sys::process::spawn_with_signals(command.stdin(end).stdout(socket).stderr(Stdio::null()))?;
    Ok(())
}

/// Keeps our end of the pipe open as long as this process lives.
fn hold(ours: PipeWriter) -> io::Result<()> {
    let ours = Arc::new(ours);
    let theirs = Arc::clone(&ours);
    let (sender, received) = channel();
    thread::Builder::new().name("pulse".to_owned()).spawn(move || keep(theirs, &sender))?;
    let kept = received.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
    // The other threads share a table without this descriptor from here on.
    drop(ours);
    kept
}

fn keep(theirs: Arc<PipeWriter>, sender: &Sender<io::Result<()>>) {
    let own = sys::process::own_open_files(Some(theirs.as_fd())).and_then(|()| theirs.try_clone());
    drop(theirs);
    let ready = own.and_then(|mut own| own.write_all(READY).map(|()| own));
    let (kept, result) = match ready {
        Ok(own) => (Some(own), Ok(())),
        Err(error) => (None, Err(error)),
    };
    // The process may be ending.
    if sender.send(result).is_err() {
        return;
    }
    while kept.is_some() {
        thread::park();
    }
}

/// Runs a guard.
pub fn main() -> u8 {
    if let Err(error) = super::inherited::close() {
        log::debug!("{error}");
    }
    // A signal from the terminal is for the daemon. The guard ends after it.
    if let Err(error) = sys::process::new_session() {
        log::debug!("start a session of its own: {error}");
    }
    let mut watched = Watched::default();
    if !watched.wait_for_death() {
        return 0;
    }
    u8::from(!watched.abort())
}

/// The abort files of the mounts, by number.
#[derive(Default)]
struct Watched(BTreeMap<u64, File>);

impl Watched {
    /// Collects abort files until the pipe ends. Returns whether that means the death of the
    /// daemon.
    fn wait_for_death(&mut self) -> bool {
        let (stdin, stdout) = (io::stdin(), io::stdout());
        let (mut is_ready, mut is_connected) = (false, true);
        loop {
            let mut polled = vec![PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
            if is_connected {
                polled.push(PollFd::new(stdout.as_fd(), PollFlags::POLLIN));
            }
            match poll(&mut polled, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                Err(_) => return false,
                Ok(_) => {}
            }
            let [pipe, socket] =
                [0, 1].map(|at| polled.get(at).and_then(PollFd::any) == Some(true));
            drop(polled);
            // The socket first: a mount that was announced before the death is aborted too.
            if socket {
                is_connected = self.receive();
            } else if pipe {
                let mut byte = [0; 1];
                match stdin.lock().read(&mut byte) {
                    Ok(1) if byte == READY => is_ready = true,
                    Ok(0) => return is_ready,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Ok(_) | Err(_) => return false,
                }
            }
        }
    }

    /// Receives one message. False after the last.
    fn receive(&mut self) -> bool {
        let mut message = [0; 9];
        let Ok((9, files)) = sys::socket::receive(io::stdout(), &mut message) else { return false };
        let [what, number @ ..] = message;
        let number = u64::from_le_bytes(number);
        match (what, files.into_iter().next()) {
            (b'+', Some(abort)) => drop(self.0.insert(number, abort.into())),
            _ => drop(self.0.remove(&number)),
        }
        true
    }

    /// Aborts all mounts. Returns whether each could be aborted.
    fn abort(self) -> bool {
        let abort_files = self.0.into_values();
        // Each is tried, also after a failure.
        let failed = abort_files.filter_map(|mut abort| abort.write_all(b"1").err());
        failed.count() == 0
    }
}
