//! Random requests for a bounded time: each gets one answer, and the server goes on.

use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, TestRunner};

use crate::common::raw::{
    BATCH_FORGET, Body, DESTROY, FALLOCATE, FORGET, GETXATTR, LINK, LISTXATTR, LOOKUP, LSEEK,
    MKDIR, MKNOD, READ, READDIR, READLINK, RENAME, RENAME2, RMDIR, ROOT, Raw, SETATTR, SETXATTR,
    SYMLINK, UNLINK, WRITE,
};

/// How long each property runs.
const TIME: Duration = Duration::from_secs(5);
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A node: an existing one, or any number.
fn node() -> impl Strategy<Value = usize> {
    0_usize..12
}

fn number() -> impl Strategy<Value = u64> {
    let edge = prop_oneof![
        Just(0),
        Just(1),
        Just(4095),
        Just(4096),
        Just((1 << 44) - 4096),
        Just(u64::MAX)
    ];
    prop_oneof![edge, 0_u64..100_000, any::<u64>(), Just(i64::MAX as u64), Just(1 << 63)]
}

fn name() -> impl Strategy<Value = Vec<u8>> {
    let usual =
        proptest::sample::select(vec!["a", "b", "c", "d", "e"]).prop_map(|name| name.into());
    let any_bytes = proptest::collection::vec(any::<u8>(), 0..300);
    prop_oneof![8 => usual, 1 => any_bytes, 1 => Just(b"..".to_vec()), 1 => Just(b"a/b".to_vec())]
}

/// A request with all its fields, with any content.
#[derive(Clone, Debug)]
struct Shaped {
    opcode: u32,
    node: usize,
    other: usize,
    numbers: [u64; 3],
    names: [Vec<u8>; 2],
    bytes: Vec<u8>,
}

fn shaped() -> impl Strategy<Value = Shaped> {
    let opcodes = vec![
        LOOKUP, SETATTR, READLINK, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, RENAME2, LINK,
        READ, WRITE, SETXATTR, GETXATTR, LISTXATTR, READDIR, FALLOCATE, LSEEK, FORGET,
    ];
    let opcode = proptest::sample::select(opcodes);
    let bytes = proptest::collection::vec(any::<u8>(), 0..2000);
    (opcode, node(), node(), [number(), number(), number()], [name(), name()], bytes).prop_map(
        |(opcode, node, other, numbers, names, bytes)| Shaped {
            opcode,
            node,
            other,
            numbers,
            names,
            bytes,
        },
    )
}

/// The body of a request, whole.
fn body_of(shaped: &Shaped, nodes: &[u64]) -> Body {
    let Shaped { numbers: [a, b, c], names: [name, other_name], bytes, .. } = shaped;
    let other = nodes.get(shaped.other).copied().unwrap_or(*c);
    let new = Body::new;
    let len = u32::try_from(bytes.len()).unwrap();
    match shaped.opcode {
        LOOKUP | UNLINK | RMDIR => new().name(name),
        SETATTR => {
            let times = new().u64(*b).u64(*c).u64(*a).u32(*a as u32).u32(*b as u32);
            let head = new().u32(*a as u32).u32(0).u64(0).u64(*b).u64(*c).bytes(&times.0);
            head.u32(0).u32(*b as u32).u32(0).u32(*c as u32).u32(*b as u32).u32(0)
        }
        SYMLINK => new().name(name).name(other_name),
        MKNOD => new().u32(*a as u32).u32(*b as u32).u32(*c as u32).u32(0).name(name),
        MKDIR => new().u32(*a as u32).u32(*b as u32).name(name),
        RENAME => new().u64(other).name(name).name(other_name),
        RENAME2 => new().u64(other).u32(*a as u32 % 5).u32(0).name(name).name(other_name),
        LINK => new().u64(other).name(name),
        READ | READDIR => new().u64(*a).u64(*b).u32(*c as u32).u32(*a as u32).u64(*b).u32(0).u32(0),
        WRITE => new().u64(*a).u64(*b).u32(len).u32(*a as u32).u64(*c).u32(0).u32(0).bytes(bytes),
        SETXATTR => {
            let name: Vec<u8> = name.iter().copied().filter(|byte| *byte != 0).collect();
            let (flags, more) = (*a as u32 % 4, *b as u32);
            let head = new().u32(len).u32(flags).u32(more).u32(0);
            head.name(&[b"user.", &*name].concat()).bytes(bytes)
        }
        GETXATTR => new().u32(*a as u32).u32(0).name(&[b"user.", &**name].concat()),
        LISTXATTR => new().u32(*a as u32).u32(0),
        FALLOCATE => new().u64(*a).u64(*b).u64(*c).u32(*a as u32 % 20).u32(0),
        LSEEK => new().u64(*a).u64(*b).u32(*c as u32 % 6).u32(0),
        FORGET => new().u64(a % 3),
        _ => new(),
    }
}

