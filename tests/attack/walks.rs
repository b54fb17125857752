//! Renames while the kernel resolves the text of a link. No process resolves anything here: the
//! kernel has the text and has not sent FORGET for the link, which is all that the filesystem knows
//! in a race.

use std::sync::Arc;

use jailfs::error::{FsError, FsResult};
use jailfs::internals::fs::{Caller, LinkReply, RenameMode};
use jailfs::sandbox::{Request, Rev};
use jailfs::sandbox::{Sandbox, StoreOptions};
use jailfs::types::{Name, NodeId};

const ME: Caller = Caller { uid: 0, gid: 0 };

/// A tree of directories `a/b/c` and `x/y/z`, as a kernel holds it.
struct Tree {
    sandbox: Arc<Sandbox>,
    _dir: tempfile::TempDir,
}

impl Tree {
    fn new() -> Tree {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        std::fs::create_dir_all(base.join("a/b/c")).unwrap();
        let store = dir.path().join("store");
        let sandbox = Sandbox::create_or_open(&base, &store, &StoreOptions::default()).unwrap();
        let tree = Tree { sandbox, _dir: dir };
        for path in ["x", "x/y", "x/y/z"] {
            tree.mkdir(path);
        }
        tree
    }

    fn id(&self, path: &str) -> NodeId {
        path.split('/').filter(|part| !part.is_empty()).fold(NodeId::ROOT, |dir, part| {
            self.sandbox.fs().lookup(dir, &name(part)).unwrap_or_else(|e| panic!("{path}: {e}")).id
        })
    }

    fn place<'a>(&self, path: &'a str) -> (NodeId, Name, &'a str) {
        let (dir, last) = path.rsplit_once('/').unwrap_or(("", path));
        (self.id(dir), name(last), last)
    }

    fn mkdir(&self, path: &str) {
        let (dir, last, _) = self.place(path);
        self.sandbox.fs().mkdir(dir, &last, 0o755, 0, ME).unwrap();
    }

    fn symlink(&self, path: &str, text: &str) -> NodeId {
        let (dir, last, _) = self.place(path);
        self.sandbox.fs().symlink(dir, &last, text.as_bytes(), ME).unwrap().id
    }

    fn read(&self, id: NodeId) -> Result<String, FsError> {
        match self.sandbox.fs().readlink(id, 0)? {
            LinkReply::Text(text) => Ok(String::from_utf8(text).unwrap()),
            LinkReply::Wait(which) => {
                self.sandbox.fs().move_finished(&which);
                self.read(id).map(|text| format!("later {text}"))
            }
        }
    }

    fn rename(&self, from: &str, to: &str, mode: RenameMode) -> FsResult<()> {
        let ((from, old, _), (to, new, _)) = (self.place(from), self.place(to));
        self.sandbox.fs().rename(from, &old, to, &new, mode, 0)
    }

    fn mv(&self, from: &str, to: &str) -> FsResult<()> {
        self.rename(from, to, RenameMode::Replace)
    }

    fn unlink(&self, path: &str) {
        let (dir, last, _) = self.place(path);
        self.sandbox.fs().unlink(dir, &last).unwrap();
    }

    fn rmdir(&self, path: &str) {
        let (dir, last, _) = self.place(path);
        self.sandbox.fs().rmdir(dir, &last).unwrap();
    }

    fn do_(&self, request: Request) {
        self.sandbox.handle(request).unwrap();
    }

    fn forget(&self, id: NodeId) {
        self.sandbox.fs().forget(id, u64::MAX);
    }
}

fn name(text: &str) -> Name {
    Name::new(text.as_bytes()).unwrap()
}

const REFUSED: FsResult<()> = Err(FsError::LeavesJail);

#[test]
fn a_directory_cannot_move_up_while_a_text_may_be_resolved_in_it() {
    let tree = Tree::new();
    let link = tree.symlink("a/b/c/l", "../../../f");
    assert_eq!(tree.mv("a/b/c", "x/c"), Ok(()), "no process has read it yet");
    assert_eq!(tree.mv("x/c", "a/b/c"), Ok(()));
    assert_eq!(tree.read(link), Ok("later ../../../f".into()));
    for (from, to) in [("a/b/c", "c"), ("a/b/c", "a/c"), ("a/b", "b"), ("a/b/c", "x/c")] {
        assert_eq!(tree.mv(from, to), REFUSED, "{from} {to}");
    }
    assert_eq!(tree.rename("a/b/c", "x", RenameMode::Exchange), REFUSED);
    assert_eq!(tree.rename("x", "a/b/c", RenameMode::Exchange), REFUSED);
    assert_eq!(tree.mv("a/b/c", "x/y/c"), Ok(()), "as deep as before");
    assert_eq!(tree.mv("x/y/c", "x/y/z/c"), Ok(()), "deeper");
    assert_eq!(tree.mv("x/y/z/c", "c"), REFUSED);
    tree.forget(link);
    assert_eq!(tree.mv("x/y/z/c", "c"), Ok(()), "the walk is over");
    assert_eq!(
        tree.read(tree.id("c/l")),
        REFUSED.map(|()| String::new()),
        "and a second rename is refused"
    );
    let (refusals, count) = tree.sandbox.fs().refusals();
    assert_eq!((refusals.len(), count), (8, 8), "{refusals:?}");
}

