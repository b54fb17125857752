//! Space: quotas, and what happens on a full disk.

pub(in crate::fs) mod enospc;
pub(in crate::fs) mod quota;
