//! The forks beside `main`: two are mounted, each in a slot with its own writers, and others are
//! dormant. They are made, dropped, exchanged, restored, merged and picked while kills happen.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use serde_json::Value;

use crate::harness::text;
use crate::head::{Head, SLOTS, dirs_of, without_numbers};
use crate::verbs::Pending;
use crate::world::{Saved, World};
use crate::writer::{Control, Working, stamp};

/// The number of forks that are not mounted.
const MOST_DORMANT: usize = 3;

/// A fork that is not mounted.
pub struct Dormant {
    name: String,
    saved: Saved,
    is_clean: bool,
}

/// A mounted fork.
pub struct Fork {
    pub head: Head,
    /// Whether `main` was not restored since they parted. Then a merge has no conflict, and its
    /// result is known.
    is_clean: bool,
    /// The result of an operation that a kill interrupted.
    maybe: Option<Maybe>,
    working: Option<Working>,
}

/// The result that an interrupted operation may have had.
enum Maybe {
    /// All but the directories of its own writers.
    Merged(Saved),
    Restored(Saved),
}

/// The answer to a merge.
enum MergeAnswer {
    Done(Vec<Value>),
    Killed,
}

impl World {
    fn point(&self, slot: usize) -> PathBuf {
        self.live.outside().join("forks").join(SLOTS[slot])
    }

    fn scratch(&self) -> PathBuf {
        self.live.outside().join("copies-of-forks")
    }

    /// Mounts a fork in each empty slot. No kill may come.
    pub fn fill(&mut self) {
        let control = Arc::new(Control::default());
        for slot in 0..SLOTS.len() {
            if self.forks[slot].is_none() {
                let fresh = self.rng.one_in(2);
                self.exchange(slot, fresh, &control);
            }
        }
        control.check();
    }

    /// Starts the writers of all mounted forks.
    pub fn start_forks(&mut self, control: &Control) {
        self.forks.iter_mut().flatten().for_each(|fork| fork.start(control));
    }

    /// Waits for them.
    pub fn stop_forks(&mut self) {
        self.forks.iter_mut().flatten().for_each(|fork| fork.working = None);
    }

    /// Unmounts all forks, dead or not.
    pub fn unmount_forks(&mut self) {
        self.stop_forks();
        for slot in 0..SLOTS.len() {
            if is_mounted(&self.point(slot)) {
                let output = self.jailfs(
                    Path::new("/"),
                    &["umount", "--lazy", self.point(slot).to_str().unwrap()],
                );
                if !output.status.success() {
                    eprintln!("unmount a fork: {}", text(&output));
                }
            }
        }
    }

    /// A verb of a fork that programs in the mounts do not notice.
    pub fn fork_verb(&mut self, control: &Arc<Control>) -> Pending {
        let slot = self.rng.below(SLOTS.len() as u64) as usize;
        match self.rng.below(12) {
            0 | 1 => self.checkpoint_fork(slot, control),
            2 | 3 => self.fork_unmounted(control),
            4 => self.drop_unmounted(control),
            5..8 => self.merge_into_main(slot, control),
            8..10 => self.merge_into_fork(slot, control),
            _ => {
                let fresh = self.rng.one_in(2);
                if self.exchange(slot, fresh, control).is_some() {
                    self.start_forks(control);
                }
                Pending::Nothing
            }
        }
    }

    /// The tree of `main` is another one: a merge with a fork of before has no known result.
    pub fn main_went_back(&mut self) {
        self.forks.iter_mut().flatten().for_each(|fork| fork.is_clean = false);
        self.dormant.iter_mut().for_each(|fork| fork.is_clean = false);
    }

    /// Puts another fork in a slot, a new one of `main` if it must be fresh. Its writers do not run
    /// yet. Returns `None` if the kill came.
    fn exchange(&mut self, slot: usize, fresh: bool, control: &Control) -> Option<()> {
        let point = self.point(slot).to_str().unwrap().to_owned();
        if let Some(fork) = &mut self.forks[slot] {
            fork.working = None;
            let name = fork.head.name.clone();
            self.ask_in(Path::new("/"), &["umount", &point], control)?;
            self.drop_fork(&name, control)?;
            self.forks[slot] = None;
        }
        let idle = self.dormant.len() as u64;
        let dormant = (!fresh && idle > 0).then(|| {
            let at = self.rng.below(idle) as usize;
            self.dormant.remove(at)
        });
        if let Some(dormant) = dormant {
            let name = dormant.name.clone();
            self.forks[slot] = Some(self.mounted(slot, dormant));
            let (base, store) = (self.live.base.clone(), self.live.store.clone());
            let (base, store) = (base.to_str().unwrap(), store.to_str().unwrap());
            let words = ["mount", "--head", &name, base, &point, "--store", store];
            self.ask_in(Path::new("/"), &words, control)?;
            self.count("forks mounted again");
        } else {
            let name = format!("{}{}", SLOTS[slot], stamp());
            let marks = self.main.marks();
            let made = self.ask(&["fork", &name, &point], control);
            let dormant = Dormant { name, saved: self.main.since(&marks), is_clean: true };
            if made.is_none() {
                self.maybe_new = Some(dormant);
                return None;
            }
            self.forks[slot] = Some(self.mounted(slot, dormant));
            self.count("forks");
        }
        self.settle_fork(slot, control)
    }

