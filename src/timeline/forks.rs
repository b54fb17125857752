//! Makes and drops heads, and records what a merge into one of them needs later.
//!
//! Always true:
//! * a fork is one small file that names a sealed layer, whatever the size of the tree;
//! * while a head exists, the layer that it was forked from exists;
//! * while a state and a head exist, so do both states of the last merge of that head into it.
//!
//! A crash in the middle leaves each fork whole or not there, and a dropped head whole or gone.

use std::collections::BTreeSet;

use crate::error::{Attempt, Error, Kind, Result};
use crate::store::record::{ForkPoint, HeadRecord, LayerKind, MergePoint, OpVerb};
use crate::sys::clock;
use crate::timeline::checkpoint::{automatic, is_valid_name, seal_unused};
use crate::timeline::heads::no_head;
use crate::timeline::{Common, Target, Timeline, merge};
use crate::types::{Epoch, LayerId, Timestamp, TreePath};

/// The most heads of a store.
const MAX_HEADS: usize = 4096;
/// The longest name of a head, in bytes. Files have it with an ending.
const MAX_NAME: usize = 200;

/// A head of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeadInfo {
    /// Its name.
    pub name: String,
    /// Where it was forked; `None` for the first head.
    pub forked_from: Option<ForkPoint>,
    /// When it was forked, or created.
    pub time: Timestamp,
    /// The layer on top of it.
    pub top: LayerId,
}

impl Timeline {
    /// Makes heads that begin with a sealed state, or with the tree as it is now, which is sealed
    /// first.
    ///
    /// # Errors
    /// [`Kind::Usage`] for a name that no head can have, [`Kind::Failed`] for one that is in use,
    /// or a failure of the store. There is none of the heads then, unless the error says that they
    /// were made.
    pub fn fork(&self, names: &[String], from: Option<Target>) -> Result<Vec<HeadInfo>> {
        let _operation = self.lock_operation();
        let attempt = || format!("fork '{}'", names.join("', '"));
        let during = |error: Error| error.during(attempt());
        self.check_new_names(names)?;
        let (layer, epoch) = match from {
            None => self.sealed_now("before fork").map_err(during)?,
            Some(Target { layer: Some(layer), epoch }) => {
                self.check_epoch(epoch)?;
                (layer, epoch)
            }
            Some(base) => (self.seal_base(base).map_err(during)?, base.epoch),
        };
        let point = ForkPoint {
            head: self.head.clone(),
            layer,
            time: clock::now(),
            since: self.store.next_layer(),
        };
        let record = HeadRecord {
            layer,
            forked_from: Some(point),
            merged: BTreeSet::new(),
            unresolved: BTreeSet::new(),
            beside: BTreeSet::new(),
        };
        // An earlier head of the same name may have left its history.
        names.iter().try_for_each(|name| self.store.remove_edits(name)).map_err(during)?;
        names.iter().for_each(|name| self.forget_dormant(name));
        let records: Vec<(String, HeadRecord)> =
            names.iter().map(|name| (name.clone(), record.clone())).collect();
        self.with_reserve(|| self.store.add_heads(&records)).map_err(during)?;
        *self.heads_changed.lock() = clock::now();
        let to = Target { layer: Some(layer), epoch };
        self.log_operation(OpVerb::Fork, names.join(", "), to)
            .map_err(|error| error.after(format!("{} was done", attempt())))?;
        Ok(records.iter().map(|(name, record)| info_of(name, record, record.layer, None)).collect())
    }

    /// Seals the tree as it is now unless it is sealed, for an operation of another head. The
    /// message of the seal is `why`.
    ///
    /// # Errors
    /// A failure of the store.
    pub fn seal_for_other(&self, why: &str) -> Result<Target> {
        let _operation = self.lock_operation();
        let (layer, epoch) = self.sealed_now(why)?;
        Ok(Target { layer: Some(layer), epoch })
    }

