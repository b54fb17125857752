//! Property tests: a model of the kernel's path walk follows the served texts, in random trees and
//! while the tree changes. No walk ever gets out, and each ends where it would in the bare
//! directory.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::memory_tree::{Kind, MemoryTree, ROOT};
use super::{Answer, ClimbGuard, Jail, LINKS_MAX, Policy, components, host_parts};

/// How a walk ends.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Node(usize),
    /// The last name is missing: O_CREAT would make it here.
    Missing(usize, Vec<u8>),
    NoEntry,
    NotADirectory,
    Loop,
    Refused,
    /// On the host, where it is allowed.
    Allowed(Vec<Vec<u8>>),
    /// On the host, outside every allowed prefix.
    Out,
    /// The bare directory cannot tell: the outcome depends on names of the host.
    Unknown,
}

#[derive(Clone, Debug)]
enum At {
    Node(usize),
    Allowed(Vec<Vec<u8>>),
}

/// How absolute texts are resolved: by the kernel, or as they were meant in the bare directory.
#[derive(Clone, Copy, PartialEq)]
enum Ground {
    Kernel,
    Bare,
}

impl End {
    fn at(at: At) -> End {
        match at {
            At::Node(node) => End::Node(node),
            At::Allowed(path) => End::Allowed(path),
        }
    }
}

/// The path walk of namei.c, reduced to what matters here. `read` answers READLINK; `mischief` runs
/// before every step.
fn walk(
    jail: &Jail,
    ground: Ground,
    tree: &mut MemoryTree,
    dir: usize,
    text: &[u8],
    read: impl FnMut(&MemoryTree, usize, &[u8]) -> Result<Vec<u8>, End>,
    mischief: impl FnMut(&mut MemoryTree, usize, &[u8]),
) -> End {
    walk_to_end(jail, ground, tree, dir, text, read, mischief).unwrap_or_else(|end| end)
}

fn walk_to_end(
    jail: &Jail,
    ground: Ground,
    tree: &mut MemoryTree,
    dir: usize,
    text: &[u8],
    mut read: impl FnMut(&MemoryTree, usize, &[u8]) -> Result<Vec<u8>, End>,
    mut mischief: impl FnMut(&mut MemoryTree, usize, &[u8]),
) -> Result<End, End> {
    let (mut links, mut was_absolute) = (0, false);
    let mut at = At::Node(dir);
    // Each list is reversed: the next component is the last of the last list.
    let mut pending: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut link = Some(text.to_vec());
    loop {
        if let (Some(stored), At::Node(dir)) = (link.take(), &at) {
            links += 1;
            if links > LINKS_MAX {
                return Err(End::Loop);
            }
            let text = read(tree, *dir, &stored)?;
            assert!(!text.is_empty());
            mischief(tree, *dir, b".");
            was_absolute |= text.starts_with(b"/");
            pending.push(begin_text(jail, ground, &mut at, &text)?);
        }
        let Some(part) = next_component(&mut pending) else { return Ok(End::at(at)) };
        let dir = match &mut at {
            At::Allowed(_) if part == b".." => return Err(End::Out),
            At::Allowed(path) => {
                if part != b"." {
                    path.push(part);
                }
                continue;
            }
            At::Node(dir) => *dir,
        };
        mischief(tree, dir, &part);
        match &*part {
            _ if !tree.is_dir(dir) => return Err(End::NotADirectory),
            b"." => continue,
            _ => {}
        }
        if part == b".." && dir == ROOT {
            // An absolute text that leads out may lead back in, through names of the host.
            let may_return = ground == Ground::Bare && was_absolute;
            return Err(if may_return { End::Unknown } else { End::Out });
        }
        if part == b".." {
            at = At::Node(tree.nodes[dir].parent);
            continue;
        }
        match tree.child(dir, &part) {
            None if pending.iter().all(Vec::is_empty) => return Err(End::Missing(dir, part)),
            None => return Err(End::NoEntry),
            Some(child) => match &tree.nodes[child].kind {
                Kind::Link(stored) => link = Some(stored.clone()),
                Kind::Dir(_) | Kind::File => at = At::Node(child),
            },
        }
    }
}

