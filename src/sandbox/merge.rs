//! Merges another head into this one, and lists what that changed.

use crate::error::{Error, Kind, Result};
use crate::fs::State;
use crate::sandbox::{Detail, MergeTerms, Merged, Sandbox};
use crate::timeline::diff::PathChange;
use crate::timeline::merge::{Glob, MergeOutcome, Rules};
use crate::timeline::mounts::Mounts;

/// The most conflicts that a reply lists.
pub const MAX_CONFLICTS: usize = 10_000;

impl Sandbox {
    pub(super) fn merge(&self, terms: &MergeTerms) -> Result<Merged> {
        let rules = self.rules(terms)?;
        let other = self.seen_head(&terms.head)?;
        let mounts = if terms.detach_mounts { Mounts::Detach } else { Mounts::Refuse };
        let mut lister = self.lister(Detail::NameStatus);
        let mut list = |from: &State, to: &State, change: PathChange| lister.add(from, to, &change);
        let outcome =
            self.timeline.merge(&other.timeline, &rules, terms.dry_run, (mounts, &mut list))?;
        let MergeOutcome { conflicts, unresolved, before, undo, detached } = outcome;
        let count = conflicts.len() as u64;
        let told = conflicts.into_iter().take(MAX_CONFLICTS);
        let conflicts = told.map(|c| (c.path, c.ours.to_string(), c.theirs.to_string())).collect();
        Ok(Merged {
            head: terms.head.clone(),
            into: self.head_name().to_owned(),
            conflicts,
            conflict_count: count,
            unresolved,
            before,
            undo,
            detached,
            changes: lister.finish(),
        })
    }

    fn rules(&self, terms: &MergeTerms) -> Result<Rules> {
        let unit = |text: &Vec<u8>| {
            Glob::parse(text).ok_or_else(|| {
                let text = String::from_utf8_lossy(text);
                Error::new(Kind::Usage, format!("merge '{}'", terms.head), "not a pattern of paths")
                    .hint(format!("'{text}' has no name, or a name '..'"))
            })
        };
        let labels = || (self.head_name().to_owned(), terms.head.clone());
        Ok(Rules {
            paths: match terms.paths.iter().any(crate::types::TreePath::is_root) {
                true => Vec::new(),
                false => terms.paths.clone(),
            },
            ours: terms.ours.clone(),
            theirs: terms.theirs.clone(),
            units: terms.units.iter().map(unit).collect::<Result<_>>()?,
            markers: terms.markers.then(labels),
        })
    }
}
