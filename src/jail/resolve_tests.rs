//! The rules of the resolver, row by row.

use super::memory_tree::{Kind, MemoryTree};
use super::{Answer, FsError, FsResult, Jail, Name, NameTarget, Policy, TEXT_MAX, Walk};

#[derive(Clone, Copy, Debug)]
enum Want<'a> {
    /// The text as stored.
    Same,
    Text(&'a str),
    /// Refused, with the path where it leads.
    Out(&'a str),
    Fails(fn() -> FsError),
}
use Policy::{Deny, Literal, Rewrite, Show};
use Want::{Fails, Out, Same, Text};

/// Mounted at /home/u/mnt over /home/u/base, with /usr/bin and /opt/tools allowed.
fn jail(policy: Policy) -> Jail {
    Jail {
        policy,
        mount_point: b"/home/u/mnt".to_vec(),
        base_path: b"/home/u/base".to_vec(),
        allowed_targets: vec![b"/usr/bin".to_vec(), b"/opt/tools/".to_vec()],
    }
}

#[track_caller]
fn check(jail: &Jail, tree: &MemoryTree, dir: &[u8], target: &[u8], want: Want) {
    let got = jail.resolve(tree, tree.dir(dir), target);
    let want: FsResult<Answer> = match want {
        Same => Ok(Answer::Text(target.to_vec())),
        Text(text) => Ok(Answer::Text(text.into())),
        Out(resolved) => Ok(Answer::Escapes { resolved: resolved.into() }),
        Fails(error) => Err(error()),
    };
    assert_eq!(
        show(&got),
        show(&want),
        "{:?} in {:?}",
        target.escape_ascii().to_string(),
        dir.escape_ascii().to_string()
    );
    assert_eq!(got, want);
}

fn show(answer: &FsResult<Answer>) -> String {
    match answer {
        Ok(Answer::Text(text)) => format!("text {}", text.escape_ascii()),
        Ok(Answer::Escapes { resolved }) => format!("escapes to {}", resolved.escape_ascii()),
        Err(error) => format!("error {error}"),
    }
}

/// A project with every kind of link in it.
const TREE: &str = "
    f; d/e/deep/; d/x; d/e/x; r/1/conf; r/2/conf; shared/conf; .../dots; ..a/x; home/u/mnt/twin;
    current>r/2; abs>/home/u/mnt/d/e; based>/home/u/base/d/e; up>../..; d/top>..; d/e/top>../..;
    chain1>chain2; chain2>chain3; chain3>d/e; tofile>f; dangling>nothing/here;
    self>self; selfdeep>selfdeep/x; ping>pong; pong>ping; d/ping>../d/pong; d/pong>../d/ping;
    out>/etc; outrel>d/../../../etc; viaout>out/passwd; viaout2>viaout; d/out>../out;
    py>/usr/bin/python3; bin>/usr/bin; opt>/opt/tools/x; topy>py; badpy>/usr/bin/../lib;
    gonewild>nothing/../../../../etc; proc>/proc/self/root/etc; nested/in/dir/f
";

/// Directory of the link, stored text, policy, expected reply.
const ROWS: &[(&str, &str, Policy, Want)] = &[
    // Stays inside and has the shape: byte for byte.
    ("", "f", Deny, Same),
    ("", "d/e", Deny, Same),
    ("", "d//e", Deny, Same),
    ("", "./d/./e/.", Deny, Same),
    ("", "d/e/", Deny, Same),
    ("", "d/e//", Deny, Same),
    ("", ".", Deny, Same),
    ("", "./", Deny, Same),
    ("", ".//.", Deny, Same),
    ("d", "..", Deny, Same),
    ("d", "../", Deny, Same),
    ("d", "../.", Deny, Same),
    ("d", "./../f", Deny, Same),
    ("d", ".//..//f", Deny, Same),
    ("d/e", "../x", Deny, Same),
    ("d/e", "../../f", Deny, Same),
    ("d/e", ".././../f", Deny, Same),
    ("d/e/deep", "../../../r/1/conf", Deny, Same),
    ("", "f", Show, Same),
    ("d/e", "../../f", Show, Same),
    // Dangling, but inside.
    ("", "nothing", Deny, Same),
    ("", "nothing/here/at/all", Deny, Same),
    ("", "nothing/", Deny, Same),
    ("", "f/not/a/dir", Deny, Same),
    ("", "dangling", Deny, Same),
    ("", "dangling/x", Deny, Same),
    ("d", "../nothing", Deny, Same),
    // Names that only look special.
    ("", ".../dots", Deny, Same),
    ("", "..a/x", Deny, Same),
    ("", "....", Deny, Same),
    (".../", "../f", Deny, Same),
    ("", "..a/../f", Deny, Text("f")),
    ("", "home/u/mnt/twin", Deny, Same),
    ("", "~", Deny, Same),
    ("", " ", Deny, Same),
    // Through other links.
    ("", "current/conf", Deny, Same),
    ("", "chain1", Deny, Same),
    ("", "chain1/x", Deny, Same),
    ("", "abs/x", Deny, Same),
    ("", "based/x", Deny, Same),
    ("", "d/top/f", Deny, Same),
    ("", "d/e/top", Deny, Same),
    ("", "tofile", Deny, Same),
    // `..` exactly to the root, and one more.
    ("", "..", Deny, Out("/home/u")),
    ("", "./..", Deny, Out("/home/u")),
    ("", "../mnt/f", Deny, Out("/home/u/mnt/f")),
    ("d", "../..", Deny, Out("/home/u")),
    ("d/e", "../..", Deny, Same),
    ("d/e", "../../..", Deny, Out("/home/u")),
    ("d/e/deep", "../../..", Deny, Same),
    ("d/e/deep", "../../../", Deny, Same),
    ("d/e/deep", "../../../..", Deny, Out("/home/u")),
    ("d/e/deep", "../../../../../../../../../../etc/passwd", Deny, Out("/etc/passwd")),
    ("", "../base/f", Deny, Out("/home/u/base/f")),
    ("", "../nothing", Deny, Out("/home/u/nothing")),
    // `..` after a name: canonical.
    ("", "d/../f", Deny, Text("f")),
    ("", "d/..", Deny, Text(".")),
    ("", "d/../", Deny, Text(".")),
    ("", "d/e/..", Deny, Text("d")),
    ("", "d/e/../", Deny, Text("d")),
    ("", "d/e/../../r//1/./conf", Deny, Text("r/1/conf")),
    ("", "d/../r/", Deny, Text("r/")),
    ("", "d/../r/.", Deny, Text("r/")),
    ("", "d/../f/", Deny, Text("f/")),
    ("", "d/../nothing", Deny, Text("nothing")),
    ("", "d/../nothing/x/", Deny, Text("nothing/x/")),
    ("", "d/../../f", Deny, Out("/home/u/f")),
    ("d", "../r/../f", Deny, Text("../f")),
    ("d", "../d/e/../x", Deny, Text("x")),
    ("d/e", "../../d/../f", Deny, Text("../../f")),
    ("d/e", "../../d/e/..", Deny, Text("..")),
    ("d/e", "../../r/1/../2/conf", Deny, Text("../../r/2/conf")),
    ("d/e", "deep/../../../f", Deny, Text("../../f")),
    ("d/e", "deep/../../../../f", Deny, Out("/home/u/f")),
    // ... through links: physical up to the last `..`, the names after it kept.
    ("", "current/../1/conf", Deny, Text("r/1/conf")),
    ("", "current/../../shared/conf", Deny, Text("shared/conf")),
    ("", "current/../../../x", Deny, Out("/home/u/x")),
    ("", "d/../current/conf", Deny, Text("current/conf")),
    ("", "d/../current", Deny, Text("current")),
    ("", "d/../current/", Deny, Text("current/")),
    ("", "chain1/../x", Deny, Text("d/x")),
    ("", "abs/../x", Deny, Text("d/x")),
    ("", "based/../x", Deny, Text("d/x")),
    ("d", "../abs/../x", Deny, Text("x")),
    ("d/e", "../../abs/../../current/conf", Deny, Text("../../current/conf")),
    ("d", "top/d/../f", Deny, Text("../f")),
    ("nested/in/dir", "../../../abs/..", Deny, Text("../../../d")),
    // ... where nothing can exist: cut before the `..`.
    ("", "nothing/../f", Deny, Text("nothing/.")),
    ("", "nothing/../../../../etc", Deny, Text("nothing/.")),
    ("", "nothing/a//b/../../c", Deny, Text("nothing/a/b/.")),
    ("", "f/../d", Deny, Text("f/.")),
    ("", "d/../nothing/x/../y", Deny, Text("nothing/x/.")),
    ("d", "../r/../nothing/..", Deny, Text("../nothing/.")),
    ("", "dangling/../f", Deny, Text("dangling/.")),
    ("", "d/../dangling/x/../f", Deny, Text("dangling/x/.")),
    ("", "tofile/../f", Deny, Text("tofile/.")),
    ("", "gonewild", Deny, Same),
    ("", "gonewild/../../..", Deny, Text("gonewild/.")),
    // Leads out through another link.
    ("", "out", Deny, Out("/etc")),
    ("", "out/passwd", Deny, Out("/etc/passwd")),
    ("", "viaout2", Deny, Out("/etc/passwd")),
    ("", "d/out/x", Deny, Out("/etc/x")),
    ("", "out/../home", Deny, Out("/home")),
    ("", "outrel", Deny, Out("/home/etc")),
    ("", "up/x", Deny, Out("/home/x")),
    ("", "proc", Deny, Out("/proc/self/root/etc")),
    ("", "d/../out", Deny, Out("/etc")),
    // Loops: as stored, if it has the shape.
    ("", "self", Deny, Same),
    ("", "self/x", Deny, Same),
    ("", "selfdeep", Deny, Same),
    ("", "ping", Deny, Same),
    ("d", "../d/ping", Deny, Same),
    ("", "self/../f", Deny, Text("self/.")),
    ("", "ping/x/../../../../etc", Deny, Text("ping/x/.")),
    ("", "d/../ping/..", Deny, Text("ping/.")),
    ("", "d/../ping", Deny, Text("ping")),
    // Absolute, in the mount.
    ("", "/home/u/mnt", Deny, Same),
    ("", "/home/u/mnt/", Deny, Same),
    ("d", "/home//u/./mnt/f", Deny, Same),
    ("d/e", "/home/u/mnt/d/x", Deny, Same),
    ("d", "/home/u/mnt/nothing", Deny, Same),
    ("d", "/home/u/mnt/current/conf", Deny, Same),
    ("d", "/home/u/mnt/home/u/mnt/twin", Deny, Same),
    ("", "/home/u/mnt/self", Deny, Same),
    ("", "/home/u/mnt/out/x", Deny, Out("/etc/x")),
    ("", "/home/u/mnt/..", Deny, Out("/home/u")),
    ("", "/home/u/mnt/d/../..", Deny, Out("/home/u")),
    ("", "/home/u/mnt/../other", Deny, Out("/home/u/other")),
    ("", "/home/u/mnt/../../../etc", Deny, Out("/etc")),
    ("d/e", "/home/u/mnt/d/../f", Deny, Text("../../f")),
    ("d/e", "/home/u/mnt/d/e/../x", Deny, Text("../x")),
    ("d", "/home/u/mnt/current/../1", Deny, Text("../r/1")),
    ("d", "/home/u/mnt/nothing/../f", Deny, Text("../nothing/.")),
    ("d", "/home/u/mnt/d/..", Deny, Text("..")),
    ("", "/home/u/mnt/d/..", Deny, Text(".")),
    // ... with a `..` in the host part: the untrusted part is left out.
    ("d", "/home/u/x/../mnt/f", Deny, Text("../f")),
    ("d", "/home/u/mnt/../mnt/f", Deny, Text("../f")),
    ("d", "/home/u/mnt/d/../../mnt/f", Deny, Text("../f")),
    ("d", "/../home/u/mnt/f", Deny, Text("../f")),
    ("d", "/home/u/x/../base/f", Deny, Text("../f")),
    ("d", "/home/u/mnt/../base/f", Deny, Text("../f")),
    ("d", "/home/u/mnt/../mnt/..", Deny, Out("/home/u")),
    // Names that share a prefix with the mount point or the base.
    ("", "/home/u/mnt2", Deny, Out("/home/u/mnt2")),
    ("", "/home/u/mn", Deny, Out("/home/u/mn")),
    ("", "/home/u/mntx/f", Deny, Out("/home/u/mntx/f")),
    ("", "/home/u/base2/f", Deny, Out("/home/u/base2/f")),
    ("", "/home/u/bas", Deny, Out("/home/u/bas")),
    ("", "/home/u", Deny, Out("/home/u")),
    ("", "/", Deny, Out("/")),
    ("", "//", Deny, Out("/")),
    ("", "/..", Deny, Out("/")),
    // Absolute, in the base: re-rooted.
    ("", "/home/u/base", Deny, Text(".")),
    ("d/e", "/home/u/base", Deny, Text("../..")),
    ("d/e", "/home/u/base/", Deny, Text("../..")),
    ("d/e", "/home/u/base/f", Deny, Text("../../f")),
    ("d/e", "/home/u/base/f/", Deny, Text("../../f/")),
    ("d/e", "/home/u/base/d/x", Deny, Text("../x")),
    ("d/e", "/home/u/base/d/e", Deny, Text(".")),
    ("d", "/home/u/base/current/conf", Deny, Text("../current/conf")),
    ("d", "/home/u/base/nothing/x", Deny, Text("../nothing/x")),
    ("d", "/home/u/base/current/../1", Deny, Text("../r/1")),
    ("d", "/home/u/base/../base/f", Deny, Text("../f")),
    ("d", "/home/u/base/../base2/f", Deny, Out("/home/u/base2/f")),
    ("d", "/home/u/base/out", Deny, Out("/etc")),
    ("d", "/home/u/base/self", Deny, Text("../self")),
    // Absolute, elsewhere.
    ("", "/etc/passwd", Deny, Out("/etc/passwd")),
    ("", "/proc/self/root/etc", Deny, Out("/proc/self/root/etc")),
    ("", "/proc/self/cwd", Deny, Out("/proc/self/cwd")),
    ("", "/dev/fd/3", Deny, Out("/dev/fd/3")),
    ("", "/etc/../home/u/other", Deny, Out("/home/u/other")),
    ("", "/etc/passwd", Show, Out("/etc/passwd")),
    // Allowed prefixes.
    ("", "/usr/bin/python3", Deny, Same),
    ("", "/usr/bin", Deny, Same),
    ("", "/usr//bin/./env/", Deny, Same),
    ("", "/opt/tools/x", Deny, Same),
    ("", "/usr/bin2", Deny, Out("/usr/bin2")),
    ("", "/usr/lib", Deny, Out("/usr/lib")),
    ("", "/usr", Deny, Out("/usr")),
    ("", "/usr/bin/../lib", Deny, Out("/usr/lib")),
    ("", "/usr/bin/../bin/env", Deny, Out("/usr/bin/env")),
    ("", "/usr/lib/../bin/env", Deny, Out("/usr/bin/env")),
    ("", "/home/u/mnt/../../../usr/bin/env", Deny, Out("/usr/bin/env")),
    ("", "../../../usr/bin/env", Deny, Out("/usr/bin/env")),
    ("", "py", Deny, Same),
    ("", "topy", Deny, Same),
    ("", "bin/env", Deny, Same),
    ("d", "../r/../bin/env", Deny, Text("../bin/env")),
    ("", "bin/../lib", Deny, Out("/usr/lib")),
    ("", "badpy", Deny, Out("/usr/lib")),
    ("", "/home/u/mnt/bin/env", Deny, Same),
    ("", "/usr/bin/python3", Rewrite, Same),
    ("", "bin/env", Rewrite, Same),
    // Rewrite: everything inside in canonical form.
    ("", "f", Rewrite, Same),
    ("", "d//./e/", Rewrite, Text("d/e/")),
    ("", "./", Rewrite, Text(".")),
    ("d", "./../f", Rewrite, Text("../f")),
    ("d", "../d/x", Rewrite, Text("x")),
    ("d", "..", Rewrite, Same),
    ("d/e", "/home/u/mnt/f", Rewrite, Text("../../f")),
    ("d/e", "/home/u/mnt", Rewrite, Text("../..")),
    ("d/e", "/home/u/base/d/e/x", Rewrite, Text("x")),
    ("d", "/home/u/mnt/current/conf", Rewrite, Text("../current/conf")),
    ("d", "/home/u/mnt/self/x", Rewrite, Text("../self/x")),
    ("", "nothing/./here", Rewrite, Text("nothing/here")),
    ("", "nothing/../f", Rewrite, Text("nothing/.")),
    ("", "/etc", Rewrite, Out("/etc")),
    ("", "..", Rewrite, Out("/home/u")),
    // Literal: unchecked.
    ("", "/etc/passwd", Literal, Same),
    ("", "../../..", Literal, Same),
    ("", "d/../../x", Literal, Same),
    ("", "/home/u/base/f", Literal, Same),
    // These cannot be served.
    ("", "", Deny, Fails(|| FsError::NotFound)),
    ("", "", Literal, Fails(|| FsError::NotFound)),
    ("", "a\0b", Deny, Fails(|| FsError::Invalid)),
    ("", "..\0/x", Deny, Fails(|| FsError::Invalid)),
    ("", "..\0/x", Literal, Fails(|| FsError::Invalid)),
];

#[test]
fn every_row_of_the_table_holds() {
    let tree = MemoryTree::parse(TREE.as_bytes());
    assert!(ROWS.len() >= 80);
    for &(dir, target, policy, want) in ROWS {
        check(&jail(policy), &tree, dir.as_bytes(), target.as_bytes(), want);
    }
}

#[test]
fn every_served_text_of_the_table_has_the_shape() {
    let tree = MemoryTree::parse(TREE.as_bytes());
    for policy in [Deny, Show, Rewrite] {
        for &(dir, target, _, _) in ROWS {
            let Ok(Answer::Text(text)) =
                jail(policy).resolve(&tree, tree.dir(dir.as_bytes()), target.as_bytes())
            else {
                continue;
            };
            let text = String::from_utf8(text).unwrap();
            if text.starts_with('/') {
                assert!(!text.split('/').any(|part| part == ".."), "{target}: {text}");
            } else {
                let parts = text.split('/').filter(|part| !matches!(*part, "" | "."));
                assert!(
                    !parts.skip_while(|part| *part == "..").any(|part| part == ".."),
                    "{target}: {text}"
                );
                let depth = tree.depth(tree.dir(dir.as_bytes()));
                assert!(!Jail::escapes_from_depth(text.as_bytes(), depth), "{target}: {text}");
            }
        }
    }
}

#[test]
fn a_served_text_is_served_again_as_it_is() {
    let tree = MemoryTree::parse(TREE.as_bytes());
    for policy in [Deny, Rewrite] {
        for &(dir, target, _, _) in ROWS {
            let dir = tree.dir(dir.as_bytes());
            if let Ok(Answer::Text(text)) = jail(policy).resolve(&tree, dir, target.as_bytes()) {
                // A dead end is cut to `x/.`; under `rewrite` that becomes `x/` the second time.
                let again = jail(policy).resolve(&tree, dir, &text);
                let same = again == Ok(Answer::Text(text.clone()))
                    || text
                        .strip_suffix(b".")
                        .is_some_and(|cut| again == Ok(Answer::Text(cut.to_vec())));
                assert!(same, "{target}: {}", show(&again));
            }
        }
    }
}

#[test]
fn bytes_that_are_not_utf8_pass_unchanged() {
    let name = [b'n'; 255];
    let mut spec = b"d\xff/\xfe; l\xff>d\xff; d/".to_vec();
    spec.extend_from_slice(b";");
    spec.extend_from_slice(&name);
    spec.extend_from_slice(b"/f");
    let tree = MemoryTree::parse(&spec);
    check(&jail(Deny), &tree, b"", b"d\xff/\xfe", Same);
    check(&jail(Deny), &tree, b"d", b"../d\xff//\xfe", Same);
    let served = jail(Deny).resolve(&tree, tree.dir(b"d"), b"../l\xff/../d\xff/\xfe").unwrap();
    assert_eq!(served, Answer::Text(b"../d\xff/\xfe".to_vec()));
    let out = jail(Deny).resolve(&tree, tree.dir(b""), b"/\xff/x").unwrap();
    assert_eq!(out, Answer::Escapes { resolved: b"/\xff/x".to_vec() });

    let long = [&name[..], b"/f"].concat();
    check(&jail(Deny), &tree, b"", &long, Same);
    let up_and_back = [&name[..], b"/../", &name[..], b"/f"].concat();
    assert_eq!(jail(Deny).resolve(&tree, tree.dir(b""), &up_and_back), Ok(Answer::Text(long)));
    // 256 bytes cannot be a name, so nothing exists behind it.
    let too_long = [b'n'; 256];
    check(&jail(Deny), &tree, b"", &too_long, Same);
    let behind = [&too_long[..], b"/../f"].concat();
    let cut = [&too_long[..], b"/."].concat();
    assert_eq!(jail(Deny).resolve(&tree, tree.dir(b""), &behind), Ok(Answer::Text(cut)));
}

#[test]
fn the_longest_text_is_served_and_a_longer_one_is_not() {
    let tree = MemoryTree::parse(b"a/b/c/d/f");
    let longest = b"x".repeat(TEXT_MAX);
    check(&jail(Deny), &tree, b"", &longest, Same);
    check(&jail(Literal), &tree, b"", &longest, Same);
    let many = [b"a/../".repeat((TEXT_MAX - 1) / 5), b"a".to_vec()].concat();
    assert_eq!(jail(Deny).resolve(&tree, tree.dir(b""), &many), Ok(Answer::Text(b"a".to_vec())));
    let slashes = [b"a".to_vec(), b"/".repeat(TEXT_MAX - 1)].concat();
    check(&jail(Deny), &tree, b"", &slashes, Same);
    for policy in [Deny, Literal] {
        check(
            &jail(policy),
            &tree,
            b"",
            &b"x".repeat(TEXT_MAX + 1),
            Fails(|| FsError::NameTooLong),
        );
    }
    // A text that is re-rooted from a base with a short path grows.
    let short = Jail { base_path: b"/b".to_vec(), ..jail(Deny) };
    let text = [&b"/b/"[..], &b"x/".repeat((TEXT_MAX - 3) / 2)].concat();
    check(&short, &tree, b"a/b/c/d", &text, Fails(|| FsError::NameTooLong));
    check(&short, &tree, b"a/b/c", &text[..100], Text(&format!("../../../{}x", "x/".repeat(48))));
}

#[test]
fn forty_links_are_followed_and_one_more_is_a_loop() {
    // The resolved link counts as the first. l1 is followed second, and l39 is the fortieth.
    let chain = |length: usize, end: &str| {
        let links: Vec<String> = (1..length).map(|i| format!("l{i}>l{}", i + 1)).collect();
        MemoryTree::parse(format!("d/e/; {}; l{length}>{end}", links.join(";")).as_bytes())
    };
    check(&jail(Deny), &chain(39, "d/e"), b"", b"l1/../..", Text("."));
    check(&jail(Deny), &chain(40, "d/e"), b"", b"l1/../..", Text("l1/."));
    check(&jail(Deny), &chain(39, "/etc"), b"", b"l1", Out("/etc"));
    // The kernel fails with ELOOP before it gets there.
    check(&jail(Deny), &chain(40, "/etc"), b"", b"l1", Same);
}

#[test]
fn a_link_in_a_removed_directory_is_not_found() {
    let mut tree = MemoryTree::parse(b"a/b/c/");
    let c = tree.dir(b"a/b/c");
    tree.take(tree.dir(b"a"));
    for target in [&b"x"[..], b"..", b"/home/u/base/x", b"/usr/bin/env"] {
        assert_eq!(jail(Deny).resolve(&tree, c, target), Err(FsError::NotFound));
    }
    assert_eq!(jail(Literal).resolve(&tree, c, b"x"), Ok(Answer::Text(b"x".to_vec())));
}

#[test]
fn an_invalid_link_on_the_way_blocks_the_path() {
    let mut tree = MemoryTree::parse(b"d/");
    tree.add(0, b"empty", Kind::Link(Vec::new()));
    tree.add(0, b"nul", Kind::Link(b"..\0".to_vec()));
    tree.add(0, b"long", Kind::Link(b"d/".repeat(TEXT_MAX)));
    for (target, served) in [
        ("empty/../d", "empty/."),
        ("nul/../d", "nul/."),
        ("long/../d", "long/."),
        ("nul/d", "nul/d"),
    ] {
        check(&jail(Deny), &tree, b"", target.as_bytes(), Text(served));
    }
}

#[test]
fn mount_point_and_base_may_contain_each_other() {
    let tree = MemoryTree::parse(b"d/x; mnt/inner; base/inner; f");
    let at = |mount: &str, base: &str| Jail {
        mount_point: mount.into(),
        base_path: base.into(),
        ..jail(Deny)
    };
    // As for `jailfs run`: the mount covers the base.
    let same = at("/w/p", "/w/p");
    check(&same, &tree, b"d", b"/w/p/f", Same);
    check(&same, &tree, b"d", b"/w/p/d/../f", Text("../f"));
    check(&same, &tree, b"d", b"/w/p2/f", Out("/w/p2/f"));
    let mount_in_base = at("/w/mnt", "/w");
    check(&mount_in_base, &tree, b"d", b"/w/mnt/f", Same);
    check(&mount_in_base, &tree, b"d", b"/w/./mnt//d/../f", Text("../f"));
    check(&mount_in_base, &tree, b"d", b"/w/f", Text("../f"));
    check(&mount_in_base, &tree, b"d", b"/w/mnt2", Text("../mnt2"));
    check(&mount_in_base, &tree, b"d", b"/w", Text(".."));
    let base_in_mount = at("/w", "/w/base");
    check(&base_in_mount, &tree, b"d", b"/w/base/inner", Same);
    check(&base_in_mount, &tree, b"d", b"/w/base/../f", Text("../f"));
    let everything = at("/", "/w");
    check(&everything, &tree, b"d", b"/", Same);
    check(&everything, &tree, b"d", b"/f", Same);
    check(&everything, &tree, b"d", b"/../f", Text("../f"));
    check(&everything, &tree, b"d", b"../f", Same);
    check(&everything, &tree, b"d", b"../../f", Out("/f"));
    let base_is_root = at("/w/mnt", "/");
    check(&base_is_root, &tree, b"d", b"/f", Text("../f"));
    check(&base_is_root, &tree, b"d", b"/w/mnt/f", Same);
}

#[test]
fn a_prefix_that_is_not_absolute_allows_nothing() {
    let tree = MemoryTree::parse(b"d/");
    let with = |prefix: &str| Jail { allowed_targets: vec![prefix.into()], ..jail(Deny) };
    for prefix in ["", ".", "usr", "/usr/../etc", "~"] {
        check(&with(prefix), &tree, b"", b"/etc/passwd", Out("/etc/passwd"));
    }
    check(&with("/"), &tree, b"", b"/etc/passwd", Same);
    check(&with("/"), &tree, b"", b"/etc/../passwd", Out("/passwd"));
    // Without a valid mount point no absolute text is inside, and nothing panics.
    let nowhere = Jail { mount_point: Vec::new(), base_path: b"rel".to_vec(), ..jail(Deny) };
    check(&nowhere, &tree, b"", b"/d", Out("/d"));
    check(&nowhere, &tree, b"", b"/rel/d", Out("/rel/d"));
    check(&nowhere, &tree, b"d", b"../d", Same);
    check(&nowhere, &tree, b"d", b"../..", Out("/"));
}

#[test]
fn an_unreadable_directory_counts_as_missing_but_a_failing_store_does_not() {
    struct Failing(FsError);
    impl Walk for Failing {
        type Dir = usize;
        fn root(&self) -> usize {
            0
        }
        fn parent(&self, _: usize) -> Option<usize> {
            None
        }
        fn lookup(&self, _: usize, _: &Name) -> FsResult<Option<NameTarget<usize>>> {
            Err(self.0.clone())
        }
    }
    for error in
        [FsError::AccessDenied, FsError::NotFound, FsError::NotADirectory, FsError::NameTooLong]
    {
        let tree = Failing(error);
        assert_eq!(jail(Deny).resolve(&tree, 0, b"a/b"), Ok(Answer::Text(b"a/b".to_vec())));
        assert_eq!(jail(Deny).resolve(&tree, 0, b"a/../b"), Ok(Answer::Text(b"a/.".to_vec())));
    }
    assert_eq!(jail(Deny).resolve(&Failing(FsError::Host(5)), 0, b"a/b"), Err(FsError::Host(5)));
}

#[test]
fn a_cycle_of_parents_is_damage() {
    struct Circle;
    impl Walk for Circle {
        type Dir = usize;
        fn root(&self) -> usize {
            0
        }
        fn parent(&self, dir: usize) -> Option<usize> {
            Some(dir)
        }
        fn lookup(&self, _: usize, _: &Name) -> FsResult<Option<NameTarget<usize>>> {
            Ok(None)
        }
    }
    assert!(matches!(jail(Deny).resolve(&Circle, 1, b"x"), Err(FsError::Damage(_))));
}

#[test]
fn the_climb_of_a_served_text_is_its_leading_dots() {
    for (text, climb) in [
        ("", 0),
        ("a/b", 0),
        (".", 0),
        ("..", 1),
        ("../", 1),
        ("./..//.././a", 2),
        ("../../../x/..", 3),
        (".../x", 0),
        ("..a", 0),
        ("/..", 0),
        ("/home/u/mnt/x", 0),
    ] {
        assert_eq!(Jail::climb(text.as_bytes()), climb, "{text}");
        assert!(!Jail::escapes_from_depth(text.as_bytes(), climb), "{text}");
        assert_eq!(
            Jail::escapes_from_depth(text.as_bytes(), climb.wrapping_sub(1)),
            climb > 0,
            "{text}"
        );
    }
}
