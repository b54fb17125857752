//! A toy of the kernel's walk follows what the resolver serves, in random trees, also while somebody changes them.
//! It asserts what the module is for: no walk ever gets out, and none ends elsewhere than in the bare directory.

use std::cell::RefCell;
use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::toy::{Kind, ROOT, Toy};
use super::{Answer, Jail, LINKS_MAX, Policy, Walks, components, host_parts};

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
    /// On the host, where nobody may come.
    Out,
    /// The bare directory cannot say: it would need the names of the host.
    Unknown,
}

#[derive(Clone, Debug)]
enum At {
    Node(usize),
    Allowed(Vec<Vec<u8>>),
}

/// How absolute texts are taken: by the kernel, or as they were meant in the bare directory.
#[derive(Clone, Copy, PartialEq)]
enum Ground {
    Kernel,
    Bare,
}

/// The walk of namei.c, without what does not matter here. `read` answers READLINK, `mischief` happens before
/// every step.
fn walk(
    jail: &Jail,
    ground: Ground,
    toy: &mut Toy,
    dir: usize,
    text: &[u8],
    mut read: impl FnMut(&Toy, usize, &[u8]) -> Result<Vec<u8>, End>,
    mut mischief: impl FnMut(&mut Toy, usize, &[u8]),
) -> End {
    let mut links = 0;
    let mut was_absolute = false;
    let mut at = At::Node(dir);
    // Reversed: the next component is the last of the last.
    let mut pending: Vec<Vec<Vec<u8>>> = Vec::new();
    let mut link = Some(text.to_vec());
    loop {
        if let (Some(stored), At::Node(dir)) = (link.take(), &at) {
            links += 1;
            if links > LINKS_MAX {
                return End::Loop;
            }
            let text = match read(toy, *dir, &stored) {
                Ok(text) => text,
                Err(end) => return end,
            };
            assert!(!text.is_empty());
            mischief(toy, *dir, b".");
            let mut parts: Vec<Vec<u8>> = components(&text).map(<[u8]>::to_vec).collect();
            if text.starts_with(b"/") {
                was_absolute = true;
                match absolute(jail, ground, &parts) {
                    Ok((start, used)) => {
                        at = start;
                        parts.drain(..used);
                    }
                    Err(end) => return end,
                }
            }
            if text.ends_with(b"/") || text.ends_with(b"/.") {
                parts.push(b".".to_vec());
            }
            parts.reverse();
            pending.push(parts);
        }
        while pending.last().is_some_and(Vec::is_empty) {
            pending.pop();
        }
        let Some(part) = pending.last_mut().and_then(Vec::pop) else {
            return match at {
                At::Node(node) => End::Node(node),
                At::Allowed(path) => End::Allowed(path),
            };
        };
        let dir = match &mut at {
            At::Allowed(_) if part == b".." => return End::Out,
            At::Allowed(path) => {
                if part != b"." {
                    path.push(part);
                }
                continue;
            }
            At::Node(dir) => *dir,
        };
        mischief(toy, dir, &part);
        if !toy.is_dir(dir) {
            return End::NotADirectory;
        }
        if part == b"." {
            continue;
        }
        if part == b".." {
            if dir == ROOT {
                // Out of an absolute text the way may lead back in, through names of the host.
                return if ground == Ground::Bare && was_absolute { End::Unknown } else { End::Out };
            }
            at = At::Node(toy.nodes[dir].parent);
            continue;
        }
        match toy.child(dir, &part) {
            None if pending.iter().all(Vec::is_empty) => return End::Missing(dir, part),
            None => return End::NoEntry,
            Some(child) => match &toy.nodes[child].kind {
                Kind::Link(stored) => link = Some(stored.clone()),
                Kind::Dir(_) | Kind::File => at = At::Node(child),
            },
        }
    }
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
    let allowed = jail.allowed_targets.iter().any(|prefix| parts.starts_with(&host_parts(prefix).unwrap()));
    if allowed { Ok((At::Allowed(parts.to_vec()), parts.len())) } else { Err(End::Out) }
}

