//! The command-line program. All of its code is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    jailfs::cli::main()
}
