//! Answers requests for SELinux labels where there are none.
//!
//! `ls -l` asks for the label of each file. The kernel does not cache the reply that a file has no
//! label (ENODATA), so each file costs a message each time. It does cache the reply that the whole
//! filesystem has no labels (EOPNOTSUPP). The server sends that one while SELinux is off and no
//! file is known to have a label.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{FsError, FsResult};
use crate::sys;

/// The attribute that holds a label.
const LABEL: &[u8] = b"security.selinux";

/// Tracks whether files of one mount can have labels.
pub(super) struct SelinuxLabels {
    may_exist: AtomicBool,
}

impl SelinuxLabels {
    /// For a new mount.
    pub(super) fn new() -> SelinuxLabels {
        // If the kernel's list of filesystems cannot be read, assume that SELinux is on.
        let is_on = sys::proc::has_filesystem(b"selinuxfs").unwrap_or(true);
        SelinuxLabels { may_exist: AtomicBool::new(is_on) }
    }

    /// The reply to a request for an attribute, given what the file has.
    pub(super) fn filter(&self, name: &[u8], found: FsResult<Vec<u8>>) -> FsResult<Vec<u8>> {
        match found {
            Err(FsError::NoAttribute)
                if name == LABEL && !self.may_exist.load(Ordering::Relaxed) =>
            {
                Err(FsError::Unsupported)
            }
            found => {
                self.note(name, found.is_ok());
                found
            }
        }
    }

    /// Notes that an attribute of some file was read or set.
    pub(super) fn note(&self, name: &[u8], exists: bool) {
        if exists && name == LABEL {
            self.may_exist.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_unsupported_until_one_is_seen() {
        let labels = SelinuxLabels { may_exist: AtomicBool::new(false) };
        let none = || Err(FsError::NoAttribute);
        assert_eq!(labels.filter(LABEL, none()), Err(FsError::Unsupported));
        assert_eq!(labels.filter(b"security.capability", none()), none(), "only labels");
        assert_eq!(labels.filter(LABEL, Err(FsError::NotFound)), Err(FsError::NotFound));
        labels.note(LABEL, false);
        assert_eq!(labels.filter(LABEL, none()), Err(FsError::Unsupported));
        assert_eq!(labels.filter(LABEL, Ok(b"x".to_vec())), Ok(b"x".to_vec()));
        assert_eq!(labels.filter(LABEL, none()), none());
    }
}
