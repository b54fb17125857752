//! The snapshot directory without a mount: its cost, and the lifetime of its nodes.

use std::sync::Arc;

use jailfs::internals::fs::{Caller, Entry, LinkReply, SnapdirView};
use jailfs::internals::jail::Policy;
use jailfs::sandbox::{Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions, View};
use jailfs::types::{FileKind, Name, NodeId};

pub const ME: Caller = Caller { uid: 0, gid: 0 };

pub struct Place {
    pub dir: tempfile::TempDir,
    pub sandbox: Arc<Sandbox>,
}

pub fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

impl Place {
    pub fn new() -> Place {
        Place::with_files(20)
    }

    fn with_files(count: u32) -> Place {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        std::fs::create_dir_all(base.join("d")).unwrap();
        for number in 0..count {
            std::fs::write(base.join(format!("d/f{number}")), format!("{number}\n")).unwrap();
        }
        let sandbox =
            Sandbox::create_or_open(&base, &dir.path().join("store"), &StoreOptions::default())
                .unwrap();
        let past = Some(SnapdirView { name: name(".jailfs"), listed: false, makes: true });
        let mount_point = dir.path().join("mnt");
        sandbox
            .set_view(View {
                mount_point,
                policy: Policy::Deny,
                allowed_targets: Vec::new(),
                snapdir: past,
            })
            .unwrap();
        Place { dir, sandbox }
    }

    pub fn find(&self, path: &str) -> jailfs::error::FsResult<Entry> {
        let mut at = Entry { id: NodeId::ROOT, attr: self.sandbox.fs().getattr(NodeId::ROOT)? };
        for part in path.split('/').filter(|part| !part.is_empty()) {
            at = self.sandbox.fs().lookup(at.id, &name(part))?;
        }
        Ok(at)
    }

    pub fn read(&self, path: &str) -> String {
        let id = self.find(path).unwrap().id;
        let bytes = self.sandbox.fs().read(id, 0, u64::MAX).unwrap().read(false).unwrap().unwrap();
        String::from_utf8(bytes).unwrap()
    }

    pub fn put(&self, path: &str, text: &str) {
        let id = self.find(path).unwrap().id;
        self.sandbox.fs().truncate(id, 0, false).unwrap();
        self.sandbox.fs().write(id, 0, text.as_bytes(), false).unwrap();
    }

    pub fn checkpoint(&self, name: &str) {
        let name = Some(name.to_owned());
        self.sandbox.handle(Request::Checkpoint { name, message: String::new() }).unwrap();
    }
}

#[test]
fn nodes_that_the_kernel_dropped_cost_nothing() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    for round in 0..30 {
        place.put("d/f0", &format!("round {round}\n"));
        place.checkpoint(&format!("c{round}"));
    }
    let mut held = Vec::new();
    for round in 0..30 {
        let root = place.find(&format!(".jailfs/checkpoints/c{round}")).unwrap().id;
        let dir = fs.lookup(root, &name("d")).unwrap().id;
        held.extend([root, dir]);
        held.extend((0..20).map(|number| fs.lookup(dir, &name(&format!("f{number}"))).unwrap().id));
        assert_eq!(
            place.read(&format!(".jailfs/checkpoints/c{round}/d/f0")),
            format!("round {round}\n")
        );
    }
    assert_eq!(fs.held_snapdir(), 30 * 22);
    held.iter().for_each(|id| fs.forget(*id, 1000));
    assert_eq!(fs.held_snapdir(), 0);
    // A node that was dropped is gone, and a FORGET too many does no harm.
    assert!(fs.getattr(held[1]).is_err());
    held.iter().for_each(|id| fs.forget(*id, 1));
    assert_eq!(place.read(".jailfs/checkpoints/c7/d/f0"), "round 7\n");
}

