//! The checkpoints that names mean.
//!
//! Always true:
//! * A name means at most one checkpoint of a head. The checkpoints of a head are those in its
//!   lineage, also from before it was forked, and all others that it made.
//! * If two of them have one name, because the head was restored to a state of another head, it
//!   means the newest one in the lineage.
//! * `HEAD@NAME` means the checkpoint of that head, from every head. If HEAD was dropped, it is
//!   the one that it left.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;

use crate::store::Store;
use crate::store::layer::LayerInfo;
use crate::types::LayerId;

/// The names of a head's checkpoints.
type OfHead = BTreeMap<String, LayerId>;

/// How many names are searched one by one before the names of the head are collected.
const SINGLE_SEARCHES: u32 = 3;

/// The names of checkpoints, as one head uses them. The first questions are answered by the catalog
/// as it is then, the others by a copy.
pub struct CheckpointNames<'a> {
    store: &'a Store,
    head: String,
    sees: Box<dyn Fn(&LayerInfo) -> bool + 'a>,
    searches: Cell<u32>,
    /// All checkpoints with a name, oldest first.
    named: OnceCell<Vec<LayerInfo>>,
    /// The names of heads that were collected.
    collected: RefCell<BTreeMap<String, OfHead>>,
}

/// The checkpoints that a text can mean.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// There is none.
    Nothing,
    /// It means this one.
    One(LayerId),
    /// It could mean each of these.
    Several(Vec<LayerId>),
}

impl Named {
    fn of(mut found: Vec<LayerId>) -> Named {
        match (found.pop(), found.is_empty()) {
            (None, _) => Named::Nothing,
            (Some(one), true) => Named::One(one),
            (Some(last), false) => {
                found.push(last);
                Named::Several(found)
            }
        }
    }
}

impl Store {
    /// The names of the checkpoints that `sees` accepts, as a head uses them. `sees` must take no
    /// lock.
    pub fn checkpoint_names<'a>(
        &'a self,
        head: &str,
        sees: impl Fn(&LayerInfo) -> bool + 'a,
    ) -> CheckpointNames<'a> {
        let is_named = move |info: &LayerInfo| {
            info.header.kind.is_of_head() && name_of(info).is_some() && sees(info)
        };
        CheckpointNames {
            store: self,
            head: head.to_owned(),
            sees: Box::new(is_named),
            searches: Cell::default(),
            named: OnceCell::new(),
            collected: RefCell::default(),
        }
    }

    fn names_of(&self, head: &str, named: &[LayerInfo]) -> OfHead {
        let lineage = self.lineage_of(head);
        let is_listed = |info: &&LayerInfo| {
            named.binary_search_by_key(&info.header.layer, |one| one.header.layer).is_ok()
        };
        let made = named.iter().rev().filter(|info| self.is_of(info, head));
        let mut names = OfHead::new();
        for info in lineage.iter().filter(is_listed).chain(made) {
            if let Some(name) = name_of(info) {
                names.entry(name.to_owned()).or_insert(info.header.layer);
            }
        }
        names
    }

    fn lineage_of(&self, head: &str) -> Vec<LayerInfo> {
        let record = self.head_records.lock().get(head).cloned();
        let top = record.and_then(Result::ok).map(|record| record.layer);
        top.map(|top| self.lineage_from(top)).unwrap_or_default()
    }
}

impl CheckpointNames<'_> {
    /// The checkpoint of this head that has a name.
    pub fn own(&self, name: &str) -> Option<LayerId> {
        self.of_head(&self.head, name)
    }

    fn of_head(&self, head: &str, name: &str) -> Option<LayerId> {
        self.searches.set(self.searches.get() + 1);
        if self.searches.get() <= SINGLE_SEARCHES {
            return self.search(head, name);
        }
        let mut collected = self.collected.borrow_mut();
        let names = collected
            .entry(head.to_owned())
            .or_insert_with(|| self.store.names_of(head, self.named()));
        names.get(name).copied()
    }

    /// Finds the same checkpoint as [`Store::names_of`], without collecting all names.
    fn search(&self, head: &str, name: &str) -> Option<LayerId> {
        let mut found = self.store.layers_named(name);
        found.retain(&self.sees);
        let is_made_by_head = |info: &&LayerInfo| self.store.is_of(info, head);
        if let [one] = &*found
            && is_made_by_head(&one)
        {
            return Some(one.header.layer);
        }
        let lineage = if found.is_empty() { Vec::new() } else { self.store.lineage_of(head) };
        let is_found = |info: &&LayerInfo| {
            found.binary_search_by_key(&info.header.layer, |one| one.header.layer).is_ok()
        };
        let meant = lineage.iter().find(is_found);
        meant.or_else(|| found.iter().rev().find(is_made_by_head)).map(|info| info.header.layer)
    }

    fn named(&self) -> &[LayerInfo] {
        self.named.get_or_init(|| self.store.layers_where(&self.sees))
    }

    /// The checkpoint that a name means: that of this head, or else the only one of the store.
    pub fn find(&self, name: &str) -> Named {
        match self.own(name) {
            Some(layer) => Named::One(layer),
            None => self.all(|info| name_of(info) == Some(name)),
        }
    }

    /// The checkpoint that `HEAD@NAME` means.
    pub fn find_of(&self, head: &str, name: &str) -> Named {
        match self.of_head(head, name) {
            Some(layer) => Named::One(layer),
            None => self.all(|info| info.header.head == head && name_of(info) == Some(name)),
        }
    }

    fn all(&self, is_meant: impl Fn(&LayerInfo) -> bool) -> Named {
        let found = self.named().iter().filter(|info| is_meant(info));
        Named::of(found.map(|info| info.header.layer).collect())
    }

    /// A text that means a checkpoint and no other one: its name if it is of this head, else
    /// `HEAD@NAME` with the head that made it, else its number.
    pub fn label(&self, info: &LayerInfo) -> String {
        let layer = info.header.layer;
        let head = &info.header.head;
        match name_of(info) {
            Some(name) if self.own(name) == Some(layer) => name.to_owned(),
            Some(name) if self.find_of(head, name) == Named::One(layer) => format!("{head}@{name}"),
            _ => layer.to_string(),
        }
    }

    /// The labels of some checkpoints.
    pub fn labels(&self, layers: &[LayerId]) -> Vec<String> {
        let meant = self.named().iter().filter(|info| layers.contains(&info.header.layer));
        meant.map(|info| self.label(info)).collect()
    }
}

/// The name of a checkpoint.
pub fn name_of(info: &LayerInfo) -> Option<&str> {
    info.seal.as_ref()?.name.as_deref()
}
