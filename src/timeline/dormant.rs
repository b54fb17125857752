//! The content that the open and the closed heads of a store need.
//!
//! A head that is not open is **dormant**. Its layers and its edit history are read from the store,
//! and it stays closed.
//!
//! Always true: what a dormant head may show after a power cut counts. A power cut takes the last
//! records of a log, so the content that any record refers to counts, whatever later records say.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use crate::error::Result;
use crate::fs::LiveSet;
use crate::store::Unsettled;
use crate::store::content::live_ranges::LiveRanges;
use crate::store::layer::LayerInfo;
use crate::store::record::Record;
use crate::timeline::{Common, Timeline, reopen};
use crate::tree::{Edit, Source, Tree};
use crate::types::{ByteRange, Epoch, LayerId};

/// An open head, and what it refers to.
pub(super) struct LiveHead {
    /// The sealed layer below its upper layer, when this was read.
    pub(super) parent: Option<LayerId>,
    pub(super) live: LiveSet,
}

/// The content that open heads refer to. The parent of each is read before its tree.
pub(super) fn live_sets(open: &[Arc<Timeline>]) -> Vec<LiveHead> {
    let live = |head: &Arc<Timeline>| {
        let parent = head.parent();
        LiveHead { parent, live: head.fs.live_set() }
    };
    open.iter().map(live).collect()
}

/// Addresses of content, and the bytes at each.
type Addresses = Arc<Vec<(Source, u64)>>;

/// The number of trees of dormant heads that are kept in memory.
const MAX_TREES: usize = 8;

/// The tree of a dormant head.
struct DormantTree {
    head: String,
    /// The first layer that it could write: an earlier head of the same name was another one.
    since: LayerId,
    tree: Tree,
    epoch: Epoch,
}

/// The content that dormant heads refer to, as last read.
#[derive(Default)]
pub(super) struct Dormant {
    /// By unsealed layer, with the length of the journal.
    layers: BTreeMap<LayerId, (u64, Addresses)>,
    /// By head.
    edits: BTreeMap<String, Addresses>,
    /// The last used one is the first.
    trees: VecDeque<DormantTree>,
}

impl Dormant {
    /// The tree of a head and its epoch, if it is kept.
    pub(super) fn tree(&mut self, head: &str, since: LayerId) -> Option<(Tree, Epoch)> {
        let at = self.trees.iter().position(|one| one.head == head && one.since == since)?;
        let known = self.trees.remove(at)?;
        let found = (known.tree.clone(), known.epoch);
        self.trees.push_front(known);
        Some(found)
    }

    /// Keeps the tree of a head until that is opened or dropped.
    pub(super) fn keep_tree(&mut self, head: &str, since: LayerId, tree: Tree, epoch: Epoch) {
        self.trees.push_front(DormantTree { head: head.to_owned(), since, tree, epoch });
        self.trees.truncate(MAX_TREES);
    }
}

impl Common {
    /// Adds what dormant heads refer to beyond sealed states: the unsealed layers on top of them,
    /// and their edit histories. Also counts unsealed layers that recovery may still seal or
    /// remove. `live` are the [`live_sets`] of `open`, read before: a layer that was replaced since
    /// then counts here.
    pub(super) fn add_dormant(
        &self,
        open: &[Arc<Timeline>],
        live: &[LiveHead],
        refs: &mut LiveRanges,
    ) -> Result<()> {
        let unsealed = self.store.unsettled(Unsettled::Unsealed);
        let mut uppers: BTreeSet<LayerId> = live.iter().map(|head| head.live.upper).collect();
        // A layer that became the upper one since then is being written, and refers to nothing old
        // that is not counted elsewhere.
        uppers.extend(open.iter().map(|head| head.fs.upper_layer()));
        let is_dormant = |info: &&LayerInfo| {
            info.header.kind.is_of_head() && !uppers.contains(&info.header.layer)
        };
        for info in unsealed.iter().filter(is_dormant) {
            let Some(found) = self.addresses_of(info)? else { continue };
            found.iter().for_each(|(source, len)| refs.add(*source, *len));
        }
        let is_open = |name: &String| open.iter().any(|head| head.head == *name);
        for head in self.store.head_names().iter().filter(|head| !is_open(head)) {
            let found = self.edits_of(head);
            found.iter().for_each(|(source, len)| refs.add(*source, *len));
        }
        Ok(())
    }

