//! Tracks the nodes, orphans, listings and attributes that the kernel holds and caches.

pub(in crate::fs) mod cached_attrs;
pub(in crate::fs) mod coherence;
pub(in crate::fs) mod held;
pub(in crate::fs) mod listing;
pub(in crate::fs) mod nodes;
pub(in crate::fs) mod orphans;
pub(in crate::fs) mod query;
