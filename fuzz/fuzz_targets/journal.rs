//! `cargo +nightly fuzz run journal`; see `fuzz/src/journal.rs`.

#![no_main]

#[path = "../src/journal.rs"]
mod journal;

libfuzzer_sys::fuzz_target!(|data: &[u8]| journal::run(data));