/// Begins to walk a text: moves `at` if it is absolute. Returns the components, reversed.
fn begin_text(jail: &Jail, ground: Ground, at: &mut At, text: &[u8]) -> Result<Vec<Vec<u8>>, End> {
    let mut parts: Vec<Vec<u8>> = components(text).map(<[u8]>::to_vec).collect();
    if text.starts_with(b"/") {
        let (start, used) = absolute(jail, ground, &parts)?;
        *at = start;
        parts.drain(..used);
    }
    if text.ends_with(b"/") || text.ends_with(b"/.") {
        parts.push(b".".to_vec());
    }
    parts.reverse();
    Ok(parts)
}

/// Takes the next component from the last text that has any.
fn next_component(pending: &mut Vec<Vec<Vec<u8>>>) -> Option<Vec<u8>> {
    while pending.last().is_some_and(Vec::is_empty) {
        pending.pop();
    }
    pending.last_mut().and_then(Vec::pop)
}

/// Where an absolute text begins, and how many components that takes.
fn absolute(jail: &Jail, ground: Ground, parts: &[Vec<u8>]) -> Result<(At, usize), End> {
    let mount = host_parts(&jail.mount_point).unwrap();
    let base = host_parts(&jail.base_path).unwrap();
    if parts.starts_with(&mount) {
        return Ok((At::Node(ROOT), mount.len()));
    }
    if ground == Ground::Bare && parts.starts_with(&base) {
        return Ok((At::Node(ROOT), base.len()));
    }
    if parts.iter().any(|part| part == b"..") {
        return Err(if ground == Ground::Kernel { End::Out } else { End::Unknown });
    }
    let allowed =
        jail.allowed_targets.iter().any(|prefix| parts.starts_with(&host_parts(prefix).unwrap()));
    if allowed { Ok((At::Allowed(parts.to_vec()), parts.len())) } else { Err(End::Out) }
}

/// Answers READLINK as the resolver does.
fn served(jail: &Jail) -> impl Fn(&MemoryTree, usize, &[u8]) -> Result<Vec<u8>, End> {
    |tree, dir, stored| match jail.resolve(tree, dir, stored) {
        Ok(Answer::Text(text)) => Ok(text),
        Ok(Answer::Escapes { .. }) => Err(End::Refused),
        Err(_) => Err(End::NoEntry),
    }
}

#[derive(Clone, Debug)]
enum Made {
    Dir,
    File,
    Link(Vec<u8>),
}

fn names() -> impl Strategy<Value = Vec<u8>> {
    prop::sample::select(vec![b"a".to_vec(), b"b".to_vec(), b"c".to_vec()])
}

fn texts() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        8 => names(),
        6 => Just(b"..".to_vec()),
        1 => Just(b".".to_vec()),
        1 => Just(Vec::new()),
        1 => Just(b"gone".to_vec()),
    ];
    let head = prop::sample::select(vec![
        "",
        "",
        "",
        "",
        "",
        "",
        "",
        "",
        "../",
        "../../",
        "/m/t/",
        "/m/t/",
        "/b/s/",
        "/m/",
        "/m/../m/t/",
        "/m/t/../t/",
        "/x/",
        "/x/y",
        "/",
    ]);
    (head, vec(part, 1..7)).prop_filter_map("empty", |(head, parts)| {
        let text = [head.as_bytes(), &parts.join(&b'/')].concat();
        (!text.is_empty()).then_some(text)
    })
}

fn made() -> impl Strategy<Value = Made> {
    prop_oneof![3 => Just(Made::Dir), 1 => Just(Made::File), 4 => texts().prop_map(Made::Link)]
}

fn kind(made: &Made) -> Kind {
    match made {
        Made::Dir => Kind::Dir(BTreeMap::new()),
        Made::File => Kind::File,
        Made::Link(text) => Kind::Link(text.clone()),
    }
}

fn trees() -> impl Strategy<Value = MemoryTree> {
    vec((any::<prop::sample::Index>(), names(), made()), 1..16).prop_map(|list| {
        let mut tree = MemoryTree::new();
        for (dir, name, made) in list {
            let dirs: Vec<usize> =
                (0..tree.nodes.len()).filter(|&node| tree.is_dir(node)).collect();
            let dir = *dir.get(&dirs);
            if tree.child(dir, &name).is_none() {
                tree.add(dir, &name, kind(&made));
            }
        }
        tree
    })
}