    /// A dormant fork as the fork of a slot.
    fn mounted(&mut self, slot: usize, dormant: Dormant) -> Fork {
        let Dormant { name, saved, is_clean } = dormant;
        let head = Head::new(name, self.point(slot), Some(slot), self.rng.next());
        head.hold(&saved);
        Fork { head, is_clean, maybe: None, working: None }
    }

    /// Compares a fork, in which no writer works, with what it may show.
    fn settle_fork(&mut self, slot: usize, control: &Control) -> Option<()> {
        let _undisturbed = control.undisturbed();
        if control.is_killed() {
            return None;
        }
        let reads_programs = self.rng.one_in(6);
        let scratch = self.scratch();
        let fork = self.forks[slot].as_ref()?;
        let adopted = fork.head.adopt(&[fork.head.now()], (&scratch, reads_programs), |_| true);
        adopted.unwrap_or_else(|why| panic!("a fork is not what was forked: {why}"));
        Some(())
    }

    fn drop_fork(&mut self, name: &str, control: &Control) -> Option<()> {
        self.maybe_gone = Some(name.to_owned());
        self.ask(&["fork", "--drop", name], control)?;
        self.maybe_gone = None;
        self.count("forks dropped");
        Some(())
    }

    /// Makes a fork of `main` or of another fork, and does not mount it.
    fn fork_unmounted(&mut self, control: &Control) -> Pending {
        if self.dormant.len() >= MOST_DORMANT {
            return self.drop_unmounted(control);
        }
        let name = format!("idle{}", stamp());
        let of = self.rng.below(2 * SLOTS.len() as u64) as usize;
        let (marks, mnt) = {
            let of = self.head_of(of);
            (of.marks(), of.mnt.clone())
        };
        let made = self.ask_in(&mnt, &["fork", &name], control);
        let head = self.head_of(of);
        let dormant = Dormant { name, saved: head.since(&marks), is_clean: head.name == "main" };
        if made.is_none() {
            self.maybe_new = Some(dormant);
            return Pending::Nothing;
        }
        self.dormant.push(dormant);
        self.count("forks");
        Pending::Nothing
    }

    /// The fork in a slot, or `main`.
    fn head_of(&self, slot: usize) -> &Head {
        let fork = self.forks.get(slot).and_then(Option::as_ref);
        fork.map_or(&self.main, |fork| &fork.head)
    }

    fn drop_unmounted(&mut self, control: &Control) -> Pending {
        if !self.dormant.is_empty() {
            let at = self.rng.below(self.dormant.len() as u64) as usize;
            let name = self.dormant[at].name.clone();
            if self.drop_fork(&name, control).is_some() {
                self.dormant.remove(at);
            }
        }
        Pending::Nothing
    }

    fn checkpoint_fork(&mut self, slot: usize, control: &Control) -> Pending {
        let Some(fork) = &self.forks[slot] else { return Pending::Nothing };
        let (name, marks) = (format!("c{}", stamp()), fork.head.marks());
        let mnt = fork.head.mnt.clone();
        let said = self.ask_in(&mnt, &["checkpoint", &name, "--json"], control);
        let saved = self.head_of(slot).since(&marks);
        self.checkpointed(said, name, saved)
    }

    /// Replaces a fork with which a merge has no known result. Returns whether there is one now.
    fn clean(&mut self, slot: usize, control: &Arc<Control>) -> bool {
        if self.forks[slot].as_ref().is_some_and(|fork| fork.is_clean) {
            return true;
        }
        if self.exchange(slot, true, control).is_none() {
            return false;
        }
        self.start_forks(control);
        // Something to merge.
        std::thread::sleep(Duration::from_millis(self.rng.below(60)));
        true
    }

