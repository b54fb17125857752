//! A clock that jumps forwards and backwards, within a session and between sessions.

use std::path::Path;
use std::sync::Arc;

use jailfs::internals::fs::Caller;
use jailfs::internals::sys::clock;
use jailfs::sandbox::{Detail, Operation, Reply, Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};

use crate::states::{check, states};

const YEAR: i64 = 365 * 86_400;

fn open(dir: &Path) -> Arc<Sandbox> {
    let options = StoreOptions { volatile: true, ..StoreOptions::default() };
    Sandbox::create_or_open(&dir.join("base"), &dir.join("store"), &options).unwrap()
}

fn write(sandbox: &Sandbox, text: &str) {
    let (fs, name) = (sandbox.fs(), Name::new(b"f").unwrap());
    let id = match fs.lookup(NodeId::ROOT, &name) {
        Ok(entry) => entry.id,
        Err(_) => {
            fs.mknod(NodeId::ROOT, &name, 0o100_644, 0, 0, Caller { uid: 0, gid: 0 }).unwrap().id
        }
    };
    fs.truncate(id, 0, false).unwrap();
    fs.write(id, 0, text.as_bytes(), false).unwrap();
}

fn operations(sandbox: &Sandbox) -> Vec<Operation> {
    let Reply::OpLog(ops) = sandbox.handle(Request::OpLog).unwrap() else { panic!() };
    ops
}

#[test]
fn a_clock_that_jumps_backwards_changes_no_order() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("base")).unwrap();
    let mut sandbox = open(dir.path());
    let mut made = Vec::new();
    for (at, years) in [0, 20, -20, -50, 5, 0, -1].into_iter().enumerate() {
        clock::set_shift(years * YEAR);
        write(&sandbox, &format!("state {at}"));
        let request = Request::Checkpoint { name: Some(format!("c{at}")), message: String::new() };
        let Reply::Checkpoint(checkpoint) = sandbox.handle(request).unwrap() else { panic!() };
        made.push(checkpoint.id);
        if at == 3 {
            sandbox
                .handle(Request::Apply {
                    paths: Vec::new(),
                    dry_run: false,
                    undo: false,
                    consent: Default::default(),
                })
                .unwrap();
        }
        if at % 2 == 1 {
            drop(sandbox);
            sandbox = open(dir.path());
        }
    }
    // The log is in the order of creation, and so is "the last one".
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!() };
    let found: Vec<_> = log.iter().filter(|c| !c.automatic).map(|c| c.id).collect();
    assert_eq!(found, made.iter().rev().copied().collect::<Vec<_>>());
    let ops = operations(&sandbox);
    assert!(ops.windows(2).all(|pair| pair[0].op == pair[1].op + 1));
    assert!(ops.windows(2).any(|pair| pair[0].time < pair[1].time), "although the times are not");
    // Every state is there, whatever its time says, also states from before an apply.
    for (at, id) in made.iter().enumerate() {
        clock::set_shift(-(at as i64) * YEAR);
        sandbox
            .handle(Request::Restore {
                detach_mounts: false,
                to: Rev::Id(*id),
                paths: Vec::new(),
                dry_run: false,
            })
            .unwrap();
        let state = sandbox.fs().state();
        let path = jailfs::types::TreePath::parse(b"f").unwrap();
        let bytes = state.read_all(&state.resolve(&path).unwrap()).unwrap();
        assert_eq!(bytes, format!("state {at}").as_bytes());
    }
    // gc keeps the newest in that order.
    let gc = Request::Gc { operations: 0, keep: Some(2), max_store: None, dry_run: false };
    sandbox.handle(gc).unwrap();
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!() };
    let kept: Vec<_> = log.iter().filter(|c| !c.automatic).map(|c| c.id).collect();
    assert_eq!(kept, [made[6], made[5]]);
    let request = Request::Diff {
        from: Rev::Id(made[5]),
        to: Rev::Id(made[6]),
        paths: Vec::new(),
        detail: Detail::Stat,
    };
    assert!(matches!(sandbox.handle(request).unwrap(), Reply::Diff(changes) if changes.len() == 1));
    drop(sandbox);
    clock::set_shift(0);
    check(&dir.path().join("store"), "at the end");
    states(&dir.path().join("store"));
}