#[test]
fn it_cannot_move_up_whatever_happens_to_the_link() {
    let gone: [fn(&Tree); 5] = [
        |tree| tree.unlink("a/b/c/l"),
        |tree| tree.mv("a/b/c/l", "x/y/z/l").unwrap(),
        |tree| tree.mv("a/b/c/l", "l").unwrap(),
        |tree| {
            tree.symlink("a/b/c/other", "elsewhere");
            tree.mv("a/b/c/other", "a/b/c/l").unwrap();
        },
        |tree| {
            let link = tree.id("a/b/c/l");
            tree.sandbox.fs().link(link, NodeId::ROOT, &name("hard")).unwrap();
        },
    ];
    for (at, go) in gone.iter().enumerate() {
        let tree = Tree::new();
        let link = tree.symlink("a/b/c/l", "../../../f");
        assert_eq!(tree.read(link), Ok("../../../f".into()));
        go(&tree);
        assert_eq!(tree.mv("a/b/c", "c"), REFUSED, "{at}");
        assert_eq!(tree.mv("a/b", "b"), REFUSED, "{at}");
        tree.forget(link);
        assert_eq!(tree.mv("a/b/c", "c"), Ok(()), "{at}");
    }
}

#[test]
fn a_directory_that_a_walk_passed_stays_marked_when_it_moves_away() {
    let tree = Tree::new();
    tree.mkdir("a/b/c/d");
    tree.symlink("a/b/c/d/l", "../../../../f");
    tree.read(tree.id("a/b/c/d/l")).unwrap();
    // A walk can be in b now, with two steps to go.
    assert_eq!(tree.mv("a/b/c", "x/y/c"), Ok(()));
    assert_eq!(tree.mv("a/b", "b"), REFUSED);
    assert_eq!(tree.mv("x/y", "y"), REFUSED);
    // Or in b, below another directory.
    assert_eq!(tree.mv("a/b", "x/b"), Ok(()));
    assert_eq!(tree.mv("x/b", "b"), REFUSED);
}

#[test]
fn a_removed_directory_leaves_its_marks_to_the_one_above() {
    let tree = Tree::new();
    let link = tree.symlink("a/b/c/l", "../../../f");
    tree.read(link).unwrap();
    tree.unlink("a/b/c/l");
    tree.rmdir("a/b/c");
    assert_eq!(tree.mv("a/b", "b"), REFUSED);
    tree.mkdir("a/b/c");
    assert_eq!(tree.mv("a/b/c", "c"), Ok(()), "another one of the same name");
    // Replaced by another directory.
    let tree = Tree::new();
    tree.read(tree.symlink("a/b/c/l", "../../../f")).unwrap();
    tree.unlink("a/b/c/l");
    tree.mkdir("empty");
    assert_eq!(tree.mv("empty", "a/b/c"), Ok(()));
    assert_eq!(tree.mv("a/b", "b"), REFUSED);
}

#[test]
fn a_restore_keeps_the_marks_of_walks() {
    let tree = Tree::new();
    tree.do_(Request::Checkpoint { name: Some("c".into()), message: String::new() });
    tree.mkdir("a/b/new");
    tree.mkdir("a/b/new/deep");
    for path in ["a/b/c/l", "a/b/new/deep/l"] {
        let up = "../".repeat(path.split('/').count() - 1);
        tree.read(tree.symlink(path, &up)).unwrap();
    }
    tree.do_(Request::Restore {
        detach_mounts: false,
        to: Rev::Name("c".into()),
        paths: Vec::new(),
        dry_run: false,
    });
    // The first walk is in a directory that stays, the second in a removed one, in another removed
    // one.
    assert_eq!(tree.mv("a/b/c", "c"), REFUSED);
    assert_eq!(tree.mv("a/b", "b"), REFUSED);
}

