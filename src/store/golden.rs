//! Checks the encoded bytes of every variant of every record.
//!
//! Later versions must open a store that was written once. So a line here never changes, and a new
//! variant is a new line at the end of its table.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::archive::{ChunkRef, Digest};
use super::archived::{Block, RootRecord, StoredContent};
use super::format::BaseRecord;
use super::ledger::{LedgerRecord, Lowered};
use super::record::*;
use super::volatile::VolatileRecord;
use crate::store::content::checksums::ChecksumsRecord;
use crate::store::content::remap::{PackedRun, RemapRecord};
use crate::store::edits_log::{Bounds, Content, EditsLogRecord, How, LoggedEdit};
use crate::store::io::codec::{decode, encode};
use crate::store::io::writer::Writer;
use crate::tree::{Body, Dentry, Edit, Meta, Node, Origin, Source};
use crate::types::{
    BaseMark, ByteRange, Epoch, Fingerprint, Ino, LayerId, Name, Timestamp, TreePath,
};

const SEVEN: Writer = Writer::new([7; 16], u64::from_le_bytes([7; 8]));

const T: Timestamp = Timestamp { secs: -2, nanos: 5 };

fn name() -> Name {
    Name::new(b"n\xff").unwrap()
}

fn path() -> TreePath {
    TreePath::parse(b"a/b").unwrap()
}

fn print() -> Fingerprint {
    Fingerprint { dev: 1, ino: 2, size: 3, mtime: T, ctime: T }
}

fn meta() -> Meta {
    Meta { mode: 0o100_644, uid: 1000, gid: 100, nlink: 1, rdev: 0, atime: T, mtime: T, ctime: T }
}

fn node(body: Body) -> Node {
    let xattrs = BTreeMap::from([(b"user.x".to_vec(), b"v".to_vec())]);
    Node { meta: meta(), xattrs: Some(Arc::new(xattrs)), body }
}

fn file() -> Body {
    Body::File { size: 300, origin: Some(Arc::new(Origin { path: path(), print: print() })) }
}

