//! A process that ends the connection to the kernel when the daemon has died.
//!
//! The kernel does that itself when the last descriptor of the session is closed. But a thread of the daemon may just be making the
//! kernel forget a name: it waits there for the lock of the directory, which a process has that waits for an answer of ours. No
//! signal ends such a wait. So of a daemon that is killed in that moment this thread would stay, and with it all that the
//! daemon had open: nobody in the mount would ever be answered, and the lock never be free. What is written to an open file of
//! the control filesystem ends the connection all the same; but somebody must be left to write it.
//!
//! The guard is this program again. Its standard input is a pipe, its standard output that file. The other end of the pipe is open in
//! one thread of the daemon alone, which has a table of open files of its own and waits for nothing in the kernel that a
//! signal does not end: so the pipe comes to its end whatever the other threads do. A mount that is gone by then has no
//! connection any more, and no other has its file.

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
/// What tells a guard that the end of its pipe will be that of the daemon.
const READY: &[u8] = b"r";

/// Starts a guard for this process, which must be the program itself.
///
/// # Errors
/// When no process or thread can be started, or has a table of open files of its own; then there is none.
pub(super) fn start(abort: File) -> io::Result<()> {
    let (end, ours) = io::pipe()?;
    spawn(end, abort)?;
    hold(ours)
}

fn spawn(end: PipeReader, abort: File) -> io::Result<()> {
    let mut command = Command::new("/proc/self/exe");
    let command = command.arg0("jailfs").arg(VERB).current_dir("/");
    // It ends behind this process, and is nobody's zombie then.
    sys::process::spawn_with_signals(command.stdin(end).stdout(abort).stderr(Stdio::null()))?;
    Ok(())
}

/// Keeps our end of the pipe open as long as this process lives.
fn hold(ours: PipeWriter) -> io::Result<()> {
    let ours = Arc::new(ours);
    let theirs = Arc::clone(&ours);
    let (tell, told) = channel();
    thread::Builder::new().name("pulse".to_owned()).spawn(move || keep(theirs, &tell))?;
    let kept = told.recv().map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
    // In the table of all other threads nothing is left of it.
    drop(ours);
    kept
}

fn keep(theirs: Arc<PipeWriter>, tell: &Sender<io::Result<()>>) {
    let own = sys::process::own_open_files(Some(theirs.as_fd())).and_then(|()| theirs.try_clone());
    drop(theirs);
    let ready = own.and_then(|mut own| own.write_all(READY).map(|()| own));
    let (kept, result) = match ready {
        Ok(own) => (Some(own), Ok(())),
        Err(error) => (None, Err(error)),
    };
    // The process may be ending.
    if tell.send(result).is_err() {
        return;
    }
    while kept.is_some() {
        thread::park();
    }
}

/// The life of a guard.
pub fn main() -> u8 {
    if let Err(error) = super::close_inherited() {
        log::debug!("{error}");
    }
    // A signal from the terminal is for the daemon: the guard ends after it.
    if let Err(error) = sys::process::new_session() {
        log::debug!("leave the terminal: {error}");
    }
    let mut read = Vec::new();
    let told = io::stdin().lock().read_to_end(&mut read);
    if told.is_err() || read != READY {
        return 0;
    }
    let mut abort = io::stdout().lock();
    u8::from(abort.write_all(b"1").and_then(|()| abort.flush()).is_err())
}
