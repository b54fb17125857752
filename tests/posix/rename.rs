//! Renames of directories of the base that are not empty.

use std::fs::{self, File};
use std::path::Path;

use jailfs::internals::sys::file::{self as sysfile, Rename};
use jailfs::types::Name;

use crate::both::{Side, same};

fn base(dir: &Path) {
    for sub in ["full/deep/deeper", "other/x", "empty", "emptied"] {
        fs::create_dir_all(dir.join(sub)).unwrap();
    }
    fs::write(dir.join("full/a"), "a of full").unwrap();
    fs::write(dir.join("full/deep/deeper/b"), "b").unwrap();
    fs::write(dir.join("other/x/c"), "c").unwrap();
    fs::write(dir.join("emptied/gone"), "").unwrap();
    fs::write(dir.join("file"), "file").unwrap();
}

/// The whole tree: names, kinds, content, links.
fn everything(side: &mut Side, what: &str) {
    side.note(what, "");
    side.sh(
        "find . -printf '%p %y %n %m %s\\n' | sed 's/ d \\([0-9]*\\) \\([0-9]*\\) .*/ d \\1 \\2/' \
         | sort; find . -type f | sort | xargs cat",
    );
}

fn exchange(side: &Side, a: &str, b: &str) -> std::io::Result<()> {
    let dir = File::open(side.at("")).unwrap();
    let name = |text: &str| Name::new(text.as_bytes()).unwrap();
    sysfile::rename(&dir, &name(a), &dir, &name(b), Rename::Exchange)
}

/// Kernel overlayfs answers EXDEV by default.
#[test]
fn a_full_directory_of_the_base_is_renamed_atomically() {
    same(base, |side| {
        side.tried("to a free name", fs::rename(side.at("full"), side.at("moved")));
        everything(side, "to a free name");
        side.tried("into another", fs::rename(side.at("moved"), side.at("other/x/in")));
        everything(side, "into another");
        side.tried("a part back out", fs::rename(side.at("other/x/in/deep"), side.at("deep")));
        side.tried("the old name anew", fs::create_dir_all(side.at("full/deep")));
        fs::write(side.at("full/deep/new"), "new").unwrap();
        everything(side, "the old name anew");
        side.tried("and back", fs::rename(side.at("other/x/in"), side.at("full/deep/again")));
        everything(side, "and back");
    });
}

#[test]
fn a_full_directory_of_the_base_replaces_an_empty_one() {
    same(base, |side| {
        side.tried("over an empty one", fs::rename(side.at("full"), side.at("empty")));
        everything(side, "over an empty one");
        side.tried("over one that is not", fs::rename(side.at("empty"), side.at("emptied")));
        fs::remove_file(side.at("emptied/gone")).unwrap();
        side.tried("over one that was emptied", fs::rename(side.at("empty"), side.at("emptied")));
        everything(side, "over one that was emptied");
        side.tried("over a file", fs::rename(side.at("emptied"), side.at("file")));
        side.tried("a file over it", fs::rename(side.at("file"), side.at("emptied")));
        side.tried("below itself", fs::rename(side.at("emptied"), side.at("emptied/deep/x")));
        side.tried(
            "over what it is in",
            fs::rename(side.at("emptied/deep/deeper"), side.at("emptied")),
        );
        side.tried("over itself", fs::rename(side.at("emptied"), side.at("emptied")));
        side.tried("to a dot", fs::rename(side.at("emptied/."), side.at("x")));
        everything(side, "in the end");
    });
}

#[test]
fn full_directories_of_the_base_can_be_exchanged() {
    same(base, |side| {
        side.tried("with one another", exchange(side, "full", "other"));
        everything(side, "with one another");
        side.tried("with a file", exchange(side, "full", "file"));
        everything(side, "with a file");
        side.tried("with an empty one", exchange(side, "file", "empty"));
        everything(side, "with an empty one");
        fs::write(side.at("other/deep/deeper/b"), "changed").unwrap();
        side.tried("back", exchange(side, "other", "file"));
        side.tried("with nothing", exchange(side, "other", "nothing"));
        everything(side, "in the end");
    });
}