fn jails() -> impl Strategy<Value = Jail> {
    let policy = prop::sample::select(vec![Policy::Deny, Policy::Show, Policy::Rewrite]);
    let paths = prop::sample::select(vec![
        ("/m/t", "/b/s"),
        ("/m/t", "/m/t"),
        ("/m/t", "/m"),
        ("/m", "/m/t"),
        ("/m/t/a", "/m/t"),
        ("/m/t", "/m/t2"),
    ]);
    (policy, paths, any::<bool>()).prop_map(|(policy, (mount, base), allow)| Jail {
        policy,
        mount_point: mount.into(),
        base_path: base.into(),
        allowed_targets: if allow { vec![b"/x".to_vec()] } else { Vec::new() },
    })
}

/// Every link of the tree with its directory, and one more text in every directory.
fn starts(tree: &MemoryTree, extra: &[u8]) -> Vec<(usize, Vec<u8>)> {
    let links = tree.nodes.iter().filter_map(|node| match &node.kind {
        Kind::Link(text) => Some((node.parent, text.clone())),
        _ => None,
    });
    let dirs =
        (0..tree.nodes.len()).filter(|&node| tree.is_dir(node)).map(|dir| (dir, extra.to_vec()));
    links.chain(dirs).collect()
}

/// One change by another process during the kernel's walk.
#[derive(Clone, Debug)]
struct Mischief {
    /// It hits the very name that the walk takes next.
    aimed: bool,
    /// Otherwise, this directory and name.
    dir: prop::sample::Index,
    name: Vec<u8>,
    put: Put,
}

#[derive(Clone, Debug)]
enum Put {
    /// A new node takes the name.
    New(Made),
    /// A directory moves there.
    Move(prop::sample::Index),
    /// The name is removed.
    Nothing,
}

fn mischiefs() -> impl Strategy<Value = Mischief> {
    let up = prop::sample::select(vec!["..", "../..", "/m/t", "/b/s", "."]);
    let put = prop_oneof![
        4 => up.prop_map(|text| Put::New(Made::Link(text.into()))),
        4 => made().prop_map(Put::New),
        3 => any::<prop::sample::Index>().prop_map(Put::Move),
        1 => Just(Put::Nothing),
    ];
    (any::<bool>(), any::<prop::sample::Index>(), names(), put)
        .prop_map(|(aimed, dir, name, put)| Mischief { aimed, dir, name, put })
}

/// How many levels a directory is below `top`; `None` if it is elsewhere or removed.
fn below(tree: &MemoryTree, top: usize) -> impl Fn(usize) -> Option<usize> + '_ {
    move |dir| {
        let mut at = dir;
        let mut levels = 0;
        while at != top {
            if at == ROOT || tree.nodes[at].gone {
                return None;
            }
            at = tree.nodes[at].parent;
            levels += 1;
        }
        Some(levels)
    }
}