    /// The sealed layer with the tree as it is now. Seals it unless it is sealed.
    fn sealed_now(&self, why: &str) -> Result<(LayerId, Epoch)> {
        self.flush()?;
        let epoch = self.epoch();
        match self.parent() {
            Some(layer) if self.is_sealed() => Ok((layer, epoch)),
            _ => Ok((self.seal(automatic(why.to_owned()), None)?, epoch)),
        }
    }

    /// Makes a sealed layer that shows the base.
    fn seal_base(&self, base: Target) -> Result<LayerId> {
        let kind = LayerKind::Branches;
        let mut layer = self.store.create_layer(None, &self.head, base.epoch, kind)?;
        seal_unused(&self.store, &mut layer, "the base, before fork")?;
        Ok(layer.layer())
    }

    /// Checks that a head of this name can be made.
    ///
    /// # Errors
    /// As [`Timeline::fork`].
    pub fn check_new_head(&self, name: &str) -> Result<()> {
        self.check_new_names(&[name.to_owned()])
    }

    fn check_new_names(&self, names: &[String]) -> Result<()> {
        let known: BTreeSet<String> = self.store.head_names().into_iter().collect();
        let mut new = BTreeSet::new();
        for name in names {
            let attempt = || format!("fork '{name}'");
            check_head_name(name).map_err(|error| error.during(attempt()))?;
            if known.contains(name) || !new.insert(name) {
                return Err(Error::new(Kind::Failed, attempt(), "there is a head of this name")
                    .hint("choose another name; 'jailfs forks' lists the heads"));
            }
        }
        if known.len() + names.len() > MAX_HEADS {
            let why = format!("a store has at most {MAX_HEADS} heads");
            return Err(Error::new(Kind::Failed, format!("fork {} times", names.len()), why)
                .hint("'jailfs fork --drop NAME' drops one"));
        }
        Ok(())
    }

    /// Drops another head: its tree, its edit history, and its operations. Checkpoints of it stay.
    /// The next [`Common::gc`] frees what only it needed.
    ///
    /// # Errors
    /// [`Kind::NoStore`] if there is no such head, [`Kind::InUse`] if it is open, or a failure of
    /// the store. The head is there then, unless the error says that it was dropped.
    pub fn drop_head(&self, name: &str) -> Result<()> {
        let _operation = self.lock_operation();
        let _compacting = self.compacting.lock();
        let attempt = || format!("drop head '{name}'");
        if !self.store.head_names().iter().any(|head| head == name) {
            return Err(no_head("drop", name));
        }
        if self.open_head(name)?.is_some() {
            return Err(Error::new(Kind::InUse, attempt(), "it is mounted, or in use otherwise")
                .hint("unmount it first"));
        }
        // Other heads may have merged it, and then they came from what it had merged.
        let merged = self.store.head(name)?.map(|record| record.merged).unwrap_or_default();
        if !merged.is_empty() {
            self.add_merged(merged).map_err(|e| e.during(attempt()))?;
        }
        self.with_reserve(|| self.store.remove_head(name)).map_err(|e| e.during(attempt()))?;
        self.forget_dormant(name);
        *self.heads_changed.lock() = clock::now();
        let done = |error: Error| error.after(format!("head '{name}' was dropped"));
        let to = Target { layer: self.parent(), epoch: self.epoch() };
        let logged = self.log_operation(OpVerb::DropFork, name.to_owned(), to);
        let removed = self.store.remove_edits(name).and_then(|()| {
            let layers: Vec<LayerId> = self.layers_of_dropped_heads().into_iter().rev().collect();
            layers.iter().try_for_each(|layer| self.store.remove_unused(*layer))
        });
        if let Err(error) = removed {
            // Nothing leads to the rest. The next gc takes it.
            log::warn!("{error}");
        }
        logged.map(drop).map_err(done)
    }

    /// Records that the sealed state `layer` of another head was merged into this one, which led to
    /// the state `into`. The caller holds the operation lock.
    ///
    /// # Errors
    /// A failure of the store.
    pub fn note_merged(&self, layer: LayerId, into: LayerId) -> Result<()> {
        self.add_merged([MergePoint { layer, into }].into())
    }

