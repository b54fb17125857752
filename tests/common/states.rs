//! Reads everything from a store that is not mounted.

use std::collections::BTreeMap;
use std::path::Path;

use jailfs::sandbox::Sandbox;
use jailfs::sandbox::{Change, Detail, Reply, Request, Rev};

/// All states of a store: the present tree of each head and every checkpoint, each compared with
/// the base, with content. `@` is the head `main`.
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
    let Reply::Forks(heads) = sandbox.handle(Request::Forks).unwrap() else { panic!("no list") };
    let heads = heads.into_iter().filter(|head| head.name != sandbox.head_name());
    let heads = heads.map(|head| Rev::Head { head: head.name, back: 0 });
    checkpoints.chain(heads).chain([Rev::Now]).map(diff).collect()
}

/// Runs the full consistency check, including all content.
#[track_caller]
pub fn check(store: &Path, when: &str) {
    let checked = Sandbox::check_store(store, true).unwrap();
    assert!(checked.problems.is_empty(), "{when}: {:#?}", checked.problems);
    assert!(checked.warnings.is_empty(), "{when}: {:#?}", checked.warnings);
}
