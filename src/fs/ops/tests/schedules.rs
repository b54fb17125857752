//! Requests of programs beside operations on states, in many orders. Shuttle runs one thread at a
//! time, and chooses at each mutex with a rank (`sys/lock.rs`) which one goes on. The other locks
//! are real, so no test here may wait for one that a thread holds while it takes such a mutex.
//!
//! `cargo schedules` runs these tests. `SHUTTLE_RANDOM_SEED=N` chooses other orders, and
//! `JAILFS_SCHEDULES=N` how many.

use std::sync::Arc;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::RwLock;
use shuttle::thread;
use shuttle::{Config, MaxSteps, Runner};

use super::{CALLER, Place, merge, name, read, seal, switch};
use crate::fs::{Fs, Invalidations, RenameMode, State};
use crate::types::{NodeId, TreePath};

/// Runs a test in many orders. In the first half each thread has the same chance to go on. In the
/// second half threads rarely interrupt each other.
fn in_many_orders(test: fn()) {
    fn run(scheduler: impl Scheduler + 'static, test: fn()) {
        let mut config = Config::new();
        config.stack_size = 4 << 20;
        config.max_steps = MaxSteps::FailAfter(100_000);
        Runner::new(scheduler, config).run(test);
    }
    let count = std::env::var("JAILFS_SCHEDULES").map_or(60, |count| count.parse().unwrap());
    run(RandomScheduler::new_from_seed(1, count), test);
    run(PctScheduler::new_from_seed(2, 3, count), test);
}

type Job<T> = Box<dyn FnOnce() -> T + Send>;

/// Runs each job in a thread of its own, and returns the results.
fn in_threads<T: Send + 'static>(jobs: Vec<Job<T>>) -> Vec<T> {
    let threads: Vec<_> = jobs.into_iter().map(thread::spawn).collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

/// The answer to the last lookup of a name in `d`: the id and the content, or that there is no such
/// name. The kernel knows this until it is invalidated.
type Known = (&'static str, Option<(NodeId, Vec<u8>)>);

/// Requests for names in `d`. Like the kernel, it locks the directory while it looks a name up,
/// shared, and while it changes one.
#[derive(Clone)]
struct Requests {
    fs: Arc<Fs>,
    dir: NodeId,
    names: Arc<RwLock<()>>,
}

impl Requests {
    fn to(place: &Place) -> Requests {
        let (fs, dir) = (Arc::clone(&place.fs), place.dir);
        Requests { fs, dir, names: Arc::new(RwLock::new(())) }
    }

    /// Looks a name up, and reads the file. The kernel holds it from then on.
    fn look_up(&self, text: &'static str) -> Known {
        let shared = self.names.read().unwrap();
        let found = self.fs.lookup(self.dir, &name(text)).ok();
        drop(shared);
        (text, found.map(|found| (found.id, read(&self.fs, found.id))))
    }

    fn make(&self, text: &str, content: &[u8]) {
        let _exclusive = self.names.write().unwrap();
        let id = self.fs.mknod(self.dir, &name(text), 0o644, 0, 0, CALLER).unwrap().id;
        self.fs.write(id, 0, content, false).unwrap();
        self.fs.forget(id, 1);
    }

    fn unlink(&self, text: &str) {
        let _exclusive = self.names.write().unwrap();
        self.fs.unlink(self.dir, &name(text)).unwrap();
    }

    fn rename(&self, from: &str, to: &str, mode: RenameMode) {
        let _exclusive = self.names.write().unwrap();
        self.fs.rename(self.dir, &name(from), self.dir, &name(to), mode, 1).unwrap();
    }

    /// Returns a job that looks up some of the names, as a program does, and forgets some of the
    /// files.
    fn program(&self, names: &'static [&'static str]) -> Job<Vec<Known>> {
        let requests = self.clone();
        Box::new(move || {
            let mut known = Vec::new();
            for _ in 0..3 {
                let text = names[thread_rng().gen_range(0..names.len())];
                match requests.look_up(text) {
                    (_, Some((id, _))) if thread_rng().gen_bool(0.3) => requests.fs.forget(id, 1),
                    seen => known.push(seen),
                }
            }
            known
        })
    }
}

/// The number of nodes that the kernel holds, and of orphans.
fn held(fs: &Fs) -> (usize, usize) {
    let core = fs.core();
    (core.held.iter().count(), core.held.orphans().tree().len())
}

/// Forgets all that the kernel knows. Then it holds no more nodes than at first.
fn forget_all(fs: &Fs, known: &[Known], first: (usize, usize)) {
    for (id, _) in known.iter().filter_map(|(_, found)| found.as_ref()) {
        fs.forget(*id, 1);
    }
    assert_eq!(held(fs), first, "nodes that the kernel holds, and orphans");
}

/// A filesystem and a state before it: since then `d/b` was overwritten, `d/c` was removed,
/// `d/made` was made and `d/e` was renamed.
fn changed() -> (Place, State) {
    let place = Place::new();
    let requests = Requests::to(&place);
    let before = seal(&place.fs);
    let b = place.file("b");
    place.fs.write(b, 0, b"CONTENT", false).unwrap();
    place.fs.forget(b, 1);
    requests.unlink("c");
    requests.make("made", b"made");
    requests.rename("e", "moved", RenameMode::Replace);
    (place, before)
}

const NAMES: &[&str] = &["a", "b", "c", "e", "made", "moved"];

