//! Programs side by side: each does the same work in a directory of its own. The step is their
//! number, and the time is that of all of them. The ratio of step N to step `1` says how much
//! longer N programs take than one; N means that they gain nothing from more CPUs.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::Res;
use crate::material::{Materials, Numbers};
use crate::programs::{self, program};
use crate::runner::Run;
use crate::workloads::Workload;

/// How many programs run side by side.
const CLIENTS: [u64; 4] = [1, 2, 4, 8];
/// How many missing names each of them looks up, or how many blocks it writes.
const OPERATIONS: u64 = 20_000;
const BLOCK: u64 = 4096;
/// The size of the file that is written, in blocks.
const BLOCKS: u64 = 1024;

pub fn all() -> Vec<Workload> {
    let new = |name, about, run| {
        Workload::new("scale", name, about, Materials::empty as fn(&Materials) -> _, run).mutates()
    };
    vec![
        new("lookup", "threads that each look up names that are not there", lookup),
        new("write", "threads that each write blocks of a file of their own", write),
        new("untar", "tar, each in a directory of its own", untar),
    ]
}

/// Runs `work` in threads, each with the number of its own directory.
fn side_by_side(
    run: &mut Run,
    work: impl Fn(u64, &Path) -> std::io::Result<()> + Copy + Send + Sync,
) -> Res<()> {
    for clients in CLIENTS {
        let root = run.root();
        let dirs: Vec<_> =
            (0..clients).map(|client| root.join(format!("{clients}-{client}"))).collect();
        dirs.iter().try_for_each(std::fs::create_dir)?;
        run.timed(&clients.to_string(), clients * OPERATIONS, |_| {
            std::thread::scope(|scope| {
                let threads: Vec<_> =
                    (0..).zip(&dirs).map(|(at, dir)| scope.spawn(move || work(at, dir))).collect();
                let mut ends = threads.into_iter().map(|thread| thread.join());
                ends.try_for_each(|end| Ok(end.map_err(|_| "a thread panicked")??))
            })
        })?;
    }
    Ok(())
}

fn lookup(run: &mut Run) -> Res<()> {
    side_by_side(run, |_, dir| {
        let found =
            (0..OPERATIONS).any(|at| std::fs::symlink_metadata(dir.join(at.to_string())).is_ok());
        if found { Err(std::io::Error::other("something is there")) } else { Ok(()) }
    })
}

fn write(run: &mut Run) -> Res<()> {
    side_by_side(run, |seed, dir| {
        let file = OpenOptions::new().write(true).create_new(true).open(dir.join("file"))?;
        file.write_all_at(&vec![1; (BLOCKS * BLOCK) as usize], 0)?;
        let (mut numbers, block) = (Numbers::new(seed), [2; BLOCK as usize]);
        (0..OPERATIONS).try_for_each(|_| file.write_all_at(&block, numbers.below(BLOCKS) * BLOCK))
    })
}

fn untar(run: &mut Run) -> Res<()> {
    let (root, archive) = (run.root(), run.materials.archive()?);
    let files = run.size.archive_files;
    for clients in CLIENTS {
        let mut programs = Vec::new();
        for client in 0..clients {
            let dir = root.join(format!("{clients}-{client}"));
            std::fs::create_dir(&dir)?;
            let mut tar = program("tar", &["-xf"], &dir);
            tar.arg(&archive);
            programs.push(tar);
        }
        run.timed(&clients.to_string(), clients * files, |_| programs::run_all(&mut programs))?;
        for client in 0..clients {
            std::fs::remove_dir_all(root.join(format!("{clients}-{client}")))?;
        }
    }
    Ok(())
}
