//! Sealing layers, and making sealed states checkpoints.
//!
//! Always true:
//! * a layer is sealed only after everything in it was synced;
//! * a checkpoint is a sealed layer whose seal is not automatic.

use crate::error::{Error, Kind, Result};
use crate::fs::{Report, State};
use crate::store::Store;
use crate::store::layer::Upper;
use crate::store::record::{LayerKind, OpVerb, Seal};
use crate::sys::clock;
use crate::timeline::{Target, Timeline};
use crate::types::{LayerId, Name};

impl Timeline {
    /// Seals the present state and makes it a checkpoint. Calls `report` as soon as the checkpoint
    /// survives the end of this process.
    ///
    /// # Errors
    /// The name is taken or not valid, or the store failed. An error after the seal says that the
    /// checkpoint was made.
    pub fn checkpoint(
        &self,
        name: Option<String>,
        message: String,
        report: Option<Report<'_>>,
    ) -> Result<LayerId> {
        let _operation = self.lock_operation();
        // A checkpoint whose seal failed may have the same name.
        self.fs.finish_seals()?;
        if let Some(name) = &name {
            self.check_name(name)?;
        }
        check_message(&message)?;
        self.flush()?;
        let layer = self.fs.upper_layer();
        let description = description(layer, name.as_deref());
        let seal = Seal { name, message, time: clock::now(), automatic: false };
        let is_made =
            || self.store.layer(layer).is_some_and(|info| info.seal.as_deref() == Some(&seal));
        let made = |error: Error| error.after(format!("checkpoint {description} was made"));
        self.seal(seal.clone(), report)
            .map_err(|error| if is_made() { made(error) } else { error })?;
        let to = Target { layer: Some(layer), epoch: self.epoch() };
        self.log_operation(OpVerb::Checkpoint, description.clone(), to).map_err(made)?;
        Ok(layer)
    }

    /// Checks that a new checkpoint can have this name.
    ///
    /// # Errors
    /// [`Kind::Usage`] if no checkpoint can have it, [`Kind::Failed`] if one of this head has it.
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        let attempt = || format!("checkpoint '{name}'");
        if !is_valid_name(name) {
            return Err(Error::new(Kind::Usage, attempt(), "not a valid checkpoint name")
                .hint("a name is not a number, not 'base', and has no '/' and no '@'"));
        }
        match self.store.checkpoint_names(&self.head, |_| true).own(name) {
            Some(other) => Err(Error::new(
                Kind::Failed,
                attempt(),
                format!("checkpoint {other} of this head has this name"),
            )
            .hint("choose another name, or none")),
            None => Ok(()),
        }
    }

    /// Seals the upper layer and continues in a new one on top of it. Calls `report` as
    /// [`crate::fs::Fs::seal`] does.
    pub(super) fn seal(&self, seal: Seal, report: Option<Report<'_>>) -> Result<LayerId> {
        let during = |e: Error| e.during("seal the tree");
        let below = self.fs.upper_layer();
        let next = self
            .store
            .create_layer(Some(below), &self.head, self.epoch(), LayerKind::Continues)
            .map_err(during)?;
        let above = next.layer();
        let (layer, state) = self.fs.seal(next, seal, report).map_err(during)?;
        self.trees.lock().keep(layer, state.tree);
        self.with_reserve(|| self.store.set_head(&self.head, above)).map_err(during)?;
        Ok(layer)
    }

    /// Seals the present state if it has unsealed changes. Returns the sealed state, and the layer
    /// if this call sealed one.
    pub(super) fn seal_present(&self, why: &str) -> Result<(Target, Option<LayerId>)> {
        let epoch = self.epoch();
        if self.is_sealed() {
            return Ok((Target { layer: self.parent(), epoch }, None));
        }
        let layer = self.seal(automatic(format!("before {why}")), None)?;
        let sealed = Target { layer: Some(layer), epoch };
        self.log_operation(OpVerb::Seal, format!("before {why}"), sealed)?;
        Ok((sealed, Some(layer)))
    }

    /// Whether a sealed state, or the base, is what the tree shows. If the seal of the layer below
    /// the upper one failed, that layer is sealed by the next seal that succeeds.
    pub(super) fn is_sealed(&self) -> bool {
        let is_sealed = |layer| self.store.layer(layer).is_some_and(|info| info.seal.is_some());
        !self.fs.upper_is_changed() && self.parent().is_none_or(is_sealed)
    }

    /// Logs that `layer` seals the writes that arrived until the switch to another state, and
    /// caches the tree of it.
    pub(super) fn log_late_seal(
        &self,
        layer: LayerId,
        state: &State,
        message: String,
    ) -> Result<()> {
        self.trees.lock().keep(layer, state.tree.clone());
        let late = Target { layer: Some(layer), epoch: state.lower.epoch() };
        self.log_operation(OpVerb::Seal, message, late).map(drop)
    }
}

/// A checkpoint in the log of operations.
pub(super) fn description(layer: LayerId, name: Option<&str>) -> String {
    name.map_or_else(|| layer.to_string(), |name| format!("{layer} '{name}'"))
}

/// Refuses a message with a NUL byte. Without one, no seal can hold bytes that read as a frame of
/// the journal, which is never written. So the seal can be reported before it is written.
fn check_message(message: &str) -> Result<()> {
    if message.contains('\0') {
        let why = "the message has a NUL byte";
        return Err(Error::new(Kind::Usage, "make a checkpoint", why));
    }
    Ok(())
}

/// Whether a checkpoint can have this name. `HEAD@NAME` names one of a head.
pub(super) fn is_valid_name(name: &str) -> bool {
    let is_special = name == "base" || name.bytes().all(|b| b.is_ascii_digit());
    !is_special && !name.contains('@') && Name::new(name.as_bytes()).is_ok()
}

/// Seals a layer that is no longer the upper layer of a head.
///
/// It is synced first. The seal asserts that all records before it were synced. A power cut may
/// keep the seal and tear what is synced together with it, and the head's record already names
/// another layer.
pub(super) fn seal_unused(store: &Store, layer: &mut Upper, message: &str) -> Result<()> {
    seal_unused_as(store, layer, automatic(message.to_owned()))
}

/// As [`seal_unused`], with this seal.
pub(super) fn seal_unused_as(store: &Store, layer: &mut Upper, seal: Seal) -> Result<()> {
    store.identities().lock().sync()?;
    layer.sync()?;
    store.seal_layer(layer, seal)
}

/// A seal that does not make its layer a checkpoint.
pub(super) fn automatic(message: String) -> Seal {
    Seal { name: None, message, time: clock::now(), automatic: true }
}