/// Compares the encoding of values with golden bytes, both ways.
fn check<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(rows: &[(T, &str)]) {
    let mut wrong = Vec::new();
    for (value, golden) in rows {
        let bytes = encode(value).unwrap();
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        if hex != *golden {
            wrong.push(format!("{value:?}\n  is      {hex}\n  must be {golden}"));
        }
        assert_eq!(&decode::<T>(&bytes).unwrap(), value);
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn headers_of_a_journal() {
    let header = Header {
        layer: LayerId(7),
        parent: Some(LayerId(6)),
        head: "main".into(),
        epoch: Epoch(1),
        kind: LayerKind::Continues,
        time: T,
    };
    check(&[
        (Record::Header(header.clone()), "00070106046d61696e01000305"),
        (
            Record::Header(Header { parent: None, kind: LayerKind::Branches, ..header.clone() }),
            "000700046d61696e01010305",
        ),
        (
            Record::Header(Header { kind: LayerKind::PreImage, ..header.clone() }),
            "00070106046d61696e01020305",
        ),
        (
            Record::Header(Header { kind: LayerKind::Collected, ..header.clone() }),
            "00070106046d61696e01030305",
        ),
        (
            Record::Header(Header { parent: None, kind: LayerKind::Rebased(LayerId(5)), ..header }),
            "000700046d61696e0104050305",
        ),
    ]);
}

const INO: Ino = Ino(1 << 48);

fn pooled() -> Source {
    Source::Pool { layer: LayerId(9), offset: 4096 }
}

fn edits(edit: Edit) -> Record {
    Record::Edits(vec![edit])
}

#[test]
fn node_edits_of_a_journal() {
    let ino = INO;
    check(&[
        (
            edits(Edit::Put { ino, node: Box::new(node(file())) }),
            "020100fd0000000000000100fba481fbe803640100030503050305010106757365722e78017600fb\
             2c010103612f6201020303050305",
        ),
        (
            edits(Edit::Put { ino, node: Box::new(node(Body::Dir { base: Some(path()) })) }),
            "020100fd0000000000000100fba481fbe803640100030503050305010106757365722e7801760101\
             03612f62",
        ),
        (
            edits(Edit::Put {
                ino,
                node: Box::new(node(Body::Symlink { target: b"../x".to_vec() })),
            }),
            "020100fd0000000000000100fba481fbe803640100030503050305010106757365722e7801760204\
             2e2e2f78",
        ),
        (
            edits(Edit::Put { ino, node: Box::new(node(Body::Special)) }),
            "020100fd0000000000000100fba481fbe803640100030503050305010106757365722e78017603",
        ),
        (
            edits(Edit::Meta { ino, meta: meta() }),
            "020101fd0000000000000100fba481fbe803640100030503050305",
        ),
        (
            edits(Edit::Xattr { ino, name: b"user.x".to_vec(), value: Some(b"v".to_vec()) }),
            "020102fd000000000000010006757365722e78010176",
        ),
        (edits(Edit::Remove { ino }), "020106fd0000000000000100"),
    ]);
}

#[test]
fn extent_and_dentry_edits_of_a_journal() {
    let ino = INO;
    check(&[
        (edits(Edit::Resize { ino, size: 1 << 40 }), "020103fd0000000000000100fd0000000000010000"),
        (
            edits(Edit::Map { ino, range: ByteRange::at(4096, 4096), to: Some(pooled()) }),
            "020104fd0000000000000100fb0010fb0020010009fb0010",
        ),
        (
            edits(Edit::Map {
                ino,
                range: ByteRange::at(0, 1),
                to: Some(Source::Base { offset: 70_000 }),
            }),
            "020104fd000000000000010000010101fc70110100",
        ),
        (
            edits(Edit::Map { ino, range: ByteRange::at(0, 1), to: None }),
            "020104fd0000000000000100000100",
        ),
        (
            edits(Edit::Dentry {
                dir: Ino::ROOT,
                name: name(),
                to: Some(Dentry::Child { ino, hides: Some(Arc::new(print())) }),
            }),
            "02010501026eff0100fd00000000000001000101020303050305",
        ),
        (
            edits(Edit::Dentry {
                dir: Ino::ROOT,
                name: name(),
                to: Some(Dentry::Whiteout(Arc::new(print()))),
            }),
            "02010501026eff010101020303050305",
        ),
        (edits(Edit::Dentry { dir: Ino::ROOT, name: name(), to: None }), "02010501026eff00"),
    ]);
}

#[test]
fn other_records_of_a_journal() {
    let seal = Seal { name: Some("green".into()), message: "m".into(), time: T, automatic: false };
    let image = |node| PreImage { path: path(), node };
    let pre = PreNode {
        ino: Ino(5),
        host: 5,
        node: node(file()),
        extents: vec![(ByteRange::at(0, 300), pooled())],
    };
    check(&[
        (Record::Opened { writer: SEVEN }, "0107070707070707070707070707070707"),
        (Record::Synced, "03"),
        (Record::Seal(seal.clone()), "040105677265656e016d030500"),
        (Record::PreImage(image(None)), "0503612f6200"),
        (
            Record::PreImage(image(Some(pre))),
            "0503612f62010505fba481fbe803640100030503050305010106757365722e78017600fb2c010103\
             612f62010203030503050100fb2c010009fb0010",
        ),
        (Record::Left(Left { path: path(), print: Some(print()) }), "0603612f620101020303050305"),
        (Record::Abandoned, "07"),
        (Record::SyncedTo(300), "08fb2c01"),
        (Record::Compact, "09"),
        (Record::SyncFailed(300), "0afb2c01"),
        (Record::Redo(vec![PoolBytes { at: 4096, bytes: b"abc".to_vec() }]), "0b01fb001003616263"),
        (Record::Sealing(seal), "0c0105677265656e016d030500"),
    ]);
}

#[test]
fn records_of_the_other_files() {
    check(&[
        (ChecksumsRecord::Blocks { first: 300, sums: vec![1, 70_000] }, "00fb2c010201fc70110100"),
        (ChecksumsRecord::End, "01"),
        (ChecksumsRecord::Remapped(vec![ByteRange { start: 5, end: 300 }]), "020105fb2c01"),
    ]);
    let run = PackedRun { gap: 4096, len: 300, layer: LayerId(7), shift: -3 };
    check(&[(RemapRecord::Runs(vec![run]), "0001fb0010fb2c010705"), (RemapRecord::End, "01")]);
    let chunk = ChunkRef { digest: Digest([7; 32]), len: 300 };
    let root =
        RootRecord { next_layer: 9, packs: vec![Digest([8; 32])], blocks: vec![vec![chunk]] };
    let (pack, digest) = ("08".repeat(32), "07".repeat(32));
    check(&[(root, &*format!("0901{pack}0101{digest}fb2c01"))]);
    let content = StoredContent { ranges: vec![(4096, 300)], chunks: vec![chunk] };
    let block = Block {
        layers: vec![LayerId(7), LayerId(300)],
        ends: vec![0, 8192],
        journals: vec![vec![1], vec![2, 3]],
        maps: vec![None, Some(vec![4])],
        contents: vec![StoredContent::default(), content],
    };
    let bytes = "0207fb2c010200fb0020020101020203020001010402000001fb0010fb2c0101";
    check(&[(block, &*format!("{bytes}{digest}fb2c01"))]);
}

#[test]
fn records_of_heads() {
    check(&[(HoldsRecord { layers: [LayerId(1), LayerId(300)].into() }, "0201fb2c01")]);
    check(&[(RaceRecord { heads: ["a".into(), "bc".into()].into() }, "020161026263")]);
    let fork = ForkPoint { head: "main".into(), layer: LayerId(7), time: T, since: LayerId(9) };
    let merge = MergePoint { layer: LayerId(8), into: LayerId(20) };
    let unresolved = [TreePath::parse(b"a").unwrap()].into();
    check(&[
        (HeadRecord::first(LayerId(300)), "fb2c0100000000"),
        (
            HeadRecord {
                layer: LayerId(300),
                forked_from: Some(fork),
                merged: [merge].into(),
                unresolved,
                beside: [TreePath::parse(b"b").unwrap()].into(),
            },
            "fb2c0101046d61696e07030509011408010161010162",
        ),
    ]);
}

#[test]
fn records_of_the_store_and_its_operations() {
    check(&[(BaseRecord { path: b"/base".to_vec() }, "052f62617365")]);
    check(&[(VolatileRecord { writer: SEVEN }, "07070707070707070707070707070707")]);
    check(&[
        (IdentityRecord::Reserved(Ino(1 << 48)), "00fd0000000000000100"),
        (IdentityRecord::Named { dev: 0, host: 12, ino: Ino(34) }, "01000c22"),
        (IdentityRecord::Synced, "02"),
        (IdentityRecord::Root(BaseMark { host: 2, born: None }), "030200"),
        (IdentityRecord::Root(BaseMark { host: 300, born: Some(T) }), "03fb2c01010305"),
        (IdentityRecord::Taken(Ino(34)), "0422"),
    ]);
    let op = |verb| OpRecord {
        head: "main".into(),
        time: T,
        verb,
        description: "d".into(),
        tree: Some(LayerId(1)),
        epoch: Epoch(0),
    };
    check(&[
        (op(OpVerb::Create), "046d61696e0305000164010100"),
        (op(OpVerb::Checkpoint), "046d61696e0305010164010100"),
        (op(OpVerb::Seal), "046d61696e0305020164010100"),
        (op(OpVerb::Restore), "046d61696e0305030164010100"),
        (op(OpVerb::Discard), "046d61696e0305040164010100"),
        (op(OpVerb::Apply), "046d61696e0305050164010100"),
        (op(OpVerb::UndoApply), "046d61696e0305060164010100"),
        (op(OpVerb::OpRestore), "046d61696e0305070164010100"),
        (op(OpVerb::Fork), "046d61696e0305080164010100"),
        (op(OpVerb::DropFork), "046d61696e0305090164010100"),
        (op(OpVerb::Merge), "046d61696e03050a0164010100"),
        (op(OpVerb::Import), "046d61696e03050b0164010100"),
        (op(OpVerb::Pull), "046d61696e03050c0164010100"),
    ]);
}

#[test]
fn records_of_the_edit_history() {
    let content = Content {
        ino: Ino(9),
        node: node(file()),
        epoch: Epoch(2),
        extents: vec![(
            ByteRange { start: 0, end: 300 },
            Source::Pool { layer: LayerId(7), offset: 4096 },
        )],
    };
    let edit = |how| LoggedEdit { time: T, how, content: Some(Arc::new(content.clone())) };
    let nothing = LoggedEdit { time: T, how: How::Undone, content: None };
    check(&[
        (EditsLogRecord::Opened { writer: SEVEN }, "0007070707070707070707070707070707"),
        (EditsLogRecord::Bounds(Bounds { edits: 10, bytes: 300 }), "010afb2c01"),
        (
            EditsLogRecord::Kept(vec![(path(), edit(How::Written)), (path(), nothing.clone())]),
            "020203612f620305000109fba481fbe803640100030503050305010106757365722e78017600fb2c\
             010103612f6201020303050305020100fb2c010007fb001003612f6203050600",
        ),
        (EditsLogRecord::Copied { from: path(), to: path() }, "0303612f6203612f62"),
        (EditsLogRecord::Moved { from: path(), to: path() }, "0403612f6203612f62"),
        (EditsLogRecord::Exchanged { a: path(), b: path() }, "0503612f6203612f62"),
        (EditsLogRecord::At { path: path(), number: Some(3) }, "0603612f620103"),
        (
            EditsLogRecord::Remapped { path: path(), number: 3, extents: content.extents.clone() },
            "0703612f62030100fb2c010007fb0010",
        ),
        (EditsLogRecord::Dropped { path: path(), upto: 3 }, "0803612f6203"),
        (EditsLogRecord::SyncedTo(300), "09fb2c01"),
        (
            EditsLogRecord::List {
                path: path(),
                next: 4,
                at: None,
                edits: vec![(3, nothing.clone(), true)],
            },
            "0a03612f62040001030305060001",
        ),
        (EditsLogRecord::SyncFailed, "0b"),
        (EditsLogRecord::Compared { except: vec![path()] }, "0c0103612f62"),
    ]);
    let ways = [
        How::Written,
        How::Truncated,
        How::Replaced,
        How::Removed,
        How::Moved,
        How::Restored,
        How::Undone,
    ];
    for (tag, how) in ways.into_iter().enumerate() {
        assert_eq!(encode(&how).unwrap(), [tag as u8]);
    }
}

#[test]
fn records_of_the_ledger() {
    check(&[
        (LedgerRecord::Sealed(vec![LayerId(1), LayerId(2)]), "00020102"),
        (LedgerRecord::Gone(vec![LayerId(3)]), "010103"),
        (LedgerRecord::Operations(300), "02fb2c01"),
        (LedgerRecord::Numbers(7), "0307"),
        (LedgerRecord::Published("holds".to_owned(), 2), "0405686f6c647302"),
        (
            LedgerRecord::Lowered(
                LayerId(7),
                Lowered { parent: Some(LayerId(3)), automatic: true, collected: false },
            ),
            "050701030100",
        ),
    ]);
}
