//! Finds the state that a [`Rev`] names, and describes checkpoints.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::fs::{Fence, State};
use crate::sandbox::{Checkpoint, Rev, Sandbox};
use crate::store::checkpoint_names::{CheckpointNames, Named};
use crate::store::layer::LayerInfo;
use crate::timeline::Target;
use crate::types::LayerId;

impl Sandbox {
    /// All sealed states, newest first.
    pub(super) fn checkpoints(&self) -> Vec<Checkpoint> {
        let parent = self.timeline.parent();
        let sealed = self.timeline.sealed();
        let sees = self.fs().visibility();
        let seen = sealed.iter().rev().filter(|info| sees(info));
        seen.filter_map(|info| checkpoint_of(info, parent)).collect()
    }

    /// All sealed states of the store.
    pub fn states(&self) -> BTreeSet<LayerId> {
        self.timeline.sealed().iter().map(|info| info.header.layer).collect()
    }

    /// Hides all other states of the store, and the other heads, from the mount of this head and
    /// from its clients. The states that this head makes are seen.
    pub fn show_only(&self, states: BTreeSet<LayerId>) {
        self.fs().set_fence(Fence { head: self.head_name().to_owned(), states });
    }

    /// Refuses to read another head if only some states are seen.
    pub(super) fn check_seen(&self, head: &str) -> Result<()> {
        if self.fs().fence().is_none_or(|fence| fence.head == head) {
            return Ok(());
        }
        let attempt = format!("read head '{head}'");
        Err(Error::new(Kind::InUse, attempt, "an attempt beside others has its own head only"))
    }

    pub(super) fn checkpoint_info(&self, id: LayerId) -> Result<Checkpoint> {
        let info = self.timeline.store().layer(id);
        info.as_ref()
            .and_then(|info| checkpoint_of(info, self.timeline.parent()))
            .ok_or_else(|| no_checkpoint(&Rev::Id(id)))
    }

    pub(super) fn checkpoint(&self, name: Option<String>, message: String) -> Result<Checkpoint> {
        self.checkpoint_info(self.timeline.checkpoint(name, message, None)?)
    }

    /// As [`Sandbox::checkpoint`], before the checkpoint is on the disk.
    pub(super) fn checkpoint_early(
        &self,
        name: Option<String>,
        message: String,
    ) -> Result<Checkpoint> {
        let (id, seal) = self.early.make(&self.timeline, (name, message))?;
        let info = self.timeline.store().layer(id);
        let info = info.map(|info| LayerInfo { seal: Some(Arc::new(seal)), ..info });
        info.as_ref()
            .and_then(|info| checkpoint_of(info, Some(id)))
            .ok_or_else(|| no_checkpoint(&Rev::Id(id)))
    }

    /// The last checkpoint below the head that was made on request.
    pub(super) fn last_checkpoint(&self) -> Option<LayerId> {
        made_on_request(self.timeline.ancestry()).next()
    }

    pub(super) fn sealed_target(&self, id: LayerId) -> Result<Target> {
        let is_seen = |layer: &LayerInfo| layer.seal.is_some() && self.fs().sees(layer);
        let info = self.timeline.store().layer(id).filter(is_seen);
        let info = info.ok_or_else(|| no_checkpoint(&Rev::Id(id)))?;
        Ok(Target { layer: Some(id), epoch: info.header.epoch })
    }

    pub(super) fn find(&self, rev: &Rev) -> Result<Checkpoint> {
        self.checkpoint_info(self.checkpoint_named(rev)?)
    }

    /// The checkpoint that `rev` names.
    pub(super) fn checkpoint_named(&self, rev: &Rev) -> Result<LayerId> {
        self.target(rev)?.layer.ok_or_else(|| no_checkpoint(rev))
    }

