//! The command-line program. All of its code is in the library, for the tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    jailfs::main()
}
