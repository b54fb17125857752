//! `cargo +nightly fuzz run pack`; see `fuzz/src/archive.rs`.

#![no_main]

#[path = "../src/archive.rs"]
mod archive;

libfuzzer_sys::fuzz_target!(|data: &[u8]| archive::pack(data));
