//! What the kernel holds of a head: nodes, and what it was told of them.

pub(in crate::fs) mod coherence;
pub(in crate::fs) mod held;
pub(in crate::fs) mod nodes;