/// The kernel's walk of the link, by what the resolver serves.
fn served(jail: &Jail) -> impl Fn(&Toy, usize, &[u8]) -> Result<Vec<u8>, End> {
    |toy, dir, stored| match jail.resolve(toy, dir, stored) {
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

fn trees() -> impl Strategy<Value = Toy> {
    vec((any::<prop::sample::Index>(), names(), made()), 1..16).prop_map(|list| {
        let mut toy = Toy::new();
        for (dir, name, made) in list {
            let dirs: Vec<usize> = (0..toy.nodes.len()).filter(|&node| toy.is_dir(node)).collect();
            let dir = *dir.get(&dirs);
            if toy.child(dir, &name).is_none() {
                toy.add(dir, &name, kind(&made));
            }
        }
        toy
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
fn starts(toy: &Toy, extra: &[u8]) -> Vec<(usize, Vec<u8>)> {
    let links = toy.nodes.iter().filter_map(|node| match &node.kind {
        Kind::Link(text) => Some((node.parent, text.clone())),
        _ => None,
    });
    let dirs = (0..toy.nodes.len()).filter(|&node| toy.is_dir(node)).map(|dir| (dir, extra.to_vec()));
    links.chain(dirs).collect()
}

/// One change that somebody makes while the kernel walks.
#[derive(Clone, Debug)]
struct Mischief {
    /// It hits the very name that the walk takes next.
    aimed: bool,
    /// Else this one.
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
    (any::<bool>(), any::<prop::sample::Index>(), names(), put).prop_map(|(aimed, dir, name, put)| Mischief {
        aimed,
        dir,
        name,
        put,
    })
}

/// How far below `top` a directory is; none if it is elsewhere or gone.
fn below(toy: &Toy, top: usize) -> impl Fn(usize) -> Option<usize> + '_ {
    move |dir| {
        let mut at = dir;
        let mut levels = 0;
        while at != top {
            if at == ROOT || toy.nodes[at].gone {
                return None;
            }
            at = toy.nodes[at].parent;
            levels += 1;
        }
        Some(levels)
    }
}

/// Makes the change, unless the marks of walks forbid it: such renames are refused. `link` stands for the one walk.
fn make(toy: &mut Toy, walks: &mut Walks<(), usize>, mischief: &Mischief, walker: usize, next: &[u8]) {
    let alive = |toy: &Toy, node: usize| below(toy, ROOT)(node).is_some();
    let dirs: Vec<usize> =
        (0..toy.nodes.len()).filter(|&node| toy.is_dir(node) && alive(toy, node)).collect();
    let aimed = mischief.aimed && toy.is_dir(walker) && alive(toy, walker) && next != b"." && next != b"..";
    let (dir, name) = if aimed { (walker, next) } else { (*mischief.dir.get(&dirs), &mischief.name[..]) };
    let moved = match &mischief.put {
        Put::Move(which) => Some(*which.get(&dirs)),
        Put::New(_) | Put::Nothing => None,
    };
    if let Some(moved) = moved {
        let allowed = walks.may_stand_at(toy.depth(dir) + 1, below(toy, moved));
        if moved == ROOT || toy.is_within(dir, moved) || !allowed {
            return;
        }
    }
    // What has the name must be empty to lose it, as rmdir(2) and rename(2) demand of a directory.
    if let Some(lost) = toy.child(dir, name) {
        if Some(lost) == moved || matches!(&toy.nodes[lost].kind, Kind::Dir(names) if !names.is_empty()) {
            return;
        }
        if toy.is_dir(lost) {
            walks.remove(lost, dir);
        }
    }
    match &mischief.put {
        Put::New(made) => {
            toy.add(dir, name, kind(made));
        }
        Put::Move(_) => {
            let Some(moved) = moved else { return };
            walks.leave(toy.nodes[moved].parent, below(toy, moved));
            toy.take(moved);
            toy.put(dir, name, moved);
        }
        Put::Nothing => {
            if let Some(child) = toy.child(dir, name) {
                toy.take(child);
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
        toy in trees(), jail in jails(), extra in texts()
    ) {
        for (dir, text) in starts(&toy, &extra) {
            let mut tree = toy.clone();
            let end = walk(&jail, Ground::Kernel, &mut tree, dir, &text, served(&jail), |_, _, _| ());
            prop_assert_ne!(&end, &End::Out, "{} in {}", text.escape_ascii(), dir);
            let literal = |_: &Toy, _, stored: &[u8]| Ok(stored.to_vec());
            let bare = walk(&jail, Ground::Bare, &mut tree, dir, &text, literal, |_, _, _| ());
            match bare {
                End::Loop | End::Unknown => {}
                End::Out => prop_assert_eq!(&end, &End::Refused, "{} in {}", text.escape_ascii(), dir),
                bare => prop_assert_eq!(&end, &bare, "{} in {}", text.escape_ascii(), dir),
            }
        }
    }

    #[test]
    fn a_walk_with_old_answers_never_gets_out(
        toy in trees(), jail in jails(), extra in texts(), changes in vec(mischiefs(), 1..24)
    ) {
        for (dir, text) in starts(&toy, &extra) {
            for late in 0..3 {
                let mut tree = toy.clone();
                let walks = RefCell::new(Walks::default());
                let mut changes = changes.iter();
                let mut step = 0;
                let mischief = |tree: &mut Toy, walker: usize, next: &[u8]| {
                    step += 1;
                    // While the directory is gone nothing is served for a link in it, and nothing asked.
                    if step > late && let Some(change) = changes.next() {
                        make(tree, &mut walks.borrow_mut(), change, walker, next);
                    }
                };
                let read = |toy: &Toy, dir: usize, stored: &[u8]| {
                    let answer = served(&jail)(toy, dir, stored);
                    if let Ok(text) = &answer {
                        walks.borrow_mut().serve((), dir, Jail::climb(text));
                    }
                    answer
                };
                let end = walk(&jail, Ground::Kernel, &mut tree, dir, &text, read, mischief);
                prop_assert_ne!(end, End::Out, "{} in {}", text.escape_ascii(), dir);
            }
        }
    }
}

/// The toy would notice: with the texts as stored, walks do get out.
#[test]
fn the_toy_kernel_gets_out_by_literal_texts() {
    let jail = Jail { policy: Policy::Literal, ..jail() };
    let mut toy = Toy::parse(b"d/e/");
    for text in [&b".."[..], b"d/../..", b"/etc", b"d/e/../../../x"] {
        let end = walk(&jail, Ground::Kernel, &mut toy, ROOT, text, served(&jail), |_, _, _| ());
        assert_eq!(end, End::Out, "{}", text.escape_ascii());
    }
    // A middle name swapped for a link between answer and walk.
    let mut toy = Toy::parse(b"d/e/");
    let swap = |toy: &mut Toy, _: usize, _: &[u8]| {
        toy.add(toy.dir(b"d"), b"e", Kind::Link(b"/m/t".to_vec()));
    };
    let end = walk(&jail, Ground::Kernel, &mut toy, ROOT, b"d/e/../..", served(&jail), swap);
    assert_eq!(end, End::Out);
}

/// The guard on renames is needed: without it an old answer climbs out of a directory that has moved up.
#[test]
fn a_directory_that_moves_up_under_a_walk_is_what_the_guard_on_renames_is_for() {
    let jail = jail();
    let mut toy = Toy::parse(b"d/e/");
    let e = toy.dir(b"d/e");
    let up = |toy: &mut Toy, _: usize, _: &[u8]| {
        if toy.depth(e) == 2 {
            toy.take(e);
            toy.put(ROOT, b"e", e);
        }
    };
    let end = walk(&jail, Ground::Kernel, &mut toy, e, b"../../x", served(&jail), up);
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