#[test]
fn the_listing_of_a_large_directory_continues_where_it_stopped() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    let dir = place.find("d").unwrap().id;
    for number in 0..500 {
        fs.mknod(dir, &name(&format!("n{number:03}")), 0o100_644, 0, 0, ME).unwrap();
    }
    place.checkpoint("x");
    let dir = place.find(".jailfs/checkpoints/x/d").unwrap().id;
    let other = place.find(".jailfs/checkpoints/x").unwrap().id;
    let (mut names, mut after) = (Vec::new(), 0);
    loop {
        let mut taken = 0;
        fs.readdir(dir, after, |entry| {
            after = entry.cookie;
            names.push((entry.name, entry.ino, entry.kind));
            taken += 1;
            taken < 7
        })
        .unwrap();
        if taken < 7 {
            break;
        }
        // Another reader reads another directory meanwhile.
        fs.readdir(other, 0, |_| true).unwrap();
    }
    assert_eq!(names.len(), 522);
    let found = fs.lookup(dir, &name("n250")).unwrap();
    let listed = names.iter().find(|(listed, ..)| listed == b"n250").unwrap();
    assert_eq!((listed.1, listed.2), (found.attr.ino, FileKind::File));
    let distinct: std::collections::BTreeSet<&Vec<u8>> =
        names.iter().map(|(name, ..)| name).collect();
    assert_eq!(distinct.len(), 522);
}

#[test]
fn a_freed_checkpoint_is_stale_and_never_wrong() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    place.put("d/f0", "what it was\n");
    place.checkpoint("x");
    place.put("d/f0", "what it is\n");
    place.checkpoint("y");
    let id = place.find(".jailfs/checkpoints/x/d/f0").unwrap().id;
    let dir = place.find(".jailfs/checkpoints/x/d").unwrap().id;
    let ask = |request| place.sandbox.handle(request).unwrap();
    ask(Request::Drop { rev: Rev::parse("x") });
    assert_eq!(fs.snapdir_read(id, 0, 100, false).unwrap().unwrap(), b"what it was\n");
    ask(Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false });
    assert_eq!(fs.snapdir_read(id, 0, 100, false), Err(jailfs::error::FsError::Stale));
    assert_eq!(fs.getattr(id).unwrap_err(), jailfs::error::FsError::Stale);
    assert_eq!(fs.lookup(dir, &name("f1")).unwrap_err(), jailfs::error::FsError::Stale);
    assert_eq!(place.find(".jailfs/checkpoints/x").unwrap_err(), jailfs::error::FsError::NotFound);
    assert_eq!(place.read(".jailfs/checkpoints/y/d/f0"), "what it is\n");
}

#[test]
fn an_apply_changes_nothing_in_a_checkpoint_even_for_its_open_files() {
    let place = Place::new();
    let fs = place.sandbox.fs();
    place.checkpoint("x");
    let id = place.find(".jailfs/checkpoints/x/d/f3").unwrap().id;
    let before = fs.getattr(id).unwrap();
    place.put("d/f3", "applied\n");
    place
        .sandbox
        .handle(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: false,
            consent: Default::default(),
        })
        .unwrap();
    assert_eq!(std::fs::read_to_string(place.dir.path().join("base/d/f3")).unwrap(), "applied\n");
    assert_eq!(fs.snapdir_read(id, 0, 100, false).unwrap().unwrap(), b"3\n");
    assert_eq!(fs.getattr(id).unwrap(), before);
    place
        .sandbox
        .handle(Request::Apply {
            paths: Vec::new(),
            dry_run: false,
            undo: true,
            consent: Default::default(),
        })
        .unwrap();
    assert_eq!(fs.snapdir_read(id, 0, 100, false).unwrap().unwrap(), b"3\n");
    assert_eq!(fs.getattr(id).unwrap(), before);
}

