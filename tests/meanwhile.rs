//! Changes to the base while an apply runs: at each moment at which the apply writes to the store,
//! the test writes to the base. That write is never lost, and the apply is done or not done.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jailfs::internals::fs::{Caller, RenameMode};
use jailfs::internals::sys::failpoint;
use jailfs::sandbox::{Reply, Request};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId, TreePath};

const ME: Caller = Caller { uid: 0, gid: 0 };

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

fn put(sandbox: &Sandbox, file: &str, bytes: &[u8]) {
    let fs = sandbox.fs();
    let id = match fs.lookup(NodeId::ROOT, &name(file)) {
        Ok(entry) => entry.id,
        Err(_) => fs.mknod(NodeId::ROOT, &name(file), 0o100_644, 0, 0, ME).unwrap().id,
    };
    fs.write(id, 0, bytes, false).unwrap();
}

/// Bases of this kind, and a tree with one change of each kind.
fn prepare(dir: &Path) -> Arc<Sandbox> {
    let base = dir.join("base");
    std::fs::create_dir(&base).unwrap();
    for file in ["written", "removed", "renamed", "mode", "linked", "far"] {
        std::fs::write(base.join(file), format!("{file} of the base")).unwrap();
    }
    std::fs::hard_link(base.join("linked"), base.join("link")).unwrap();
    let options = StoreOptions { volatile: true, ..StoreOptions::default() };
    let sandbox = Sandbox::create_or_open(&base, &dir.join("store"), &options).unwrap();
    put(&sandbox, "written", b"WRITTEN");
    put(&sandbox, "linked", b"LINKED");
    put(&sandbox, "new", b"new");
    put(&sandbox, "far", b"FAR");
    put(&sandbox, "pair", b"PAIR");
    let fs = sandbox.fs();
    fs.link(fs.lookup(NodeId::ROOT, &name("pair")).unwrap().id, NodeId::ROOT, &name("second"))
        .unwrap();
    fs.unlink(NodeId::ROOT, &name("removed")).unwrap();
    fs.rename(NodeId::ROOT, &name("renamed"), NodeId::ROOT, &name("now"), RenameMode::Replace, 0)
        .unwrap();
    let mode = fs.lookup(NodeId::ROOT, &name("mode")).unwrap().id;
    fs.setattr(
        mode,
        jailfs::internals::fs::SetAttr { mode: Some(0o600), ..Default::default() },
        false,
    )
    .unwrap();
    sandbox
}

/// One in so many moments is tried; `JAILFS_MOMENT_STRIDE=1` tries all.
const EVERY: usize = 4;

/// The content of the base under all names, except for these.
fn seen(base: &Path, but: &[&str]) -> Vec<(String, Vec<u8>)> {
    let names =
        std::fs::read_dir(base).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| !but.contains(&name.as_str())).collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), std::fs::read(base.join(&name)).unwrap())).collect()
}

fn change(file: &Path, in_place: bool) {
    match std::fs::read(file) {
        // The size stays, if possible.
        Ok(bytes) if in_place => {
            let file = std::fs::OpenOptions::new().write(true).open(file).unwrap();
            file.write_all_at(b"by hand", bytes.len().saturating_sub(7) as u64).unwrap();
        }
        // As an editor does: a new file, and a rename over the old one.
        Ok(mut bytes) => {
            bytes.extend(b" by hand");
            let temp = file.with_extension("by-hand");
            std::fs::write(&temp, bytes).unwrap();
            std::fs::rename(temp, file).unwrap();
        }
        Err(_) => std::fs::write(file, "by hand").unwrap(),
    }
}

#[test]
fn writes_to_the_base_while_an_apply_runs_are_never_lost() {
    let before = {
        let dir = tempfile::tempdir().unwrap();
        drop(prepare(dir.path()));
        dir
    };
    let before = |but: &[&str]| seen(&before.path().join("base"), but);
    let (mut conflicts, mut failures, mut done) = (0, 0, 0);
    let files = ["written", "removed", "now", "mode", "linked", "new", "pair", "other"];
    for (file, in_place) in files.into_iter().flat_map(|file| [(file, false), (file, true)]) {
        // Both hard links of a file that is written in place.
        let written = [file, if in_place && file == "linked" { "link" } else { file }];
        let every: usize =
            std::env::var("JAILFS_MOMENT_STRIDE").map_or(EVERY, |every| every.parse().unwrap());
        for moment in (1..).step_by(every) {
            let dir = tempfile::tempdir().unwrap();
            let sandbox = prepare(dir.path());
            let base = dir.path().join("base");
            let (moments, target) = (Arc::new(AtomicUsize::new(0)), base.join(file));
            let seen_moments = Arc::clone(&moments);
            failpoint::set_recorder(Some(Box::new(move |_| {
                if seen_moments.fetch_add(1, Ordering::SeqCst) + 1 == moment {
                    change(&target, in_place);
                }
            })));
            let result = sandbox.handle(Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: false,
                consent: jailfs::sandbox::Consent::ALL,
            });
            failpoint::set_recorder(None);
            let when = format!("{file}, in place: {in_place}, moment {moment}");
            if moments.load(Ordering::SeqCst) < moment {
                // The apply was over before.
                assert!(moment > 10);
                break;
            }
            let bytes = std::fs::read(base.join(file)).unwrap_or_default();
            assert!(
                bytes.ends_with(b"by hand"),
                "{when}: the user's own changes are lost: {result:?}"
            );
            let now = seen(&base, &written);
            match result {
                Ok(Reply::Applied(applied)) if applied.conflicts.is_empty() => {
                    assert!(now.iter().any(|(n, b)| n == "far" && b.starts_with(b"FAR")), "{when}");
                    done += 1;
                }
                Ok(Reply::Applied(applied)) => {
                    let is_written = |path: &TreePath| written.contains(&path.to_string().as_str());
                    assert!(applied.conflicts.iter().all(|(path, _)| is_written(path)), "{when}");
                    assert_eq!(now, before(&written), "{when}: something was written");
                    conflicts += 1;
                }
                Err(error) => {
                    // Hard links are one file: the pre-image of one of them also kept the content
                    // of the other.
                    assert_eq!(now, before(&written), "{when}: {error}");
                    assert!(error.hint.is_some(), "{when}: {error:?}");
                    failures += 1;
                }
                other => panic!("{when}: {other:?}"),
            }
            drop(sandbox);
            // The store opens, and the manual change stays a conflict or is part of the base.
            let again = Sandbox::open(&dir.path().join("store")).unwrap();
            assert!(std::fs::read(base.join(file)).unwrap().ends_with(b"by hand"), "{when}");
            // The undo of a completed apply does not treat it as its own change either.
            let undone = again.handle(Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: true,
                consent: jailfs::sandbox::Consent::ALL,
            });
            let bytes = std::fs::read(base.join(file)).unwrap_or_default();
            assert!(bytes.ends_with(b"by hand"), "{when}, apply undone: {undone:?}");
            drop(again);
            let checked = Sandbox::check_store(&dir.path().join("store"), true).unwrap();
            assert!(checked.problems.is_empty(), "{when}: {:?}", checked.problems);
        }
    }
    assert!(conflicts > 0 && failures > 0 && done > 0, "{conflicts} {failures} {done}");
}
