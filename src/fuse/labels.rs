//! Whether there are labels of SELinux.
//!
//! `ls -l` asks for the label of each file, and the kernel remembers no answer: a message for each, every time. An answer that there
//! are no labels on this filesystem it remembers itself (EOPNOTSUPP, as from a filesystem that cannot have them), one that a file has none (ENODATA)
//! it does not. So it is told the former, where SELinux is off and no file is known to have a label.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{FsError, FsResult};
use crate::sys;

/// The attribute that holds a label.
const LABEL: &[u8] = b"security.selinux";

/// What is known of labels in one mount.
pub(super) struct Labels {
    are_there: AtomicBool,
}

impl Labels {
    /// For a new mount.
    pub(super) fn new() -> Labels {
        // If the kernel does not tell, it may have them.
        let is_on = sys::proc::has_filesystem(b"selinuxfs").unwrap_or(true);
        Labels { are_there: AtomicBool::new(is_on) }
    }

    /// What to answer to who asks for an attribute, given what the file has.
    pub(super) fn answer(&self, name: &[u8], found: FsResult<Vec<u8>>) -> FsResult<Vec<u8>> {
        match found {
            Err(FsError::NoAttribute) if name == LABEL && !self.are_there.load(Ordering::Relaxed) => {
                Err(FsError::Unsupported)
            }
            found => {
                self.note(name, found.is_ok());
                found
            }
        }
    }

    /// An attribute of some file was seen, or set.
    pub(super) fn note(&self, name: &[u8], is_there: bool) {
        if is_there && name == LABEL {
            self.are_there.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_unsupported_until_one_is_known() {
        let labels = Labels { are_there: AtomicBool::new(false) };
        let none = || Err(FsError::NoAttribute);
        assert_eq!(labels.answer(LABEL, none()), Err(FsError::Unsupported));
        assert_eq!(labels.answer(b"security.capability", none()), none(), "only labels");
        assert_eq!(labels.answer(LABEL, Err(FsError::NotFound)), Err(FsError::NotFound));
        labels.note(LABEL, false);
        assert_eq!(labels.answer(LABEL, none()), Err(FsError::Unsupported));
        assert_eq!(labels.answer(LABEL, Ok(b"x".to_vec())), Ok(b"x".to_vec()));
        assert_eq!(labels.answer(LABEL, none()), none());
    }
}