#[test]
fn checkpoints_of_many_base_epochs_keep_no_more_files_open_than_one() {
    const FILES: u32 = 200;
    const EPOCHS: u32 = 8;
    let place = Place::with_files(FILES);
    let read_all = |of: &str| {
        for number in 20..FILES {
            assert_eq!(place.read(&format!("{of}/d/f{number}")), format!("{number}\n"));
        }
    };
    for epoch in 0..EPOCHS {
        place.checkpoint(&format!("c{epoch}"));
        read_all("");
        read_all(&format!(".jailfs/checkpoints/c{epoch}"));
        place.put("d/f0", &format!("applied {epoch}\n"));
        place
            .sandbox
            .handle(Request::Apply {
                paths: Vec::new(),
                dry_run: false,
                undo: false,
                consent: Default::default(),
            })
            .unwrap();
    }
    for epoch in 0..EPOCHS {
        read_all(&format!(".jailfs/checkpoints/c{epoch}"));
    }
    read_all("");
    // Only this test has files with these numbers.
    let is_of_base = |entry: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_link(entry.unwrap().path()).unwrap_or_default();
        let number =
            text.file_name().and_then(|name| name.to_str()?.strip_prefix('f')?.parse::<u32>().ok());
        text.parent().is_some_and(|dir| dir.ends_with("d"))
            && number.is_some_and(|number| number >= 20)
    };
    let open = std::fs::read_dir("/proc/self/fd").unwrap().map(is_of_base).filter(|is| *is).count();
    assert!((1..=130).contains(&open), "{open} files of the base are open");
}

#[test]
fn invalid_requests_are_refused_in_the_snapshot_directory_too() {
    use jailfs::error::FsError;
    let place = Place::new();
    let fs = place.sandbox.fs();
    place.checkpoint("x");
    for unused in [(1 << 52) + 5, (1 << 52) + 77_777, (1 << 53) - 1] {
        let id = NodeId(unused);
        assert_eq!(fs.getattr(id).unwrap_err(), FsError::NotFound);
        assert_eq!(fs.lookup(id, &name("x")).unwrap_err(), FsError::NotFound);
        assert_eq!(fs.snapdir_read(id, 0, 1, true).unwrap_err(), FsError::NotFound);
        assert_eq!(fs.write(id, 0, b"x", false).unwrap_err(), FsError::ReadOnly);
        fs.forget(id, 7);
    }
    let (root, file) = (
        place.find(".jailfs/checkpoints/x").unwrap().id,
        place.find(".jailfs/checkpoints/x/d/f1").unwrap().id,
    );
    assert_eq!(fs.snapdir_read(root, 0, 1, false).unwrap_err(), FsError::IsADirectory);
    assert_eq!(fs.readdir(file, 0, |_| true).unwrap_err(), FsError::NotADirectory);
    assert_eq!(fs.lookup(file, &name("x")).unwrap_err(), FsError::NotADirectory);
    assert_eq!(fs.readlink(file, 0).unwrap_err(), FsError::Invalid);
    assert_eq!(fs.snapdir_read(file, u64::MAX, u64::MAX, false).unwrap().unwrap(), b"");
    assert_eq!(
        fs.mknod(NodeId::ROOT, &name(".jailfs"), 0o100_644, 0, 0, ME).unwrap_err(),
        FsError::ReadOnly
    );
    let number = fs.lookup(NodeId::CHECKPOINTS, &name("1")).unwrap();
    assert_eq!(fs.readlink(number.id, 0).unwrap(), LinkReply::Text(b"x".to_vec()));
    assert_eq!(fs.lookup(NodeId::CHECKPOINTS, &name("01")).unwrap_err(), FsError::NotFound);
}

#[test]
fn a_checkpoint_keeps_its_time_when_gc_frees_the_layers_below() {
    let place = Place::new();
    place.put("d/f0", "a");
    place.checkpoint("a");
    place.put("d/f1", "b");
    place.checkpoint("b");
    let time = || {
        let found = place.find(".jailfs/checkpoints/2").unwrap();
        place.sandbox.fs().forget(found.id, 1);
        found.attr.meta.mtime
    };
    let before = time();
    place.sandbox.handle(Request::Drop { rev: Rev::Name("a".to_owned()) }).unwrap();
    let gc = Request::Gc { operations: 0, keep: None, max_store: None, dry_run: false };
    place.sandbox.handle(gc).unwrap();
    assert_eq!(time(), before);
}