    /// The content that an unsealed layer refers to; `None` if it was removed meanwhile.
    fn addresses_of(&self, info: &LayerInfo) -> Result<Option<Addresses>> {
        let layer = info.header.layer;
        let Some(len) = self.store.journal_len(layer)? else { return Ok(None) };
        if let Some((known, found)) = self.dormant.lock().layers.get(&layer)
            && *known == len
        {
            return Ok(Some(Arc::clone(found)));
        }
        let mut found = Vec::new();
        for record in self.store.read_layer(layer)?.records() {
            let Record::Edits(edits) = record? else { continue };
            for edit in edits {
                if let Edit::Map { range, to: Some(source), .. } = edit {
                    found.push((source, range.len()));
                }
            }
        }
        let found = Arc::new(found);
        self.keep_if_closed(&info.header.head, |dormant| {
            dormant.layers.insert(layer, (len, Arc::clone(&found)));
        });
        Ok(Some(found))
    }

    fn edits_of(&self, head: &str) -> Addresses {
        if let Some(found) = self.dormant.lock().edits.get(head) {
            return Arc::clone(found);
        }
        let extents: Vec<(ByteRange, Source)> = self.store.edited_content(head);
        let found: Vec<_> = extents.into_iter().map(|(range, of)| (of, range.len())).collect();
        let found = Arc::new(found);
        self.keep_if_closed(head, |dormant| {
            dormant.edits.insert(head.to_owned(), Arc::clone(&found));
        });
        found
    }

    /// Keeps what was read of a head, unless that is open or is being closed: then it still
    /// changes, and its journal can change without becoming longer. Opening it forgets what is
    /// kept, after it is in the table of heads.
    fn keep_if_closed(&self, head: &str, keep: impl FnOnce(&mut Dormant)) {
        let mut dormant = self.dormant.lock();
        if self.filesystem_of(head).is_none() {
            keep(&mut dormant);
        }
    }

    /// Forgets what was read of a dormant head, because it is opened or dropped.
    pub(super) fn forget_dormant(&self, head: &str) {
        let mut dormant = self.dormant.lock();
        dormant.edits.remove(head);
        dormant.trees.retain(|kept| kept.head != head);
        // The layers are read again if they are needed again.
        dormant.layers.clear();
    }

    /// The layers on top of all heads. The record of a head can be one layer behind.
    pub(super) fn tops(&self) -> BTreeSet<LayerId> {
        let open = self.open_heads();
        let mut tops: BTreeSet<LayerId> = open.iter().map(|head| head.fs.upper_layer()).collect();
        for (name, record) in self.store.head_records().unwrap_or_default() {
            tops.insert(record.layer);
            if !open.iter().any(|head| head.head == name) {
                tops.extend(reopen::top_of(&self.store, &name, record.layer).ok());
            }
        }
        tops
    }

    /// The layers on top of heads, and those that they were forked from. Only the sealed ones among
    /// them matter.
    pub(super) fn named_by_heads(&self) -> BTreeSet<LayerId> {
        let records = self.store.head_records().unwrap_or_default();
        let mut named = BTreeSet::new();
        for record in records.values() {
            named.insert(record.layer);
            named.extend(record.forked_from.iter().map(|fork| fork.layer));
        }
        named
    }

    /// The unsealed layers of heads that were dropped. Nothing leads to them.
    pub(super) fn layers_of_dropped_heads(&self) -> BTreeSet<LayerId> {
        let heads = self.store.head_names();
        let is_dropped = |info: &LayerInfo| {
            let head = &info.header.head;
            info.header.kind.is_of_head() && !(heads.contains(head) && self.store.is_of(info, head))
        };
        let unsealed = self.store.unsettled(Unsettled::Unsealed);
        unsealed.iter().filter(|info| is_dropped(info)).map(|info| info.header.layer).collect()
    }
}
