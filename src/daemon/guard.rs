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
//! The guard is this program again. Its standard input is a pipe, its standard output the `abort`
//! file. Only one thread of the daemon has the other end of the pipe open. This thread has its own
//! table of open files and never blocks in the kernel beyond signals. So the pipe ends with the
//! daemon, whatever the other threads do. If the mount is gone by then, its connection is too, and
//! no other connection has this file.

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use crate::sys;

/// The hidden verb by which the program starts itself as a guard.
pub const VERB: &str = "__guard";
/// Tells the guard that the end of its pipe will mean the death of the daemon.
const READY: &[u8] = b"r";

/// Starts a guard for this process, which must be this program itself.
///
/// # Errors
/// No process or thread can be started, or the thread gets no own table of open files. Then there
/// is no guard.
pub(super) fn start(abort: File) -> io::Result<()> {
    let (end, ours) = io::pipe()?;
    spawn(end, abort)?;
    hold(ours)
}

fn spawn(end: PipeReader, abort: File) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    let command = command.arg0("jailfs").arg(VERB).current_dir("/");
    // It outlives this process, so init reaps it.
    sys::process::spawn_with_signals(command.stdin(end).stdout(abort).stderr(Stdio::null()))?;
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
    let mut read = Vec::new();
    let received = io::stdin().lock().read_to_end(&mut read);
    if received.is_err() || read != READY {
        return 0;
    }
    let mut abort = io::stdout().lock();
    u8::from(abort.write_all(b"1").and_then(|()| abort.flush()).is_err())
}
