//! Makes described states: checkpoints, oldest first, and the state that a head will show.
//!
//! Each state becomes a layer on the one before it, so what they have in common is stored once. All
//! layers are removed if any of them fails.

use super::builder::Builder;
use super::edits::receive_edits;
use super::state::{self, Incoming, Relied};
use super::{Archives, Limits, Received, purge, write_edits};
use crate::error::{Attempt, Error, Result};
use crate::fs::State;
use crate::store::layer::{LayerInfo, Upper};
use crate::store::record::{LayerKind, Seal};
use crate::sys::memory;
use crate::timeline::checkpoint::{automatic, is_valid_name, seal_unused_as};
use crate::timeline::{Target, Timeline};
use crate::types::LayerId;

impl Timeline {
    /// Receives states into sealed layers that no head shows yet, for the head `head`, which is
    /// this one or does not exist yet. The first one lies on `onto`. The result is the last one, or
    /// `onto` if there is none.
    ///
    /// # Errors
    /// As [`Timeline::receive`].
    pub fn receive_states(
        &self,
        archives: &mut dyn Archives,
        onto: Target,
        limits: Limits,
        (head, name): (&str, &str),
    ) -> Result<Received> {
        let mut received = Received {
            target: onto,
            layers: Vec::new(),
            checkpoints: 0,
            edits: None,
            unnamed: Vec::new(),
            entries: 0,
            left_out: 0,
        };
        let result = self.receive_each(archives, limits, (head, name), &mut received);
        memory::trim();
        match result {
            Ok(()) => Ok(received),
            Err(error) => {
                self.drop_layers(&received.layers);
                Err(error)
            }
        }
    }

    fn receive_each(
        &self,
        archives: &mut dyn Archives,
        mut limits: Limits,
        (head, name): (&str, &str),
        received: &mut Received,
    ) -> Result<()> {
        let mut before = self.state_of(received.target)?;
        let mut relied = Relied::default();
        while archives.next()? {
            if received.edits.is_some() {
                return Err(Error::damage("read the state", "a state after the edits"));
            }
            let Target { layer: below, epoch } = received.target;
            let kind = LayerKind::Branches;
            let mut layer = self.store().create_layer(below, head, epoch, kind)?;
            let id = layer.layer();
            let made = self.receive_state(
                (&mut layer, &before),
                archives,
                (&mut limits, &mut relied),
                received,
            );
            let made = made.and_then(|(after, seal)| {
                let seal = seal.unwrap_or_else(|| automatic(format!("pull {name}")));
                self.seal_received(&mut layer, seal, (head, below), received).map(|()| after)
            });
            before = match made {
                Ok(after) => after,
                Err(error) => return Err(self.withdraw_received(layer, error)),
            };
            self.trees.lock().keep(id, before.tree.clone());
            received.layers.push(id);
            received.target = Target { layer: Some(id), epoch };
        }
        Ok(())
    }

    /// Receives one state into a layer. Returns it, and its seal if it is a checkpoint. Edits leave
    /// the state as it was before.
    fn receive_state(
        &self,
        (layer, before): (&mut Upper, &State),
        archives: &mut dyn Archives,
        (limits, relied): (&mut Limits, &mut Relied),
        received: &mut Received,
    ) -> Result<(State, Option<Seal>)> {
        let mut builder = Builder::new(before.clone(), self.store(), layer, *limits);
        builder.begin_archive();
        let (incoming, kind) = Incoming::begin(archives.bytes())?;
        let seal = match kind {
            state::Kind::Last => None,
            state::Kind::Checkpoint(seal) => Some(seal),
            state::Kind::Edits(document) => {
                received.edits = Some(receive_edits(&mut builder, document, incoming)?);
                archives.finish()?;
                return Ok((before.clone(), None));
            }
        };
        state::add_all(&mut builder, incoming, relied)?;
        archives.finish()?;
        purge::unseen(&mut builder).attempt(|| "remove what the state does not have")?;
        // The space on the disk is that of all states together.
        limits.content = builder.limits.content;
        (received.entries, received.left_out) =
            (builder.entries, received.left_out + builder.left_out);
        let after = builder.finish();
        write_edits(layer, before.tree.edits_to(&after.tree))?;
        Ok((after, seal))
    }

    /// Seals a layer on `below`. A checkpoint whose name another one of the head has gets none. A
    /// head that does not exist yet will have the checkpoints below it.
    fn seal_received(
        &self,
        layer: &mut Upper,
        mut seal: Seal,
        (head, below): (&str, Option<LayerId>),
        received: &mut Received,
    ) -> Result<()> {
        let _operation = self.lock_operation();
        if let Some(name) = &seal.name {
            if !is_valid_name(name) {
                let why = format!("'{}' is not a name of a checkpoint", name.escape_debug());
                return Err(Error::damage("read the history", why));
            }
            let line = below.map(|below| self.lineage_to(below)).unwrap_or_default();
            let has_name = |info: &LayerInfo| {
                info.seal.as_ref().is_some_and(|seal| seal.name.as_ref() == Some(name))
            };
            let own = self.store().checkpoint_names(head, |_| true).own(name);
            if own.is_some() || line.iter().any(has_name) {
                received.unnamed.extend(seal.name.take());
            }
        }
        received.checkpoints += u64::from(!seal.automatic);
        self.with_reserve(|| seal_unused_as(self.store(), layer, seal.clone()))
    }
}
