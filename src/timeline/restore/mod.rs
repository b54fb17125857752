//! Restoring single paths.

pub(in crate::timeline) mod base_paths;
pub(in crate::timeline) mod partial;