/// Checks what the kernel knows after a switch. A held file has the content that it had. If it has
/// no name any more, its attributes are invalidated. A name that stands for another file now is
/// invalidated.
fn check_switched(requests: &Requests, known: &[Known], invalidated: &Invalidations) {
    let fs = &requests.fs;
    for (text, before) in known {
        if let Some((id, content)) = before {
            assert_eq!(&read(fs, *id), content, "{text} of its holders");
            let has_name = fs.getattr(*id).unwrap().meta.nlink > 0;
            assert!(has_name || invalidated.attrs.contains(id), "{text} has no name");
        }
        let (_, now) = requests.look_up(text);
        let is_invalidated = invalidated.names.contains(&(requests.dir, name(text)));
        let ids = [before, &now].map(|found| found.as_ref().map(|(id, _)| *id));
        assert!(ids[0] == ids[1] || is_invalidated, "{text}: {before:?}, now {now:?}");
        ids[1].into_iter().for_each(|id| fs.forget(id, 1));
    }
}

/// Runs two programs beside a switch, and checks what the kernel knows after it.
fn check_beside(place: &Place, switch: impl FnOnce(&Fs) -> Invalidations + Send + 'static) {
    let (first, requests) = (held(&place.fs), Requests::to(place));
    let programs = [0, 1].map(|_| requests.program(NAMES));
    let fs = Arc::clone(&place.fs);
    let switch = thread::spawn(move || switch(&fs));
    let known = in_threads(programs.into()).concat();
    check_switched(&requests, &known, &switch.join().unwrap());
    forget_all(&place.fs, &known, first);
}

#[test]
fn the_kernel_keeps_or_drops_what_it_looks_up_during_a_restore() {
    in_many_orders(|| {
        let (place, before) = changed();
        check_beside(&place, move |fs| switch(fs, &before).invalidations);
        for text in ["b", "c", "e"] {
            assert_eq!(read(&place.fs, place.file(text)), b"content", "{text}");
        }
    });
}

#[test]
fn the_kernel_keeps_or_drops_what_it_looks_up_during_a_merge() {
    in_many_orders(|| {
        let (place, _) = changed();
        check_beside(&place, merge);
        assert_eq!(read(&place.fs, place.file("b")), b"CON");
    });
}

#[test]
fn a_write_during_a_restore_goes_to_the_file_that_the_program_has_looked_up() {
    in_many_orders(|| {
        let (place, before) = changed();
        let (fs, dir, first) = (Arc::clone(&place.fs), place.dir, held(&place.fs));
        let writing = Arc::clone(&fs);
        let write = thread::spawn(move || {
            let id = writing.lookup(dir, &name("b")).unwrap().id;
            writing.write(id, 0, b"W", false).unwrap();
            id
        });
        switch(&fs, &before);
        let id = write.join().unwrap();
        let seen = read(&fs, id);
        let now = Requests::to(&place).look_up("b");
        let (found, content) = now.1.clone().unwrap();
        if found == id {
            assert_eq!(content, b"Wontent", "looked up after the restore");
        } else {
            assert_eq!((seen, content), (b"WONTENT".to_vec(), b"content".to_vec()));
        }
        forget_all(&fs, &[now, ("b", Some((id, Vec::new())))], first);
    });
}

#[test]
fn files_keep_their_content_while_their_names_are_exchanged_and_removed() {
    in_many_orders(|| {
        let place = Place::new();
        let (fs, requests) = (Arc::clone(&place.fs), Requests::to(&place));
        requests.make("x", b"of x");
        requests.make("y", b"of y");
        let first = held(&fs);
        let programs = [0, 1].map(|_| requests.program(&["x", "y", "a"]));
        let changing = requests.clone();
        let changes = thread::spawn(move || {
            changing.rename("x", "y", RenameMode::Exchange);
            changing.unlink("x");
            changing.rename("y", "x", RenameMode::Replace);
        });
        let known = in_threads(programs.into()).concat();
        changes.join().unwrap();
        for (text, found) in &known {
            if let Some((id, content)) = found {
                assert_eq!(&read(&fs, *id), content, "{text}");
                let all: &[&[u8]] = if *text == "a" { &[b"content"] } else { &[b"of x", b"of y"] };
                assert!(all.contains(&&content[..]), "{text}: {content:?}");
            } else {
                assert_ne!(*text, "a");
            }
        }
        let now = requests.look_up("x");
        assert_eq!(now.1.as_ref().unwrap().1, b"of x");
        assert!(fs.lookup(place.dir, &name("y")).is_err());
        forget_all(&fs, &[known, vec![now]].concat(), first);
    });
}

/// Two files are written in turn, so at every moment the first has as much or one byte more.
#[test]
fn a_checkpoint_between_writes_has_all_before_it_and_none_after_it() {
    in_many_orders(|| {
        let place = Place::new();
        let (fs, dir) = (Arc::clone(&place.fs), place.dir);
        let make = |text| fs.mknod(dir, &name(text), 0o644, 0, 0, CALLER).unwrap().id;
        let files = ["x", "y"].map(make);
        let writing = Arc::clone(&fs);
        let writes = thread::spawn(move || {
            for at in 0..4 {
                files.iter().for_each(|id| {
                    writing.write(*id, at, b"w", false).unwrap();
                });
            }
        });
        let syncing = Arc::clone(&fs);
        let syncs = thread::spawn(move || syncing.sync().unwrap());
        for _ in 0..2 {
            let sealed = seal(&fs);
            let size = |text: &str| {
                let path = TreePath::parse(format!("d/{text}").as_bytes()).unwrap();
                sealed.tree.size(sealed.resolve(&path).unwrap().ino().unwrap())
            };
            let (x, y) = (size("x"), size("y"));
            assert!(x == y || x == y + 1, "{x} and {y} bytes");
        }
        writes.join().unwrap();
        syncs.join().unwrap();
        files.iter().for_each(|id| assert_eq!(read(&fs, *id), b"wwww"));
    });
}
