//! Quotas, and how space is freed on a full disk.

pub(in crate::fs) mod enospc;
pub(in crate::fs) mod quota;
pub(in crate::fs) mod reclaim;
