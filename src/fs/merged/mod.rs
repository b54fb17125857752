//! The merged tree: what a name, a node and a range of content are, in the tree or in the base.

pub(in crate::fs) mod data_ranges;
pub(in crate::fs) mod extent_reader;
pub mod lower;
pub(in crate::fs) mod state;