    fn add_merged(&self, mut merged: BTreeSet<MergePoint>) -> Result<()> {
        merged.extend(self.store.head(&self.head)?.into_iter().flat_map(|head| head.merged));
        self.with_reserve(|| self.store.set_merged(&self.head, merged.clone()))
    }
}

impl Timeline {
    /// Records the files into which a merge is about to write conflict markers, and the paths at
    /// which it puts the other side of a conflict beside ours. Conflicts of earlier merges that are
    /// unresolved stay recorded.
    ///
    /// # Errors
    /// A failure of the store.
    pub(super) fn note_unresolved(&self, marked: &[TreePath], beside: &[TreePath]) -> Result<()> {
        if marked.is_empty() && beside.is_empty() {
            return Ok(());
        }
        let (mut all_marked, mut all_beside) = self.still_unresolved()?;
        all_marked.extend(marked.iter().cloned());
        all_beside.extend(beside.iter().cloned());
        let all = (all_marked, all_beside);
        self.with_reserve(|| self.store.set_unresolved(&self.head, all.clone()))
    }

    /// The files into which merges wrote conflict markers, as far as they still have some; and the
    /// paths that merges put beside others, as far as they are still there.
    ///
    /// # Errors
    /// Damage of the head's record, or a failure of reading the files.
    pub fn unresolved(&self) -> Result<Vec<TreePath>> {
        let (marked, beside) = self.still_unresolved()?;
        Ok(marked.union(&beside).cloned().collect())
    }

    fn still_unresolved(&self) -> Result<(BTreeSet<TreePath>, BTreeSet<TreePath>)> {
        let Some(record) = self.store.head(&self.head)? else { return Ok(Default::default()) };
        let state = self.fs.state();
        let (mut marked, mut beside) = (BTreeSet::new(), BTreeSet::new());
        for path in record.unresolved {
            let has_markers = merge::has_markers(&state, &path);
            if has_markers.attempt(|| format!("read '{path}'"))? {
                marked.insert(path);
            }
        }
        for path in record.beside {
            let found = state.resolve(&path).attempt(|| format!("find '{path}'"))?;
            if found.ino().is_some() {
                beside.insert(path);
            }
        }
        Ok((marked, beside))
    }
}

impl Common {
    /// The heads of the store, by name.
    ///
    /// # Errors
    /// Damage of the record of a head.
    pub fn head_list(&self) -> Result<Vec<HeadInfo>> {
        let created = self.store.catalog().first().map(|info| info.header.time);
        let infos = self.store.head_records()?.into_iter().map(|(name, record)| {
            let open = self.open_heads().into_iter().find(|head| head.head == name);
            let top = open.map_or(record.layer, |head| head.fs.upper_layer());
            info_of(&name, &record, top, created)
        });
        Ok(infos.collect())
    }
}

fn info_of(name: &str, record: &HeadRecord, top: LayerId, created: Option<Timestamp>) -> HeadInfo {
    let forked_from = record.forked_from.clone();
    let time = forked_from.as_ref().map(|fork| fork.time).or(created).unwrap_or_default();
    HeadInfo { name: name.to_owned(), forked_from, time, top }
}

/// Checks that a head can have this name.
///
/// # Errors
/// [`Kind::Usage`].
pub(super) fn check_head_name(name: &str) -> Result<()> {
    if is_head_name(name) {
        return Ok(());
    }
    Err(Error::new(Kind::Usage, format!("head '{name}'"), "not a valid name of a head").hint(
        "a name is not a number, not 'base', has no '/' and no '@', does not begin \
         with '.' or '-', does not end with '.new' or '.bad', \
         and has at most 200 bytes",
    ))
}

fn is_head_name(name: &str) -> bool {
    let is_file = !name.starts_with('.') && !name.ends_with(".new") && !name.ends_with(".bad");
    let is_plain = !name.starts_with('-') && name.len() <= MAX_NAME;
    is_valid_name(name) && is_file && is_plain && !name.chars().any(char::is_control)
}
