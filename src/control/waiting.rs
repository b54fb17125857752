//! Connections of clients that wait for an end.

use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

/// The connections of clients that wait until a mount has ended. They close when it has.
pub struct Waiting(Mutex<Option<Vec<UnixStream>>>);

impl Default for Waiting {
    fn default() -> Waiting {
        Waiting(Mutex::new(Some(Vec::new())))
    }
}

impl Waiting {
    /// Keeps a connection open until the end. After the end, closes it at once.
    pub(super) fn push(&self, stream: UnixStream) {
        if let Some(streams) = &mut *self.0.lock() {
            streams.push(stream);
        }
    }

    /// Closes the connections, and each that comes later.
    pub fn end(&self) {
        drop(self.0.lock().take());
    }
}
