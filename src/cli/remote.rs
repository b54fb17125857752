//! The code that `push`, `pull` and `ls` share: how a registry is reached, and what they print.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;

use super::target::Target;
use super::{format, out};
use crate::artifact::{Artifact, Cache};
use crate::error::{Error, Kind, Result};
use crate::registry::{
    Environment, Limits, Meter, Options, PlainHttp, Progress, Reference, Repository,
};

/// How a registry is reached.
#[derive(Args)]
pub(super) struct Reach {
    /// Speak plain http: with a registry on this machine, or with HOST[:PORT] if that is named
    #[arg(long, value_name = "HOST", num_args = 0..=1, require_equals = true)]
    plain_http: Option<Option<String>>,
}

impl Reach {
    /// The repository of a reference.
    ///
    /// # Errors
    /// Plain http is asked for, and the registry is neither on this machine nor named.
    pub(super) fn open(&self, reference: &Reference) -> Result<Repository> {
        let plain_http = match &self.plain_http {
            None => PlainHttp::Never,
            Some(None) => PlainHttp::Loopback,
            Some(Some(host)) => PlainHttp::With(host.clone()),
        };
        let environment = Environment::new(std::env::vars_os());
        Repository::open(reference, &Options { environment, plain_http, limits: Limits::default() })
    }
}

/// The cache of the user: `$XDG_CACHE_HOME/jailfs` or `~/.cache/jailfs`. Without both, or if it
/// cannot be made, one that lives as long as the command.
pub(super) fn cache() -> Result<Cache> {
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|dir| dir.is_absolute());
    let dir = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    let Some(dir) = dir else { return Cache::temporary() };
    Cache::open(&dir.join("jailfs")).or_else(|error| {
        out::note(&format!("{error}; without it, later pushes and pulls move more bytes"));
        Cache::temporary()
    })
}

/// Names a store and a repository.
pub(super) fn key(target: &Target, reference: &Reference) -> String {
    let store: &Path = target.store();
    format!("{} {}/{}", store.display(), reference.registry, reference.name)
}

/// Runs `work` with a meter whose progress is shown on a terminal.
pub(super) fn with_progress<T>(
    verb: &str,
    work: impl FnOnce(&Meter<'_>) -> Result<T>,
) -> Result<T> {
    let mut report = |progress: Progress| {
        let (moved, total) = (format::size(progress.moved), format::size(progress.total));
        let rate = format::size(progress.rate as u64);
        out::progress(&format!("jailfs: {verb} {moved} of {total}, {rate}/s"));
    };
    let done = work(&Meter::new(0, &mut report));
    out::progress("");
    done
}

/// A line of `--json`.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Line<'a> {
    Pushed {
        #[serde(flatten)]
        what: What<'a>,
        blobs: u64,
        bytes: u64,
        was_there: bool,
    },
    Pulled {
        #[serde(flatten)]
        what: What<'a>,
        bytes: u64,
    },
    Listed {
        tag: &'a str,
        #[serde(flatten)]
        what: What<'a>,
    },
}

/// A checkpoint in a registry.
#[derive(Serialize)]
pub(super) struct What<'a> {
    reference: String,
    digest: String,
    tree: String,
    parent: Option<String>,
    created: &'a str,
    head: &'a str,
    name: Option<&'a str>,
    message: &'a str,
    entries: u64,
    checkpoints: u64,
    edits: u64,
    thin: bool,
}

impl<'a> What<'a> {
    pub(super) fn new(
        reference: &Reference,
        digest: &crate::registry::Digest,
        artifact: &'a Artifact,
    ) -> What<'a> {
        let about = &artifact.about;
        What {
            reference: reference.to_string(),
            digest: digest.to_string(),
            tree: artifact.tree.to_string(),
            parent: about.parent.map(|parent| parent.to_string()),
            created: &about.created,
            head: &about.head,
            name: about.name.as_deref(),
            message: &about.message,
            entries: artifact.entries,
            checkpoints: artifact.checkpoints(),
            edits: artifact.edits(),
            thin: artifact.is_thin,
        }
    }
}

impl Line<'_> {
    /// The line as JSON.
    ///
    /// # Errors
    /// It cannot be written as JSON.
    pub(super) fn text(&self) -> Result<String> {
        serde_json::to_string(self)
            .map_err(|error| Error::new(Kind::Failed, "write JSON", error.to_string()))
    }
}