    /// Merges `head` into the head that is mounted at `mnt`.
    fn merge(&mut self, mnt: &Path, head: &str, control: &Control) -> MergeAnswer {
        let output = self.jailfs(mnt, &["merge", head, "--json"]);
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        let why = String::from_utf8_lossy(&output.stderr).into_owned();
        let code = output.status.code();
        self.note(format!("merge {head} in {}: {code:?} {}", mnt.display(), why.trim()));
        let lines = said.lines().map(|line| serde_json::from_str(line).unwrap());
        if output.status.success() {
            self.count("merges");
            return MergeAnswer::Done(lines.collect());
        }
        control.failed(format!("merge {head} in {}: {code:?} {why}{said}", mnt.display()));
        MergeAnswer::Killed
    }

    fn merge_into_main(&mut self, slot: usize, control: &Arc<Control>) -> Pending {
        if !self.clean(slot, control) {
            return Pending::Nothing;
        }
        let (ours, theirs) = (self.main.marks(), self.head_of(slot).marks());
        let (mnt, name) = (self.main.mnt.clone(), self.head_of(slot).name.clone());
        let answer = self.merge(&mnt, &name, control);
        let merged = without_numbers(&self.head_of(slot).since(&theirs)[dirs_of(slot)]);
        if !matches!(answer, MergeAnswer::Done(_)) {
            self.forks[slot].iter_mut().for_each(|fork| fork.is_clean = false);
        }
        let said = match answer {
            MergeAnswer::Done(said) => said,
            MergeAnswer::Killed => return Pending::Merge { slot, merged, answered: false },
        };
        let _undisturbed = control.undisturbed();
        if control.is_killed() {
            return Pending::Merge { slot, merged, answered: true };
        }
        let before = self.main.since(&ours);
        let mut after = before.clone();
        drop(after.splice(dirs_of(slot), merged));
        let own = DirNames(slot);
        let adopted =
            self.main.adopt(&[after], (&self.scratch(), false), |writer| own.has(writer.name));
        adopted.unwrap_or_else(|why| panic!("after a merge of {name}: {why}"));
        let undo = said.last().and_then(|line| line["undo"].as_u64());
        self.operations.extend(undo.map(|undo| (undo, before)));
        Pending::Nothing
    }

    fn merge_into_fork(&mut self, slot: usize, control: &Arc<Control>) -> Pending {
        if !self.clean(slot, control) {
            return Pending::Nothing;
        }
        let marks = self.main.marks();
        let mnt = self.head_of(slot).mnt.clone();
        let answer = self.merge(&mnt, "main", control);
        let merged = without_numbers(&self.main.since(&marks));
        let scratch = self.scratch();
        let reads_programs = self.rng.one_in(6);
        let Some(fork) = &mut self.forks[slot] else { return Pending::Nothing };
        match answer {
            MergeAnswer::Killed => {
                fork.is_clean = false;
                fork.maybe = Some(Maybe::Merged(merged));
            }
            MergeAnswer::Done(_) => {
                let _undisturbed = control.undisturbed();
                if control.is_killed() {
                    let fixed = fork.head.writers.iter().zip(merged);
                    fixed.filter(|(w, _)| w.is_fixed).for_each(|(w, span)| w.hold(span));
                    return Pending::Nothing;
                }
                let how = (&*scratch, reads_programs);
                let adopted = fork.head.adopt(&[merged], how, |writer| writer.is_fixed);
                adopted.unwrap_or_else(|why| panic!("after a merge of main: {why}"));
            }
        }
        Pending::Nothing
    }

    /// Replaces the tree of `main` with that of a fork, as a race does with its winner.
    pub fn pick(&mut self, control: &Arc<Control>) -> Pending {
        let slot = self.rng.below(SLOTS.len() as u64) as usize;
        let Some(fork) = &self.forks[slot] else { return Pending::Nothing };
        let (marks, rev) = (fork.head.marks(), format!("{}@", fork.head.name));
        self.count("picks");
        let to = |world: &World| world.head_of(slot).since(&marks);
        self.restore(&["restore", &rev, "--json"], to, control)
    }

