//! The merged tree: resolves a name, a node or a byte range in the tree or in the base below it.
//!
//! Nothing here knows the kernel, the upper layer or a lock. Every answer is about a
//! [`state::State`], which is a value.

pub(in crate::fs) mod answers;
pub(in crate::fs) mod attr;
pub(in crate::fs) mod base_problems;
pub(in crate::fs) mod data_ranges;
pub(in crate::fs) mod extent_reader;
pub mod fingerprint;
pub(in crate::fs) mod jail_walk;
pub mod lower;
pub mod pre_images;
pub(in crate::fs) mod read_plan;
pub(in crate::fs) mod state;
