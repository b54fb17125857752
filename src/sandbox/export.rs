//! Exports or describes a state to a pipe, and imports archives or a described state from one.

use std::sync::atomic::Ordering;

use nix::unistd::geteuid;

use crate::error::{Attempt, Error, Kind, Result};
use crate::fs::{PathEdits, State};
use crate::sandbox::states::checkpoint_of;
use crate::sandbox::transfer::FrameWriter;
use crate::sandbox::{
    DescribeTerms, Described, Detail, ExportTerms, Exported, ImportTerms, Imported, Restored, Rev,
    Sandbox,
};
use crate::store::archive::Flaw;
use crate::store::layer::LayerInfo;
use crate::store::record::Header;
use crate::timeline::Target;
use crate::timeline::archive::{Describer, describe_edits};
use crate::timeline::diff::PathChange;
use crate::timeline::export;
use crate::timeline::import::{Form, Limits, Onto, Received};
use crate::timeline::mounts::Mounts;
use crate::timeline::restore::RestoreOutcome;

impl Sandbox {
    /// Writes a state, or its difference to an older one, as a tar archive to the pipe.
    pub(super) fn export(&self, terms: &ExportTerms, interrupts: u64) -> Result<Exported> {
        let go = || self.interrupts.load(Ordering::SeqCst) == interrupts;
        let state = self.fixed_state(&terms.state)?;
        let since = terms.since.as_ref().map(|rev| self.fixed_state(rev)).transpose()?;
        let what = export::Exported {
            state: &state,
            since: since.as_ref(),
            since_base: terms.since == Some(Rev::Base),
            is_layer: terms.is_layer,
        };
        let outcome = export::export(&what, terms.stream.sink(&go)?, &go)?;
        Ok(Exported {
            entries: outcome.entries,
            bytes: outcome.bytes,
            skipped: outcome.skipped,
            skipped_count: outcome.skipped_count,
        })
    }

    /// Writes the chunks of a state to the pipe, and then its tree blob.
    pub(super) fn describe_to_pipe(
        &self,
        terms: &DescribeTerms,
        interrupts: u64,
    ) -> Result<Described> {
        let go = || self.interrupts.load(Ordering::SeqCst) == interrupts;
        let target = self.fixed_target(&terms.state, "before push")?;
        let edits = terms.has_edits.then(|| self.fs().edit_histories());
        let past = self.history_of(target, terms.history);
        let mut describer = Describer::new(terms.is_thin, !past.is_empty());
        let mut to = FrameWriter::new(terms.stream.sink(&go)?);
        let mut describe = |target: Target| -> Result<u64> {
            let blob = describer.describe(&self.timeline.state_of(target)?, &mut to)?;
            to.end_archive().attempt(|| "write the state")?;
            to.bytes(&blob.encode()).attempt(|| "write the state")?;
            to.end_archive().attempt(|| "write the state")?;
            Ok(blob.entries())
        };
        for info in &past {
            let Header { layer, epoch, .. } = *info.header;
            let described = describe(Target { layer: Some(layer), epoch });
            described.map_err(|error| error.during(format!("describe checkpoint {layer}")))?;
        }
        let entries = describe(target)?;
        if let Some(edits) = edits {
            let encoded = describe_edits(self.fs(), edits, &mut to)?.encode();
            let refused = |Flaw(why)| Error::new(Kind::Failed, "describe the edit history", why);
            to.end_archive().attempt(|| "write the edits")?;
            to.bytes(&encoded.map_err(refused)?).attempt(|| "write the edits")?;
            to.end_archive().attempt(|| "write the edits")?;
        }
        to.commit().attempt(|| "write the state")?;
        let layer = target.layer.and_then(|id| self.timeline.store().layer(id));
        let as_checkpoint = |info: &LayerInfo| checkpoint_of(info, self.timeline.parent());
        let checkpoint = layer.as_ref().and_then(as_checkpoint);
        let history = past.iter().filter_map(as_checkpoint).collect();
        let head = match &terms.state {
            Rev::Head { head, .. } | Rev::Of { head, .. } => head.clone(),
            _ => self.head_name().to_owned(),
        };
        Ok(Described { head, checkpoint, history, entries })
    }

    /// The last `count` checkpoints that lead to a state, itself included, oldest first.
    fn history_of(&self, target: Target, count: u64) -> Vec<LayerInfo> {
        let Some(layer) = target.layer.filter(|_| count > 0) else { return Vec::new() };
        let is_checkpoint = |info: &LayerInfo| {
            info.seal.as_ref().is_some_and(|seal| !seal.automatic) && self.fs().sees(info)
        };
        let mut line = self.timeline.lineage_to(layer);
        line.retain(is_checkpoint);
        line.truncate(usize::try_from(count).unwrap_or(usize::MAX));
        line.reverse();
        line
    }

    /// The state that `rev` names. A tree as it is now is sealed first, so that programs that go on
    /// writing do not change it.
    fn fixed_state(&self, rev: &Rev) -> Result<State> {
        self.timeline.state_of(self.fixed_target(rev, "before export")?)
    }

