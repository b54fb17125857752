//! Serves a race: the forks of one head, of which another process, or this one, runs the commands.
//!
//! Always true:
//! * Each attempt has a head, a mount that its client made, and a control socket. That admits what
//!   a command of `run` may ask for, and only for its own head.
//! * A race that is dropped before [`ServedRace::finish`], because its client has died, leaves no
//!   mount. Its forks are listed as abandoned.
//! * The store stays open until the race is over, also while no head is mounted.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::door::{Access, MadeForks, ServedApart, serve_commands};
use super::head::ServedHead;
use super::heads::{Heads, Held};
use super::plan::{Choice, path_bytes};
use crate::control::{Answer, Listener, RaceOrder};
use crate::error::{Error, Kind, Result};
use crate::fuse::{Handed, Wake};
use crate::sandbox::{Race, Reply, Request, Rev, Sandbox};
use crate::store::io::codec;
use crate::types::LayerId;

/// Tells the control sockets of attempts apart.
static SOCKETS: AtomicU32 = AtomicU32::new(1);

/// A race. Dropping it ends its mounts.
pub struct ServedRace {
    heads: Arc<Heads>,
    race: Race,
    /// The states that existed when the forks were made. An attempt sees these, and those that it
    /// makes.
    states: BTreeSet<LayerId>,
    /// The process whose descendants are the commands.
    owner: u32,
    /// The options of the mount of the caller's head, if that is mounted.
    mounted: Option<Choice>,
    tracks: Mutex<BTreeMap<String, Track>>,
    /// Keeps the store open. Dropped last: the daemon may end with it.
    _held: Held,
}

/// An attempt whose head is open. Dropping it ends the mount, and then closes the head.
struct Track {
    served: Option<ServedApart>,
    /// Until the mount is served.
    listener: Option<Listener>,
    sandbox: Arc<Sandbox>,
}

/// A mount of an attempt, as its client describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptPlan {
    /// Where the command finds the tree; absolute.
    #[serde(with = "path_bytes")]
    pub tree: PathBuf,
    /// `st_dev` of the files in the mount.
    pub dev: u64,
    /// Whether other users may enter.
    pub all_users: bool,
    /// The options. Those of the collection are of the caller's mount, if there is one.
    pub choice: Choice,
}

impl AttemptPlan {
    /// The plan as the bytes of an order.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn encode(&self) -> Result<Vec<u8>> {
        codec::encode(self).map_err(|error| Error::new(Kind::Failed, "ask for a mount", error))
    }
}

