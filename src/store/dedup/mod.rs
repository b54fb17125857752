//! Content that is stored already: which chunks may be equal, and where they are.

pub mod chunks;
pub mod matching;
