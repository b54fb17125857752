//! What can be asked of a store that nobody has mounted.

use std::collections::BTreeMap;
use std::path::Path;

use jailfs::sandbox::Sandbox;
use jailfs::sandbox::{Change, Detail, Reply, Request, Rev};

/// Everything that can be asked of a store: the tree as it is and every checkpoint, each against the base, with content.
pub fn states(store: &Path) -> BTreeMap<String, Vec<Change>> {
    let sandbox = Sandbox::open(store).unwrap();
    let Reply::Log(log) = sandbox.handle(Request::Log).unwrap() else { panic!("not a log") };
    let checkpoints = log.into_iter().filter(|c| !c.automatic).map(|c| Rev::Id(c.id));
    let diff = |to: Rev| {
        let request = Request::Diff {
            from: Rev::Base,
            to: to.clone(),
            paths: Vec::new(),
            detail: Detail::Patch,
        };
        match sandbox.handle(request).unwrap() {
            Reply::Diff(changes) => (to.to_string(), changes.to_vec().unwrap()),
            other => panic!("{other:?}"),
        }
    };
    checkpoints.chain([Rev::Now]).map(diff).collect()
}

/// Holds a store against all that must be true of it, every byte included.
#[track_caller]
pub fn check(store: &Path, when: &str) {
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{when}: {:#?}", checked.problems);
    assert!(checked.warnings.is_empty(), "{when}: {:#?}", checked.warnings);
}
