//! The library without a mount: changes a file, makes a checkpoint, restores it, and compares.
//!
//! ```sh
//! cargo run --example embed -- DIRECTORY
//! ```
//!
//! The directory stays as it is; the store is deleted.

#![expect(clippy::print_stdout, reason = "an example prints its result")]

use std::path::Path;
use std::process::ExitCode;

use jailfs::error::{Attempt, Error, Kind, Result};
use jailfs::sandbox::{Caller, Detail, Reply, Request, Rev, Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};

fn main() -> ExitCode {
    let Some(base) = std::env::args_os().nth(1) else {
        println!("usage: embed DIRECTORY");
        return ExitCode::from(2);
    };
    match tour(Path::new(&base)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("embed: error: {error}");
            ExitCode::from(error.kind.exit_code())
        }
    }
}

fn tour(base: &Path) -> Result<()> {
    let place = tempfile::tempdir().attempt(|| "make a directory for the store")?;
    let sandbox = Sandbox::create_or_open(
        base,
        &place.path().join("store"),
        &StoreOptions { volatile: true, ..StoreOptions::default() },
    )?;
    let fs = sandbox.fs();
    let names = fs.names(NodeId::ROOT).attempt(|| "list the root")?;
    println!("{} names in the root of the base", names.len());

    let me = Caller { uid: 0, gid: 0 };
    let name = Name::new(b"made-by-embed")
        .map_err(|_| Error::new(Kind::Usage, "name a file", "not a name"))?;
    let file =
        fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0o022, me).attempt(|| "create a file")?;
    fs.write(file.id, 0, b"first\n", false).attempt(|| "write")?;
    sandbox.handle(Request::Checkpoint { name: Some("first".into()), message: String::new() })?;
    fs.write(file.id, 0, b"other\n", false).attempt(|| "write")?;
    show(&sandbox, &Rev::Name("first".into()), &Rev::Now)?;
    sandbox.handle(Request::Restore {
        detach_mounts: false,
        to: Rev::Name("first".into()),
        paths: Vec::new(),
        dry_run: false,
    })?;
    // The old id names an orphan after the restore. A lookup gives the id of the restored file.
    let restored = fs.lookup(NodeId::ROOT, &name).attempt(|| "look the file up")?;
    let bytes =
        fs.read(restored.id, 0, 100).and_then(|plan| plan.read(false)).attempt(|| "read")?;
    println!("after the restore it says {:?}", String::from_utf8_lossy(&bytes.unwrap_or_default()));
    show(&sandbox, &Rev::Base, &Rev::Now)
}

fn show(sandbox: &Sandbox, from: &Rev, to: &Rev) -> Result<()> {
    let request = Request::Diff {
        from: from.clone(),
        to: to.clone(),
        paths: Vec::new(),
        detail: Detail::Patch,
    };
    let Reply::Diff(changes) = sandbox.handle(request)? else {
        return Err(Error::new(Kind::Failed, "diff", "an answer to something else"));
    };
    for change in &changes {
        let change = change?;
        println!("{:?} {}", change.kind, change.path);
        print!("{}", String::from_utf8_lossy(&change.patch.unwrap_or_default()));
    }
    Ok(())
}
