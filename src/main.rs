//! The command; all of it is in the library, where tests reach it.

use std::process::ExitCode;

fn main() -> ExitCode {
    jailfs::cli::main()
}
