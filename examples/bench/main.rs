//! The benchmark: each workload on the bare disk, on other overlays and on jailfs, in turn, in one
//! run.
//!
//! ```sh
//! cargo run --release --example bench -- [--against NAME,...] [--only WORD,...]
//!     [--rounds N] [--size small|full] [--dir DIR] [--disk loop|here] [--json] [--list]
//! ```
//!
//! It needs root and a plain Debian machine, installs nothing, and skips nothing silently: it names
//! a missing peer or program and counts it. Only ratios within one run can be compared: the systems
//! take turns within each round, and the load of the machine is printed beside the medians.
//!
//! * `supervise` makes a directory and a process that is the first of its own pid namespace
//!   ([`place`]): when it ends, the kernel ends every process that it started, and all mounts.
//! * [`disk`] makes the filesystem that all systems work on.
//! * [`systems`] mounts a base in one of the ways; [`serve`] is the daemon of jailfs, in a process
//!   of its own, so that its CPU time and memory can be measured. It counts the kernel's messages.
//! * [`material`] makes bases, once; the workloads in [`workloads`] run real programs on them and
//!   take the time.
//! * [`report`] prints medians, spread and ratios.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for people")]
#![expect(clippy::disallowed_methods, reason = "works in directories of its own")]

mod args;
mod disk;
mod machine;
mod material;
mod place;
mod programs;
mod report;
mod runner;
mod serve;
mod systems;
mod targets;
mod workloads;

use std::process::ExitCode;

/// An error is a text, because no caller distinguishes the cases.
type Res<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let outcome = match words.split_first() {
        Some((verb, rest)) if verb == serve::VERB => serve::main(rest).map(|()| ExitCode::SUCCESS),
        Some((verb, rest)) if verb == place::INNER => place::inner(rest),
        _ => place::supervise(&words),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("bench: error: {error}");
        ExitCode::FAILURE
    })
}