/// Makes the change, unless the guard refuses it as a rename. `()` stands for the one link.
fn make(
    tree: &mut MemoryTree,
    guard: &mut ClimbGuard<(), usize>,
    mischief: &Mischief,
    walker: usize,
    next: &[u8],
) {
    let alive = |tree: &MemoryTree, node: usize| below(tree, ROOT)(node).is_some();
    let dirs: Vec<usize> =
        (0..tree.nodes.len()).filter(|&node| tree.is_dir(node) && alive(tree, node)).collect();
    let aimed = mischief.aimed
        && tree.is_dir(walker)
        && alive(tree, walker)
        && next != b"."
        && next != b"..";
    let (dir, name) =
        if aimed { (walker, next) } else { (*mischief.dir.get(&dirs), &mischief.name[..]) };
    let moved = match &mischief.put {
        Put::Move(which) => Some(*which.get(&dirs)),
        Put::New(_) | Put::Nothing => None,
    };
    if let Some(moved) = moved {
        let allowed = guard.may_stand_at(tree.depth(dir) + 1, below(tree, moved));
        if moved == ROOT || tree.is_within(dir, moved) || !allowed {
            return;
        }
    }
    // A replaced directory must be empty, as for rmdir(2) and rename(2).
    if let Some(lost) = tree.child(dir, name) {
        if Some(lost) == moved
            || matches!(&tree.nodes[lost].kind, Kind::Dir(names) if !names.is_empty())
        {
            return;
        }
        if tree.is_dir(lost) {
            guard.remove(lost, dir);
        }
    }
    match &mischief.put {
        Put::New(made) => {
            tree.add(dir, name, kind(made));
        }
        Put::Move(_) => {
            let Some(moved) = moved else { return };
            guard.leave(tree.nodes[moved].parent, below(tree, moved));
            tree.take(moved);
            tree.put(dir, name, moved);
        }
        Put::Nothing => {
            if let Some(child) = tree.child(dir, name) {
                tree.take(child);
            }
        }
    }
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_kernel_never_gets_out_and_ends_where_the_bare_directory_does(
        tree in trees(), jail in jails(), extra in texts()
    ) {
        for (dir, text) in starts(&tree, &extra) {
            let mut tree = tree.clone();
            let shown = format!("{} in {dir}", text.escape_ascii());
            let served = served(&jail);
            let end = walk(&jail, Ground::Kernel, &mut tree, dir, &text, served, |_, _, _| ());
            prop_assert_ne!(&end, &End::Out, "{}", shown);
            let literal = |_: &MemoryTree, _, stored: &[u8]| Ok(stored.to_vec());
            let bare = walk(&jail, Ground::Bare, &mut tree, dir, &text, literal, |_, _, _| ());
            match bare {
                End::Loop | End::Unknown => {}
                End::Out => prop_assert_eq!(&end, &End::Refused, "{}", shown),
                bare => prop_assert_eq!(&end, &bare, "{}", shown),
            }
        }
    }

    #[test]
    fn a_walk_with_old_answers_never_gets_out(
        tree in trees(), jail in jails(), extra in texts(), changes in vec(mischiefs(), 1..24)
    ) {
        for (dir, text) in starts(&tree, &extra) {
            for late in 0..3 {
                let mut tree = tree.clone();
                let guard = RefCell::new(ClimbGuard::default());
                let mut changes = changes.iter();
                let mut step = 0;
                let mischief = |tree: &mut MemoryTree, walker: usize, next: &[u8]| {
                    step += 1;
                    // In a removed directory no READLINK is sent and no text served.
                    if step > late && let Some(change) = changes.next() {
                        make(tree, &mut guard.borrow_mut(), change, walker, next);
                    }
                };
                let read = |tree: &MemoryTree, dir: usize, stored: &[u8]| {
                    let answer = served(&jail)(tree, dir, stored);
                    if let Ok(text) = &answer {
                        guard.borrow_mut().serve((), dir, Jail::climb(text));
                    }
                    answer
                };
                let end = walk(&jail, Ground::Kernel, &mut tree, dir, &text, read, mischief);
                prop_assert_ne!(end, End::Out, "{} in {}", text.escape_ascii(), dir);
            }
        }
    }
}

/// Checks the model itself: with the stored texts, walks do get out.
#[test]
fn the_model_gets_out_by_literal_texts() {
    let jail = Jail { policy: Policy::Literal, ..jail() };
    let mut tree = MemoryTree::parse(b"d/e/");
    for text in [&b".."[..], b"d/../..", b"/etc", b"d/e/../../../x"] {
        let end = walk(&jail, Ground::Kernel, &mut tree, ROOT, text, served(&jail), |_, _, _| ());
        assert_eq!(end, End::Out, "{}", text.escape_ascii());
    }
    // A name in the middle is replaced by a link between the reply and the walk.
    let mut tree = MemoryTree::parse(b"d/e/");
    let swap = |tree: &mut MemoryTree, _: usize, _: &[u8]| {
        tree.add(tree.dir(b"d"), b"e", Kind::Link(b"/m/t".to_vec()));
    };
    let end = walk(&jail, Ground::Kernel, &mut tree, ROOT, b"d/e/../..", served(&jail), swap);
    assert_eq!(end, End::Out);
}

/// The guard is needed: without it, an old reply climbs out of a directory that has moved up.
#[test]
fn without_the_guard_a_walk_climbs_out_of_a_directory_that_moves_up() {
    let jail = jail();
    let mut tree = MemoryTree::parse(b"d/e/");
    let e = tree.dir(b"d/e");
    let up = |tree: &mut MemoryTree, _: usize, _: &[u8]| {
        if tree.depth(e) == 2 {
            tree.take(e);
            tree.put(ROOT, b"e", e);
        }
    };
    let end = walk(&jail, Ground::Kernel, &mut tree, e, b"../../x", served(&jail), up);
    assert_eq!(end, End::Out);
    assert!(Jail::escapes_from_depth(b"../../x", 1) && !Jail::escapes_from_depth(b"../../x", 2));
}

fn jail() -> Jail {
    Jail {
        policy: Policy::Deny,
        mount_point: b"/m/t".to_vec(),
        base_path: b"/b/s".to_vec(),
        allowed_targets: Vec::new(),
    }
}