#[test]
fn a_link_that_was_found_nearer_to_the_root_is_looked_up_again() {
    let tree = Tree::new();
    let link = tree.symlink("a/l", "../../f");
    assert_eq!(tree.mv("a/l", "x/y/z/l"), Ok(()));
    // A walk may have found it in `a`, and send READLINK only now.
    assert_eq!(tree.read(link), Err(FsError::Stale));
    assert_eq!(tree.read(link), Err(FsError::Stale), "repeated any number of times");
    let again = tree.id("x/y/z/l");
    assert_ne!(again, link);
    assert_eq!(tree.read(again), Ok("../../f".into()));
    let attr = |id| tree.sandbox.fs().getattr(id).unwrap();
    assert_eq!(attr(again), attr(link), "it is the same file");
    assert_eq!(tree.read(link), Err(FsError::Stale));
    tree.unlink("x/y/z/l");
    assert_eq!(tree.sandbox.fs().getattr(link).err(), Some(FsError::NotFound));
    assert!(tree.sandbox.fs().getattr(again).is_ok(), "its holder keeps the file");
    tree.forget(link);

    // A link that stays inside from both is served, and a removed name of two still counts.
    let plain = tree.symlink("a/p", "../f");
    assert_eq!(tree.mv("a/p", "x/y/p"), Ok(()));
    assert_eq!(tree.read(plain), Ok("../f".into()));
    let twice = tree.symlink("a/t", "../../f");
    tree.sandbox.fs().link(twice, tree.id("x/y"), &name("t")).unwrap();
    assert_eq!(tree.read(twice), Err(FsError::LeavesJail), "by its name in a");
    tree.unlink("a/t");
    assert_eq!(tree.read(twice), Err(FsError::Stale));
    assert_eq!(tree.read(tree.id("x/y/t")), Ok("../../f".into()));
}

#[test]
fn a_link_found_in_a_directory_that_a_restore_orphaned_is_looked_up_again() {
    let tree = Tree::new();
    tree.symlink("a/b/c/l", "../../../f");
    tree.do_(Request::Checkpoint { name: Some("deep".into()), message: String::new() });
    assert_eq!(tree.mv("a/b/c", "c"), Ok(()));
    // A process is in `c`, found the link there, and sends READLINK after the restore.
    let link = tree.id("c/l");
    tree.do_(Request::Restore {
        detach_mounts: false,
        to: Rev::Name("deep".into()),
        paths: Vec::new(),
        dry_run: false,
    });
    assert!(tree.read(link).is_err());
    assert_eq!(tree.read(tree.id("a/b/c/l")), Ok("../../../f".into()));
}

#[test]
fn a_directory_that_moves_down_counts_as_up_until_the_kernel_has_moved_it() {
    let tree = Tree::new();
    let link = tree.symlink("a/l", "../../f");
    assert_eq!(tree.mv("a", "x/a"), Ok(()));
    let reply = tree.sandbox.fs().readlink(link, 0);
    assert!(matches!(reply, Ok(LinkReply::Wait(which)) if which.into == tree.id("x")));
    assert_eq!(tree.read(link), Ok("later ../../f".into()));
    assert_eq!(tree.read(link), Ok("../../f".into()));
    // The kernel does one such rename at a time: the next one shows that the one before is over.
    let other = tree.symlink("x/a/b/m", "../../../../f");
    assert_eq!(tree.read(other), Err(FsError::LeavesJail));
    assert_eq!(tree.mv("x/a", "x/y/a"), Ok(()));
    assert_eq!(tree.mv("x/y/z", "x/z"), Ok(()));
    assert_eq!(tree.read(tree.id("x/y/a/b/m")), Ok("../../../../f".into()));
    // An old notice of an old rename has no effect.
    assert_eq!(tree.mv("x/y/a", "x/z/a"), Ok(()));
    assert_eq!(tree.mv("x/z/a", "x/y/a"), Ok(()));
}

#[test]
fn a_text_that_leaves_a_directory_through_its_old_place_waits() {
    let tree = Tree::new();
    let link = tree.symlink("a/b/c/l", "../../../f");
    let near = tree.symlink("a/b/c/near", "../f");
    // A move sideways, and a READLINK before the kernel has done it: a walk would reach `a/b`
    // unnoticed.
    assert_eq!(tree.mv("a/b/c", "x/y/c"), Ok(()));
    assert_eq!(tree.read(near), Ok("../f".into()), "one step is always possible");
    assert_eq!(tree.read(link), Ok("later ../../../f".into()));
    assert_eq!(tree.mv("x/y", "y"), REFUSED);
    assert_eq!(tree.mv("a/b", "b"), Ok(()), "no walk reaches it");
    // Two that are exchanged.
    let tree = Tree::new();
    let dirs = ["a/b/c", "x/y/z"];
    for dir in dirs {
        tree.symlink(&format!("{dir}/l"), "../../../f");
    }
    assert_eq!(tree.rename(dirs[0], dirs[1], RenameMode::Exchange), Ok(()));
    for dir in dirs {
        assert_eq!(tree.read(tree.id(&format!("{dir}/l"))), Ok("later ../../../f".into()));
    }
}
