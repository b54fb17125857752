//! `cargo +nightly fuzz run links`; see `fuzz/src/links.rs`.

#![no_main]

#[path = "../src/links.rs"]
mod links;

libfuzzer_sys::fuzz_target!(|data: &[u8]| links::run(data));
