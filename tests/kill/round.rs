//! One round: load, a kill at a random moment, a remount, and the comparison.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::text;
use crate::head::Head;
use crate::span::{Span, State};
use crate::verbs::Pending;
use crate::world::{Checkpoint, World};
use crate::writer::{Control, Working, Writer, stamp};

/// The moment of the kill.
#[derive(Clone, Copy, Debug)]
enum KillTime {
    /// So long after the load began.
    After(Duration),
    /// So long after this verb began.
    During(u64, Duration),
}

/// The load ends with this verb, whatever was planned.
const LAST_VERB: u64 = 30;
/// The load also ends after so many operations. Each verb stores all states that are possible at
/// its time, and on a slow machine they are many.
const MANY: u64 = 20_000;

impl World {
    /// Loads the mount, kills its daemon, mounts again, and compares the mount with the
    /// acknowledged operations.
    pub fn round(&mut self) {
        self.begin_anew_what_is_long();
        self.make_enough_forks();
        let moment = match self.rng.one_in(2) {
            true => KillTime::After(Duration::from_micros(self.rng.below(500_000))),
            false => KillTime::During(
                1 + self.rng.below(7),
                Duration::from_micros(self.rng.below(60_000)),
            ),
        };
        self.note(format!("kill {} {moment:?}", self.kills + 1));
        let control = Arc::new(Control::default());
        let (arm, armed) = channel();
        let (pid, killing) = (self.live.pid(), Arc::clone(&control));
        let killer = std::thread::spawn(move || kill_when(&armed, pid, &killing));
        let pending = self.load(moment, &arm, &control);
        drop(arm);
        killer.join().unwrap();
        self.live.wait_until_dead();
        control.check();
        self.kills += 1;
        self.check_store();
        // A client whose fork is made and not mounted yet starts a daemon for that.
        while self.rng.one_in(4) && !matches!(pending, Pending::Fork(_)) {
            self.kill_a_start();
        }
        self.live.mount();
        self.hold_against(pending);
    }

    /// Works until the daemon is dead. Returns the verb that was interrupted.
    fn load(
        &mut self,
        moment: KillTime,
        arm: &Sender<Duration>,
        control: &Arc<Control>,
    ) -> Pending {
        if let KillTime::After(delay) = moment {
            arm.send(delay).unwrap();
        }
        let (mut verbs, first) = (0, stamp());
        let mut is_armed = matches!(moment, KillTime::After(_));
        let mut begin = |world: &mut World| {
            std::thread::sleep(Duration::from_micros(world.rng.below(15_000)));
            verbs += 1;
            let delay = match moment {
                KillTime::During(number, delay) if number == verbs => Some(delay),
                _ => (verbs == LAST_VERB || stamp() - first > MANY).then_some(Duration::ZERO),
            };
            if let Some(delay) = delay.filter(|_| !std::mem::replace(&mut is_armed, true)) {
                arm.send(delay).unwrap();
            }
        };
        while !control.is_killed() {
            let heads = self.heads.iter().filter(|head| head.is_ready());
            let working = Working::start(heads, Head::has_running, control);
            for _ in 0..=self.rng.below(3) {
                begin(self);
                let pending = self.busy_verb(control);
                if control.is_killed() {
                    return pending;
                }
            }
            drop(working);
            self.read_new_forks(control);
            if !control.is_killed() && !self.rng.one_in(3) {
                begin(self);
                let pending = self.quiet_verb(control);
                if control.is_killed() {
                    return pending;
                }
            }
        }
        Pending::Nothing
    }

    /// The store of a killed daemon passes the consistency check.
    fn check_store(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        let output = command
            .args(["check", "--store"])
            .arg(&self.live.store)
            .current_dir("/")
            .output()
            .unwrap();
        assert!(output.status.success(), "check after the kill: {}", text(&output));
        assert!(!text(&output).contains("warning: "), "check after the kill: {}", text(&output));
    }

    /// Compares the mount with the acknowledged operations, and continues from its state.
    fn hold_against(&mut self, mut pending: Pending) {
        self.hold_tree_against(0, &pending);
        self.hold_forks_against(&mut pending);
        self.hold_checkpoints_against(&pending);
        self.hold_base_against(pending);
        if self.rng.one_in(3) {
            let output = self.heads[0].jailfs(&["check", "--read-data"]);
            assert!(output.status.success(), "check after the mount: {}", text(&output));
            assert!(
                !text(&output).contains("warning: "),
                "check after the mount: {}",
                text(&output)
            );
        }
    }

