//! The listing of a directory that the kernel is reading.
//!
//! Always true:
//! * A name keeps its cookie for as long as the listing exists, and no other name ever gets that
//!   cookie. So a reader that continues after a cookie neither misses nor repeats a name that was
//!   there all the time.
//! * A refresh gives new names cookies after all others.

use std::collections::HashMap;

use crate::types::{Epoch, FileKind, Ino, Name};

/// Cookies 1 and 2 are `.` and `..`.
pub(in crate::fs) const FIRST_COOKIE: u64 = 3;

/// The names of a directory, in the order of their cookies.
#[derive(Default)]
pub(in crate::fs) struct Listing {
    names: Vec<Listed>,
    next: u64,
    /// The epoch of the base from which the names are.
    pub(in crate::fs) epoch: Epoch,
}

/// A name with its cookie.
pub(in crate::fs) struct Listed {
    pub(in crate::fs) cookie: u64,
    pub(in crate::fs) name: Name,
    /// The node that the base has under a name that the tree does not mention. A large directory is
    /// read in many parts, and this saves the same questions to the base for each part.
    pub(in crate::fs) in_base: Option<(Ino, FileKind)>,
}

impl Listing {
    /// Replaces the names by those that the directory has now, each with the node that only the
    /// base has under it.
    pub(in crate::fs) fn refresh(
        &mut self,
        now: impl Iterator<Item = (Name, Option<(Ino, FileKind)>)>,
        epoch: Epoch,
    ) {
        let old: HashMap<Name, u64> = std::mem::take(&mut self.names)
            .into_iter()
            .map(|listed| (listed.name, listed.cookie))
            .collect();
        (self.next, self.epoch) = (self.next.max(FIRST_COOKIE), epoch);
        for (name, in_base) in now {
            let cookie = old.get(&name).copied().unwrap_or_else(|| {
                self.next += 1;
                self.next - 1
            });
            self.names.push(Listed { cookie, name, in_base });
        }
        self.names.sort_unstable_by_key(|listed| listed.cookie);
        self.names.shrink_to_fit();
    }

    /// Whether no name follows a cookie.
    pub(in crate::fs) fn is_end(&self, cookie: u64) -> bool {
        cookie >= FIRST_COOKIE - 1 && self.after(cookie).next().is_none()
    }

    /// The names that follow a cookie.
    pub(in crate::fs) fn after(&self, cookie: u64) -> impl Iterator<Item = &Listed> {
        let begin = self.names.partition_point(|listed| listed.cookie <= cookie);
        self.names.iter().skip(begin)
    }
}
