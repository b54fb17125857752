//! The component of [`crate::fs::Core`] that owns the upper layer, to which all changes go, and
//! watches how long its journal gets.
//!
//! The journal grows with each change, even when a program overwrites the same bytes or renames the
//! same file. [`crate::timeline`] computes its shortest form, and says at which length it pays to
//! do that again.
//!
//! Always true:
//! * The watch is about the layer that is written to.
//! * The notice is called once, until the next check is set.

use std::ops::{Deref, DerefMut};

use crate::store::layer::Upper;
use crate::tree::Tree;
use crate::types::LayerId;

/// A journal of fewer bytes is never checked.
pub const SMALL_JOURNAL: u64 = 8 << 20;

/// Called when the length of the journal is to be checked. The caller holds the core lock, so it
/// only wakes a thread.
pub type JournalNotice = Box<dyn Fn() + Send + Sync>;

/// When the length of a journal is to be checked next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NextCheck {
    /// The layer of the journal.
    pub layer: LayerId,
    /// The check is due when the journal has this many bytes,
    pub bytes: u64,
    /// or when the tree has fewer entries than this.
    pub entries: usize,
}

impl NextCheck {
    /// The first check of a layer.
    pub fn first(layer: LayerId) -> NextCheck {
        NextCheck { layer, bytes: SMALL_JOURNAL, entries: 0 }
    }
}

/// The upper layer and the watch over its journal. Derefs to the layer.
pub(super) struct UpperLayer {
    layer: Upper,
    next_check: NextCheck,
    notice: Option<JournalNotice>,
}

impl Deref for UpperLayer {
    type Target = Upper;
    fn deref(&self) -> &Upper {
        &self.layer
    }
}

impl DerefMut for UpperLayer {
    fn deref_mut(&mut self) -> &mut Upper {
        &mut self.layer
    }
}

impl UpperLayer {
    pub(super) fn new(layer: Upper) -> UpperLayer {
        let next_check = NextCheck::first(layer.layer());
        UpperLayer { layer, next_check, notice: None }
    }

    /// Sends all further changes to `next`. Returns the layer before.
    pub(super) fn replace(&mut self, next: Upper) -> Upper {
        self.next_check = NextCheck::first(next.layer());
        std::mem::replace(&mut self.layer, next)
    }

    pub(super) fn set_notice(&mut self, notice: Option<JournalNotice>) {
        self.notice = notice;
    }

    /// Sets the next check, if it is about the layer that is written to.
    pub(super) fn set_next_check(&mut self, next: NextCheck) {
        if self.layer.layer() == next.layer {
            self.next_check = next;
        }
    }

    /// Calls the notice if a check is due, given the tree that the journal leads to.
    pub(super) fn check_journal(&mut self, tree: &Tree) {
        let len = self.layer.journal_len();
        let NextCheck { layer, bytes, entries } = self.next_check;
        if len < SMALL_JOURNAL || len < bytes && tree.entries() >= entries {
            return;
        }
        self.next_check = NextCheck { layer, bytes: u64::MAX, entries: 0 };
        if let Some(notice) = &self.notice {
            notice();
        }
    }
}