/// Sends random requests until the time is over. Returns their number.
fn ask_at_random<T: std::fmt::Debug>(
    raw: &mut Raw,
    requests: impl Strategy<Value = T>,
    mut ask: impl FnMut(&mut Raw, &T, &mut Vec<u64>),
) -> usize {
    let mut runner = TestRunner::new(Config::default());
    let (end, mut asked) = (Instant::now() + TIME, 0);
    let mut nodes = vec![ROOT];
    while Instant::now() < end {
        let request = requests.new_tree(&mut runner).unwrap().current();
        ask(raw, &request, &mut nodes);
        asked += 1;
    }
    asked
}

/// Sends a request; every request except FORGET must get an answer.
fn exchange(raw: &mut Raw, opcode: u32, node: u64, body: &Body, nodes: &mut Vec<u64>) {
    let unique = raw.send(opcode, node, body);
    if opcode == FORGET {
        return;
    }
    let answer =
        raw.answer(PATIENCE).unwrap_or_else(|| panic!("no answer to {opcode} {node} {body:?}"));
    assert_eq!(answer.unique, unique, "{opcode} {node} {body:?}");
    assert!((0..512).contains(&answer.errno), "{opcode} {node} {body:?}: {}", answer.errno);
    // Later requests use the nodes that were handed out.
    let hands_out = matches!(opcode, LOOKUP | MKNOD | MKDIR | SYMLINK | LINK);
    if let (true, 0, Some(id)) = (hands_out, answer.errno, answer.body.first_chunk::<8>()) {
        let id = u64::from_ne_bytes(*id);
        if id != 0 && !nodes.contains(&id) {
            if nodes.len() >= 10 {
                nodes.remove(1);
            }
            nodes.push(id);
        }
    }
}

#[test]
fn requests_with_random_fields_get_answers() {
    let mut raw = Raw::over(|base| {
        std::fs::create_dir(base.join("a")).unwrap();
        std::fs::write(base.join("a/b"), vec![3; 50_000]).unwrap();
        std::fs::write(base.join("c"), "of the base").unwrap();
    });
    let asked = ask_at_random(&mut raw, shaped(), |raw, request, nodes| {
        let node = nodes.get(request.node).copied().unwrap_or(request.numbers[2]);
        exchange(raw, request.opcode, node, &body_of(request, nodes), nodes);
    });
    assert!(asked > 20, "{asked}");
    raw.still_serves();
    raw.end().unwrap();
}

#[test]
fn requests_of_random_bytes_get_answers() {
    let mut raw = Raw::over(|base| std::fs::write(base.join("a"), "of the base").unwrap());
    // Without the request that ends the session, and those that have no answer.
    let excluded = [DESTROY, FORGET, BATCH_FORGET];
    let opcode = prop_oneof![9 => 0_u32..60, 1 => any::<u32>()]
        .prop_filter("no end", move |opcode| !excluded.contains(opcode));
    let bytes = proptest::collection::vec(prop_oneof![Just(0), any::<u8>()], 0..200);
    let asked =
        ask_at_random(&mut raw, (opcode, node(), any::<u64>(), bytes), |raw, request, nodes| {
            let (opcode, node, any_node, bytes) = request;
            let node = nodes.get(*node).copied().unwrap_or(*any_node);
            exchange(raw, *opcode, node, &Body(bytes.clone()), nodes);
        });
    assert!(asked > 20, "{asked}");
    raw.still_serves();
    raw.end().unwrap();
}
