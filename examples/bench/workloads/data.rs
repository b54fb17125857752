//! Bytes: large files, single blocks, databases.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Res;
use crate::material::{Materials, Numbers};
use crate::programs::python;
use crate::runner::Run;
use crate::workloads::Workload;

const BLOCK: usize = 4096;
const PIECE: usize = 1 << 20;

pub fn all() -> Vec<Workload> {
    vec![
        Workload::new(
            "data",
            "read",
            "the large file of the base, from end to end and in blocks",
            Materials::big_file,
            read,
        ),
        Workload::new("data", "mmap", "the same through a mapping", Materials::big_file, mmap)
            .needs(&["python3"]),
        Workload::new(
            "data",
            "write",
            "a large new file, then single blocks of it",
            Materials::empty,
            write,
        )
        .mutates(),
        Workload::new(
            "data",
            "first-write",
            "4 KiB into the large file of the base",
            Materials::big_file,
            first,
        )
        .mutates(),
        Workload::new("data", "append", "100 bytes at a time", Materials::empty, append).mutates(),
        Workload::new(
            "data",
            "sqlite",
            "rows in one transaction, then one each with a log, then one each synced",
            Materials::empty,
            sqlite,
        )
        .needs(&["sqlite"])
        .mutates(),
    ]
}

/// Reads a file from end to end.
fn read_through(path: &Path) -> Res<()> {
    let (mut file, mut piece) = (File::open(path)?, vec![0; PIECE]);
    while file.read(&mut piece)? > 0 {}
    Ok(())
}

fn read(run: &mut Run) -> Res<()> {
    let path = run.root().join("big");
    read_through(&run.base.join("big"))?;
    let (pieces, random) = (run.size.big >> 20, run.size.random);
    run.timed("sequential-fresh", pieces, |_| read_through(&path))?;
    run.timed("sequential-warm", pieces, |_| read_through(&path))?;
    run.timed("random-4k-warm", random, |run| {
        let (file, mut numbers, mut block) = (File::open(&path)?, Numbers::new(1), [0; BLOCK]);
        for _ in 0..run.size.random {
            file.read_exact_at(&mut block, numbers.below(run.size.big >> 12) << 12)?;
        }
        Ok(())
    })
}

fn mmap(run: &mut Run) -> Res<()> {
    // The start of the interpreter is not included.
    let script = "import mmap, sys, time\n\
        began = time.perf_counter()\n\
        with open('big', 'rb') as f:\n    \
            m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)\n    \
            for at in range(0, len(m), 1 << 20): m[at:at + (1 << 20)]\n\
        print(time.perf_counter() - began)";
    read_through(&run.base.join("big"))?;
    let pieces = run.size.big >> 20;
    for step in ["fresh", "warm"] {
        run.step(step, pieces, |run| python(script, &[], &run.root()))?;
    }
    Ok(())
}

fn write(run: &mut Run) -> Res<()> {
    let path = run.root().join("new");
    let (pieces, random) = (run.size.big >> 20, run.size.random);
    let piece = vec![7; PIECE];
    let file = OpenOptions::new().write(true).create_new(true).open(path)?;
    run.timed("sequential", pieces, |_| {
        (0..pieces).try_for_each(|at| file.write_all_at(&piece, at << 20)).map_err(Into::into)
    })?;
    run.timed("fsync", 1, |_| Ok(file.sync_all()?))?;
    run.timed("random-4k", random, |run| {
        let (mut numbers, block) = (Numbers::new(2), [9; BLOCK]);
        let mut at = || numbers.below(run.size.big >> 12) << 12;
        (0..random).try_for_each(|_| file.write_all_at(&block, at())).map_err(Into::into)
    })?;
    run.timed("random-fsync", 1, |_| Ok(file.sync_all()?))
}

fn first(run: &mut Run) -> Res<()> {
    let (path, middle) = (run.root().join("big"), run.size.big / 2);
    run.timed("first-4k", 1, |_| {
        let file = OpenOptions::new().write(true).open(path)?;
        Ok(file.write_all_at(&[1; BLOCK], middle)?)
    })
}

fn append(run: &mut Run) -> Res<()> {
    let (path, appends) = (run.root().join("log"), run.size.appends);
    let mut file = OpenOptions::new().append(true).create_new(true).open(path)?;
    run.timed("append-100", appends, |_| {
        (0..appends).try_for_each(|_| file.write_all(&[b'a'; 100])).map_err(Into::into)
    })
}

fn sqlite(run: &mut Run) -> Res<()> {
    let bulk = "import sqlite3, sys, time\n\
        began = time.perf_counter()\n\
        db = sqlite3.connect('bulk.db')\n\
        db.execute('create table t (id integer primary key, a text, b integer)')\n\
        with db: db.executemany('insert into t values (?, ?, ?)', ((i, 'row %d' % i, i * 7919 % \
        100003) for i in range(int(sys.argv[1]))))\n\
        db.execute('create index u on t (b)')\n\
        db.commit()\n\
        assert db.execute('select count(*), sum(b) from t').fetchone()[0] == int(sys.argv[1])\n\
        db.close()\n\
        print(time.perf_counter() - began)";
    let single = "import sqlite3, sys, time\n\
        db = sqlite3.connect(sys.argv[2] + sys.argv[3], isolation_level=None)\n\
        db.execute('pragma journal_mode=' + sys.argv[2])\n\
        db.execute('pragma synchronous=' + sys.argv[3])\n\
        db.execute('create table t (id integer primary key, a text)')\n\
        began = time.perf_counter()\n\
        for i in range(int(sys.argv[1])):\n    \
            db.execute('insert into t values (?, ?)', (i, 'row %d' % i))\n\
        db.close()\n\
        print(time.perf_counter() - began)";
    let (rows, transactions, synced) = (run.size.rows, run.size.transactions, run.size.synced);
    run.step("bulk", rows, |run| python(bulk, &[&rows.to_string()], &run.root()))?;
    for (step, transactions, journal, synchronous) in [
        ("wal", transactions, "wal", "normal"),
        ("wal-synced", synced, "wal", "full"),
        ("rollback-synced", synced, "delete", "full"),
    ] {
        let args = [&*transactions.to_string(), journal, synchronous];
        run.step(step, transactions, |run| python(single, &args, &run.root()))?;
    }
    Ok(())
}