    /// Compares a mounted head with its acknowledged operations, and continues from its state.
    pub fn hold_tree_against(&mut self, at: usize, pending: &Pending) {
        let unread = self.heads[at].fork.as_ref().and_then(|fork| fork.unread.clone());
        let is_new = at == 0 || unread.is_some() || pending.is_about(at);
        let all = is_new || self.rng.one_in(4);
        let found = self.read(at, all);
        let head = &self.heads[at];
        let now = unread.unwrap_or_else(|| head.since(&head.marks()));
        let (after, is_done) = match pending {
            Pending::Restore { to, first_new, answered, .. } if pending.is_about(at) => {
                let after = head.settle_restored(to, &found, *first_new, *answered);
                (Some(after), answered.is_some())
            }
            Pending::Merge { merged, is_done, .. } if pending.is_about(at) => {
                (Some(head.settle(&self.merged(at, merged), &found)), *is_done)
            }
            _ => (None, false),
        };
        if after.is_some() {
            self.count("restores and merges that were cut off");
        }
        let states = match after {
            None => self.heads[at].settle(&now, &found),
            Some(Ok(states)) => {
                self.count("of them done");
                Ok(states)
            }
            Some(Err(why)) if is_done => Err(why),
            Some(Err(why)) => self.heads[at]
                .settle(&now, &found)
                .map_err(|not| format!("not as before: {not}\nnor as after: {why}")),
        };
        let states =
            states.unwrap_or_else(|why| panic!("what was acknowledged is not there: {why}"));
        let head = &mut self.heads[at];
        head.go_on(states.clone());
        if let Some(fork) = &mut head.fork
            && fork.unread.take().is_some()
        {
            fork.base = Some(states);
        }
    }

    fn hold_checkpoints_against(&mut self, pending: &Pending) {
        let listed: Vec<(u64, Option<String>)> = self
            .live
            .json(&["log"])
            .iter()
            .map(|line| (line["id"].as_u64().unwrap(), line["name"].as_str().map(str::to_owned)))
            .collect();
        let is_listed = |checkpoint: &Checkpoint| {
            listed.contains(&(checkpoint.id, Some(checkpoint.name.clone())))
        };
        let may_go = |id: u64| matches!(pending, Pending::Gc { kept } if !kept.contains(&id));
        if let Some(lost) = self.checkpoints.iter().find(|c| !is_listed(c) && !may_go(c.id)) {
            panic!("checkpoint {} '{}' is lost: {listed:?}", lost.id, lost.name);
        }
        self.checkpoints.retain(is_listed);
        if let Pending::Checkpoint(made) = pending {
            self.count("checkpoints that were cut off");
            if let Some((id, _)) = listed.iter().find(|(_, name)| name.as_ref() == Some(&made.name))
            {
                self.count("of them there");
                self.checkpoints.push(Checkpoint { id: *id, ..Checkpoint::clone(made) });
            }
        }
        let ours = |id: u64| self.checkpoints.iter().any(|checkpoint| checkpoint.id == id);
        let stranger = listed.iter().find(|(id, _)| !ours(*id));
        assert!(stranger.is_none(), "a checkpoint that no test made: {stranger:?}");
    }

    fn hold_base_against(&mut self, pending: Pending) {
        if !std::mem::take(&mut self.base_is_new) {
            return;
        }
        let scratch = self.live.outside().join("copies");
        let root = self.live.base.clone();
        let read = |writer: &Arc<Writer>| {
            let found = writer.read(&root, Some(&scratch));
            found.unwrap_or_else(|error| panic!("{} in the base: {error}", writer.name))
        };
        let found: Vec<State> = self.heads[0].writers.iter().map(read).collect();
        let is_undo = matches!(pending, Pending::Undo);
        let other = match pending {
            Pending::Apply { base } => Some(base),
            Pending::Undo => self.before_apply.clone(),
            _ => None,
        };
        let as_before = self.heads[0].settle(&self.base, &found);
        let as_after = other.as_ref().map(|other| self.heads[0].settle(other, &found));
        let is_after = as_after.as_ref().is_some_and(|after| after.is_ok());
        if other.is_some() {
            self.count("applies that were cut off");
        }
        match (as_before, as_after) {
            (Err(why), None) => panic!("the base: {why}"),
            (Err(before), Some(Err(after))) => {
                panic!("the base is not as before: {before}\nnor as after: {after}")
            }
            // If both are possible, the target of an undo is unknown.
            (Ok(_), Some(Ok(_))) => self.before_apply = None,
            (Ok(_), _) => {}
            (Err(_), Some(Ok(_))) => {
                self.before_apply = (!is_undo).then(|| self.base.clone());
            }
        }
        if is_after {
            self.count("of them done");
        }
        self.base = found.into_iter().map(Span::exactly).collect();
    }
}

/// Kills on request.
fn kill_when(armed: &Receiver<Duration>, pid: Pid, control: &Control) {
    let delay = armed.recv().unwrap_or_default();
    std::thread::sleep(delay);
    let _undisturbed = control.undisturbed.lock().unwrap();
    control.killed.store(true, Ordering::SeqCst);
    kill(pid, Signal::SIGKILL).unwrap();
}