    fn fixed_target(&self, rev: &Rev, why: &str) -> Result<Target> {
        match rev {
            Rev::Now => self.timeline.seal_for_other(why),
            Rev::Head { head, back: 0 } => self.seen_head(head)?.timeline.seal_for_other(why),
            Rev::Back(_)
            | Rev::Base
            | Rev::Id(_)
            | Rev::Name(_)
            | Rev::Of { .. }
            | Rev::Head { .. } => self.target(rev),
        }
    }

    /// Replaces the tree of this head, or of another one, by that of archives from the pipe.
    pub(super) fn import(&self, terms: &ImportTerms, interrupts: u64) -> Result<Imported> {
        let Some(into) = terms.into.as_deref().filter(|into| *into != self.head_name()) else {
            return self.import_here(terms, self, interrupts);
        };
        if self.timeline.head_list()?.iter().any(|head| head.name == into) {
            let other = self.seen_head(into)?;
            return other.import_here(terms, self, interrupts);
        }
        self.check_seen(into)?;
        self.timeline.check_new_head(into)?;
        let mut received = self.receive(terms, self, interrupts)?;
        let made = self.timeline.fork(&[into.to_owned()], Some(received.target));
        made.inspect_err(|error| {
            if !error.is_done {
                self.timeline.drop_received(&received);
            }
        })?;
        let edits = match received.edits.take() {
            Some(edits) => self.seen_head(into).and_then(|head| head.adopt(edits)),
            None => Ok(0),
        };
        let edits = edits.map_err(|error| error.after(format!("head '{into}' was made")))?;
        let nothing = Restored {
            to: terms.name.clone(),
            before: None,
            undo: None,
            detached: Vec::new(),
            changes: self.lister(Detail::NameStatus).finish(),
        };
        Ok(Imported { edits, ..imported(terms, into, received, nothing, true) })
    }

    /// Imports into this head. `asked` is the sandbox that the request was sent to.
    fn import_here(
        &self,
        terms: &ImportTerms,
        asked: &Sandbox,
        interrupts: u64,
    ) -> Result<Imported> {
        let mut received = self.receive(terms, asked, interrupts)?;
        let mounts = if terms.detach_mounts { Mounts::Detach } else { Mounts::Refuse };
        let mut lister = self.lister(Detail::NameStatus);
        let mut list = |from: &State, to: &State, change: PathChange| lister.add(from, to, &change);
        let what = (form_of(terms), terms.name.as_str());
        let shown = self.timeline.show_received(&received, what, (mounts, &mut list));
        let RestoreOutcome { before, undo, detached } = shown.inspect_err(|error| {
            if !error.is_done {
                self.timeline.drop_received(&received);
            }
        })?;
        // Last, because they replace what the head has noted of the files that the pull replaced.
        let edits = received.edits.take().map_or(Ok(0), |edits| self.adopt(edits))?;
        let changes = lister.finish();
        let restored = Restored { to: terms.name.clone(), before, undo, detached, changes };
        let head = self.head_name();
        Ok(Imported { edits, ..imported(terms, head, received, restored, false) })
    }

    /// Replaces edit histories by those that came with a state.
    fn adopt(&self, edits: Vec<PathEdits>) -> Result<u64> {
        let adopted = self.timeline.adopt_edits(edits);
        adopted.map_err(|error| error.after("the pull was done".to_owned()))
    }

    fn receive(&self, terms: &ImportTerms, asked: &Sandbox, interrupts: u64) -> Result<Received> {
        let go = || asked.interrupts.load(Ordering::SeqCst) == interrupts;
        let form = form_of(terms);
        let state = match &terms.onto {
            None | Some(Rev::Now) => self.timeline.seal_for_import(form, &terms.name)?,
            Some(rev) => self.target(rev)?,
        };
        let onto = Onto {
            state,
            only_changes: terms.onto.is_some(),
            has_whiteouts: terms.is_layers || terms.onto.is_some(),
        };
        let space = self.fs().statfs().attempt(|| "measure the free space")?;
        let content = space.available.saturating_mul(u64::from(space.block_size));
        let devices = geteuid().is_root();
        let limits = Limits { content, devices, ..Limits::default() };
        let mut archives = terms.stream.frames(&go)?;
        match form {
            Form::Tar => self.timeline.receive(&mut archives, onto, limits, &terms.name),
            Form::State => {
                let after = terms.after.map_or(Ok(onto.state), |id| self.sealed_target(id))?;
                let head = terms.into.as_deref().unwrap_or_else(|| self.head_name());
                self.timeline.receive_states(&mut archives, after, limits, (head, &terms.name))
            }
        }
    }
}

fn form_of(terms: &ImportTerms) -> Form {
    if terms.is_state { Form::State } else { Form::Tar }
}

fn imported(
    terms: &ImportTerms,
    head: &str,
    received: Received,
    restored: Restored,
    is_new_head: bool,
) -> Imported {
    Imported {
        name: terms.name.clone(),
        head: head.to_owned(),
        is_new_head,
        entries: received.entries,
        left_out: received.left_out,
        checkpoints: received.checkpoints,
        edits: 0,
        unnamed: received.unnamed,
        before: restored.before,
        undo: restored.undo,
        detached: restored.detached,
        changes: restored.changes,
    }
}
