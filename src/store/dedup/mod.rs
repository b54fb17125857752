//! Deduplication: finds content of a sealed layer that the store already has.
//!
//! `chunks` is the table of known content, and `matching` the search. `timeline::dedup` decides
//! which layers are searched and publishes the remaps that follow.

pub mod chunks;
pub mod matching;
