//! `cargo +nightly fuzz run tar`; see `fuzz/src/tar.rs`.

#![no_main]

#[path = "../src/tar.rs"]
mod tar;

libfuzzer_sys::fuzz_target!(|data: &[u8]| tar::run(data));