    /// Restores a checkpoint of any head in a fork. Its writers rest meanwhile.
    pub fn restore_fork(&mut self, control: &Arc<Control>) -> Pending {
        let slot = self.rng.below(SLOTS.len() as u64) as usize;
        if self.checkpoints.is_empty() || self.forks[slot].is_none() {
            return Pending::Nothing;
        }
        let checkpoint = self.rng.pick(&self.checkpoints);
        let (name, saved) = (checkpoint.name.clone(), checkpoint.saved.clone());
        let Some(fork) = &mut self.forks[slot] else { return Pending::Nothing };
        fork.working = None;
        fork.is_clean = false;
        let mnt = fork.head.mnt.clone();
        let answer = self.ask_in(&mnt, &["restore", &name, "--json"], control);
        let Some(fork) = &mut self.forks[slot] else { return Pending::Nothing };
        if answer.is_none() {
            fork.maybe = Some(Maybe::Restored(saved));
            return Pending::Nothing;
        }
        fork.head.hold(&saved);
        if self.settle_fork(slot, control).is_some() {
            self.count("restores of forks");
            self.start_forks(control);
        }
        Pending::Nothing
    }

    /// After a kill: the kernel has ended the mounts of all forks.
    pub fn wait_until_forks_are_dead(&self) {
        let end = Instant::now() + Duration::from_secs(10);
        for point in (0..SLOTS.len()).map(|slot| self.point(slot)) {
            while is_mounted(&point) && statvfs(&point) != Err(Errno::ENOTCONN) {
                assert!(Instant::now() < end, "the mount {} is not dead", point.display());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// After a kill: mounts the forks, and compares each with what it may show.
    pub fn remount_forks(&mut self) {
        self.find_forks();
        let (base, store) = (self.live.base.clone(), self.live.store.clone());
        let (base, store) = (base.to_str().unwrap(), store.to_str().unwrap());
        for slot in 0..SLOTS.len() {
            let (point, scratch) = (self.point(slot), self.scratch());
            let reads_programs = self.rng.one_in(6);
            let Some(fork) = &mut self.forks[slot] else { continue };
            let maybe = fork.maybe.take();
            let name = fork.head.name.clone();
            let words = ["mount", "--head", &name, base, point.to_str().unwrap(), "--store", store];
            let output = self.jailfs(Path::new("/"), &words);
            assert!(output.status.success(), "mount a fork again: {}", text(&output));
            let Some(fork) = &mut self.forks[slot] else { continue };
            let mut options = vec![fork.head.now()];
            options.extend(maybe.map(|maybe| match maybe {
                Maybe::Restored(saved) => saved,
                Maybe::Merged(mut merged) => {
                    let own = dirs_of(slot);
                    drop(merged.splice(own.clone(), options[0][own].to_vec()));
                    merged
                }
            }));
            let was_cut_off = options.len() > 1;
            let adopted = fork.head.adopt(&options, (&scratch, reads_programs), |_| true);
            let number = adopted
                .unwrap_or_else(|why| panic!("what a fork has acknowledged is not there: {why}"));
            if was_cut_off {
                self.count("operations of forks that were cut off");
            }
            if number > 0 {
                self.count("of them there in forks");
            }
        }
        self.fill();
    }

    /// Each fork exists, except one that was being dropped; and no other, except one that was being
    /// made.
    fn find_forks(&mut self) {
        let lines = self.live.json(&["forks"]);
        let names = lines.iter().map(|line| line["name"].as_str().unwrap().to_owned());
        let mut listed: BTreeSet<String> = names.filter(|name| name != "main").collect();
        let (gone, new) = (self.maybe_gone.take(), self.maybe_new.take());
        let mut stays = |name: &str| {
            let is_listed = listed.remove(name);
            assert!(is_listed || gone.as_deref() == Some(name), "head {name} is lost: {lines:?}");
            is_listed
        };
        for slot in &mut self.forks {
            slot.take_if(|fork| !stays(&fork.head.name));
        }
        self.dormant.retain(|fork| stays(&fork.name));
        if let Some(new) = new
            && listed.remove(&new.name)
        {
            self.dormant.push(new);
        }
        assert!(listed.is_empty(), "heads that no test made: {listed:?}");
    }
}

impl Fork {
    /// Starts its writers, unless they run.
    fn start(&mut self, control: &Control) {
        if self.working.is_none() {
            let Head { writers, mnt, .. } = &self.head;
            self.working = Some(Working::start(writers, |_| true, mnt, &control.beside()));
        }
    }
}

/// The directories of a slot, by name.
struct DirNames(usize);

impl DirNames {
    fn has(&self, name: &str) -> bool {
        name.strip_prefix(SLOTS[self.0]).is_some_and(|rest| rest.is_empty() || rest == "-links")
    }
}

fn is_mounted(point: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(1) == point.to_str())
}