impl ServedRace {
    /// Makes `attempts` forks of the head of `caller`. Their commands are descendants of `owner`.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn begin(
        heads: &Arc<Heads>,
        caller: &Arc<Sandbox>,
        attempts: u32,
        owner: u32,
    ) -> Result<ServedRace> {
        let held = Heads::hold(heads, Arc::clone(caller));
        let mounted = heads.get(caller.head_name()).map(|head| head.choice().clone());
        let race = caller.begin_race(attempts)?;
        Ok(ServedRace {
            heads: Arc::clone(heads),
            race,
            states: caller.states(),
            owner,
            mounted,
            tracks: Mutex::default(),
            _held: held,
        })
    }

    /// The names of the forks.
    pub fn names(&self) -> &[String] {
        self.race.names()
    }

    /// The state that they begin with.
    pub fn start(&self) -> &Rev {
        self.race.start()
    }

    /// Handles a request in a head. The state of a checkpoint stays until the race is over.
    ///
    /// # Errors
    /// Those of the sandbox.
    pub fn call(&self, head: &str, request: Request) -> Result<Reply> {
        let reply = self.heads.handle(head, request)?;
        self.note(&reply);
        Ok(reply)
    }

    /// Has the collection keep the state of a checkpoint.
    pub(super) fn note(&self, reply: &Reply) {
        if let Reply::Checkpoint(made) = reply {
            self.race.keep(made.id);
        }
    }

    /// Opens the fork of an attempt, and listens for its command. Returns the name of the socket in
    /// the store.
    ///
    /// # Errors
    /// It is no fork of this race, or the socket cannot be made.
    pub fn prepare(&self, head: &str) -> Result<String> {
        self.check(head)?;
        let caller = self.race.caller();
        let sandbox = caller.head(head)?;
        sandbox.show_only(self.states.clone());
        let number = SOCKETS.fetch_add(1, Ordering::Relaxed);
        let listener = Listener::bind_numbered(caller.store_path(), number)?.owned_by(self.owner);
        let socket = listener.name().to_owned();
        let track = Track { sandbox, listener: Some(listener), served: None };
        let before = self.tracks.lock().insert(head.to_owned(), track);
        drop(before);
        Ok(socket)
    }

    /// Serves the fork of an attempt in a mount that is visible to its command at `tree`.
    ///
    /// # Errors
    /// The fork is not [prepared](ServedRace::prepare), or the mount cannot be served.
    pub fn serve(&self, head: &str, handed: Handed, tree: &Path, choice: Choice) -> Result<()> {
        let attempt = || format!("mount head '{head}'");
        let prepared = {
            let mut tracks = self.tracks.lock();
            let track = tracks.get_mut(head);
            track.and_then(|track| Some((Arc::clone(&track.sandbox), track.listener.take()?)))
        };
        let Some((sandbox, listener)) = prepared else {
            return Err(Error::new(Kind::Usage, attempt(), "it is not prepared for an attempt"));
        };
        let choice = match &self.mounted {
            Some(mounted) => of_attempt(choice, mounted),
            None => choice,
        };
        let made = || ServedHead::adopt(sandbox, handed, tree, &choice);
        if !self.heads.mount(head, made)? {
            return Err(Error::new(Kind::Failed, attempt(), "the store is being closed"));
        }
        let mut served = ServedApart::of(&self.heads, head);
        let access = Access::OfRun { head: head.to_owned(), forked: MadeForks::default() };
        served.serve_clients(serve_commands(&self.heads, listener, access)?);
        if let Some(track) = self.tracks.lock().get_mut(head) {
            track.served = Some(served);
        }
        Ok(())
    }

    /// Fails if the mount of an attempt was aborted or unmounted.
    ///
    /// # Errors
    /// `Failed`.
    pub fn check_served(&self, head: &str) -> Result<()> {
        self.heads.check_served(head)
    }

    /// Ends the mount of an attempt, and closes its head. When it is opened again, it has no
    /// limits, so that its tree can be sealed.
    pub fn end(&self, head: &str) {
        let ended = self.tracks.lock().remove(head);
        // This waits, and must not keep the other attempts waiting.
        drop(ended);
    }

    /// Makes the tree of an attempt equal to a sealed state.
    ///
    /// # Errors
    /// Those of the store.
    pub fn reset(&self, head: &str, to: LayerId) -> Result<()> {
        self.check(head)?;
        self.race.caller().head(head)?.reset_to(&Rev::Id(to)).map(drop)
    }

    /// Makes the fork of an attempt begin again with the first state.
    ///
    /// # Errors
    /// Those of the store. The fork may be gone then.
    pub fn replace(&self, head: &str) -> Result<()> {
        self.check(head)?;
        self.end(head);
        self.race.replace(head)
    }

    /// Drops forks of the race, the forks that their commands made, and the checkpoints of all
    /// these.
    ///
    /// # Errors
    /// The first error. The others are dropped all the same.
    pub fn drop_forks(&self, heads: &[String]) -> Result<()> {
        heads.iter().for_each(|head| self.end(head));
        self.race.drop_forks(heads)
    }

    /// Ends the race. The forks that are left stay.
    pub fn finish(&self) {
        self.close_all();
        self.race.finish();
    }

    fn close_all(&self) {
        self.names().iter().for_each(|head| self.end(head));
    }

    fn check(&self, head: &str) -> Result<()> {
        if self.names().iter().any(|name| name == head) {
            return Ok(());
        }
        Err(Error::new(Kind::Usage, format!("use head '{head}'"), "it is no fork of this race"))
    }

    /// Does what the client of a control socket orders.
    ///
    /// # Errors
    /// Those of the order.
    pub(super) fn order(&self, head: &str, order: RaceOrder) -> Result<Answer> {
        match order {
            RaceOrder::Begin(_) => {
                let why = "the connection has a race already";
                return Err(Error::new(Kind::Usage, "begin a race", why));
            }
            RaceOrder::Prepare => return self.prepare(head).map(Answer::Socket),
            RaceOrder::Serve { plan, descriptors } => {
                let plan: AttemptPlan = codec::decode(&plan)
                    .map_err(|error| Error::new(Kind::Usage, "read the plan of a mount", error))?;
                let handed = Handed::received(descriptors.take(), plan.dev, plan.all_users)?;
                self.serve(head, handed, &plan.tree, plan.choice)?;
                return Ok(Answer::Mounted);
            }
            RaceOrder::Check => self.check_served(head)?,
            RaceOrder::End => self.end(head),
            RaceOrder::Reset(to) => self.reset(head, to)?,
            RaceOrder::Replace => self.replace(head)?,
            RaceOrder::Drop(heads) => self.drop_forks(&heads)?,
            RaceOrder::Finish => self.finish(),
        }
        Ok(Answer::Reply(Box::new(Reply::Done)))
    }
}

impl Drop for ServedRace {
    fn drop(&mut self) {
        self.close_all();
        if let Some(choice) = &self.mounted {
            self.race.caller().set_policy(choice.policy(), choice.max_bytes);
        }
    }
}

/// The options of an attempt of a head that is mounted with the options `mounted`: its own limits
/// and snapshot directory. The others, such as the collection and `threads`, are those of the
/// mount.
fn of_attempt(choice: Choice, mounted: &Choice) -> Choice {
    Choice {
        max_bytes: choice.max_bytes.or(mounted.max_bytes),
        max_files: choice.max_files,
        snapdir: choice.snapdir,
        snapname: choice.snapname,
        writeback: choice.writeback || mounted.writeback,
        // A spinning thread for each attempt would take the CPUs from the attempts.
        wake: if mounted.wake == Wake::Spin { choice.wake } else { mounted.wake },
        // The kernel mounted the attempt without `sync` and `dirsync`.
        vfs: choice.vfs,
        read_only: false,
        ..mounted.clone()
    }
}