    /// The sealed state that `rev` names, or the base.
    pub(super) fn target(&self, rev: &Rev) -> Result<Target> {
        let id = match rev {
            Rev::Base => return Ok(Target { layer: None, epoch: self.timeline.base_epoch() }),
            Rev::Now => {
                let why = "'@' is the tree as it is now";
                return Err(Error::new(Kind::Usage, "find checkpoint '@'", why));
            }
            Rev::Id(id) => Some(*id),
            Rev::Back(n) => {
                made_on_request(self.timeline.lineage()).nth((*n as usize).saturating_sub(1))
            }
            Rev::Name(name) => self.only_one(rev, self.names().find(name))?,
            Rev::Of { head, name } => {
                self.check_seen(head)?;
                self.only_one(rev, self.names().find_of(head, name))?
            }
            Rev::Head { head, back: 0 } => {
                let why = format!("'{head}@' is the tree of head '{head}' as it is now");
                return Err(Error::new(Kind::Usage, format!("find checkpoint '{rev}'"), why));
            }
            Rev::Head { head, back } => {
                self.check_seen(head)?;
                made_on_request(self.timeline.lineage_of(head)?).nth(*back as usize - 1)
            }
        };
        self.sealed_target(id.ok_or_else(|| no_checkpoint(rev))?)
    }

    /// The names of checkpoints, as this head uses them.
    pub(super) fn names(&self) -> CheckpointNames<'_> {
        let store = self.timeline.store();
        store.checkpoint_names(self.head_name(), self.fs().visibility())
    }

    /// The layer that `rev` means. An error lists the checkpoints if there are several.
    fn only_one(&self, rev: &Rev, named: Named) -> Result<Option<LayerId>> {
        let several = match named {
            Named::Nothing => return Ok(None),
            Named::One(layer) => return Ok(Some(layer)),
            Named::Several(several) => several,
        };
        let why = format!("it can be {}", self.names().labels(&several).join(", "));
        Err(Error::new(Kind::Usage, format!("find checkpoint '{rev}'"), why)
            .hint("name one of these; a number is the number of a checkpoint in 'jailfs log'"))
    }

    /// The state that `rev` names. For [`Rev::Now`], dirty pages are flushed first.
    pub(super) fn state(&self, rev: &Rev) -> Result<State> {
        match rev {
            Rev::Now => {
                self.timeline.flush()?;
                Ok(self.fs().state())
            }
            Rev::Head { head, back: 0 } => {
                self.check_seen(head)?;
                self.timeline.state_of_head(head)
            }
            Rev::Back(_)
            | Rev::Base
            | Rev::Id(_)
            | Rev::Name(_)
            | Rev::Of { .. }
            | Rev::Head { .. } => self.timeline.state_of(self.target(rev)?),
        }
    }

    /// A state for people: `base`, or the number and name of the checkpoint.
    pub(super) fn describe(&self, target: Target) -> String {
        let Some(id) = target.layer else { return "base".to_owned() };
        let name = self.timeline.store().layer(id).and_then(|l| l.seal?.name.clone());
        name.map_or_else(|| format!("checkpoint {id}"), |name| format!("checkpoint {id} '{name}'"))
    }
}

/// The sealed layer as a checkpoint; `None` if it is not sealed. `parent` is the layer below the
/// head.
pub(super) fn checkpoint_of(info: &LayerInfo, parent: Option<LayerId>) -> Option<Checkpoint> {
    let seal = info.seal.as_ref()?;
    Some(Checkpoint {
        id: info.header.layer,
        head: info.header.head.clone(),
        name: seal.name.clone(),
        message: seal.message.clone(),
        time: seal.time,
        parent: info.header.parent,
        epoch: info.header.epoch,
        automatic: seal.automatic,
        current: parent == Some(info.header.layer),
    })
}

/// Those of `states` that are not automatic seals.
fn made_on_request(states: Vec<LayerInfo>) -> impl Iterator<Item = LayerId> {
    let is_made = |l: &LayerInfo| l.seal.as_ref().is_some_and(|seal| !seal.automatic);
    states.into_iter().filter(is_made).map(|l| l.header.layer)
}

fn no_checkpoint(rev: &Rev) -> Error {
    Error::new(Kind::NoStore, format!("find checkpoint '{rev}'"), "there is no such checkpoint")
        .hint("'jailfs log' lists them")
}
