//! Supplies the snapshot directory (`.jailfs`) of the mount with checkpoints, heads and texts.
//!
//! `fs` serves the directory but ranks below the timeline, so it asks through the trait
//! [`Archive`], which [`Records`] implements.

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;
use std::sync::{Arc, Weak};

use crate::error::{Error, Kind, Result};
use crate::fs::{Archive, HeadTree, OtherHead, OtherHeads, Text};
use crate::sandbox::{Checkpoint, Reply, Request, Sandbox, Status, date};
use crate::tree::Tree;
use crate::types::{Ino, LayerId, Name, is_unprintable};

/// The attempt in all errors of this file.
const ATTEMPT: &str = "read the snapshot directory";

/// The sandbox, for its own filesystem. A weak reference, because the sandbox owns the filesystem.
pub(super) struct Records(Weak<Sandbox>);

impl Records {
    pub(super) fn of(sandbox: &Arc<Sandbox>) -> Records {
        Records(Arc::downgrade(sandbox))
    }

    fn sandbox(&self) -> Result<Arc<Sandbox>> {
        self.0.upgrade().ok_or_else(|| Error::new(Kind::NoStore, ATTEMPT, "the sandbox is closed"))
    }

    fn ask(&self, request: Request) -> Result<Reply> {
        self.sandbox()?.handle_now(request)
    }
}

fn wrong_reply() -> Error {
    Error::new(Kind::Failed, ATTEMPT, "the reply does not match the request")
}

impl Archive for Records {
    fn tree(&self, layer: LayerId) -> Result<Tree> {
        self.sandbox()?.timeline.tree_of(layer)
    }

    fn checkpoint(&self, name: String) -> Result<LayerId> {
        match self.ask(Request::Checkpoint { name: Some(name), message: String::new() })? {
            Reply::Checkpoint(checkpoint) => Ok(checkpoint.id),
            _ => Err(wrong_reply()),
        }
    }

    fn text(&self, which: Text) -> Result<String> {
        let request = match which {
            Text::Status => Request::Status,
            Text::Log => Request::Log,
        };
        match self.ask(request)? {
            Reply::Status(status) => Ok(status_text(&status)),
            Reply::Log(log) => Ok(log_text(&*self.sandbox()?, &log)),
            _ => Err(wrong_reply()),
        }
    }

    fn last_change(&self, ino: Ino, from: Option<LayerId>) -> Result<Option<LayerId>> {
        self.sandbox()?.timeline.last_change(ino, from)
    }

    fn parent(&self) -> Option<LayerId> {
        self.sandbox().ok()?.timeline.parent()
    }

    fn heads(&self) -> Result<OtherHeads> {
        let sandbox = self.sandbox()?;
        let heads = sandbox.heads_seen().into_iter().filter_map(|(name, since)| {
            Some(OtherHead { name: Name::new(name.as_bytes()).ok()?, since })
        });
        Ok(OtherHeads { heads: heads.collect(), changed: sandbox.timeline.heads_changed() })
    }

    fn head_tree(&self, head: &OtherHead) -> Result<HeadTree> {
        let sandbox = self.sandbox()?;
        let name = std::str::from_utf8(head.name.as_bytes()).unwrap_or_default();
        if sandbox.heads_seen().get(name) != Some(&head.since) {
            let attempt = format!("read head '{name}'");
            return Err(Error::new(Kind::NoStore, attempt, "there is no such head"));
        }
        sandbox.timeline.tree_of_head(name, head.since)
    }

    fn has_head(&self, name: &str) -> bool {
        let heads = self.sandbox().map(|sandbox| sandbox.timeline.store().head_names());
        heads.unwrap_or_default().iter().any(|head| head == name)
    }

    fn fork(&self, name: String) -> Result<()> {
        let sandbox = self.sandbox()?;
        sandbox.handle(Request::Fork { names: vec![name.clone()], from: None })?;
        sandbox.note_made(name);
        Ok(())
    }
}

/// The status for people, one fact per line.
fn status_text(status: &Status) -> String {
    let path = |bytes: &[u8]| one_line(&OsStr::from_bytes(bytes).display().to_string());
    let mut lines = vec![format!("base        {}", path(&status.base))];
    lines.extend(status.mount.as_ref().map(|mount| format!("mount       {}", path(mount))));
    lines.push(format!("store       {}", path(&status.store)));
    lines.push(match &status.checkpoint {
        Some(last) => format!("checkpoint  {}", checkpoint_line(last)),
        None => "checkpoint  none".to_owned(),
    });
    let since = if status.checkpoint.is_some() { "the checkpoint" } else { "the base" };
    let paths = if status.changed == 1 { "path" } else { "paths" };
    lines.push(format!("changed     {} {paths} since {since}", status.changed));
    if status.checkpoint.is_some() {
        let paths = if status.to_apply == 1 { "path" } else { "paths" };
        lines.push(format!("to apply    {} {paths}", status.to_apply));
    }
    lines.push(format!("applied     {} times", status.epoch));
    lines.push(format!("refused     {} ways out", status.refused_count));
    let rollback = status.rollback.iter().flatten();
    lines.extend(
        rollback.map(|(path, reason)| format!("not rolled back {path}: {}", one_line(reason))),
    );
    let problems = status.base_problems.iter();
    lines
        .extend(problems.map(|(path, reason)| format!("problem     {path}: {}", one_line(reason))));
    lines.join("\n") + "\n"
}

/// The checkpoints that are not automatic seals, newest first. A line has number, name as in the
/// directory of checkpoints, time and message, separated by tabs.
fn log_text(sandbox: &Sandbox, log: &[Checkpoint]) -> String {
    let names = sandbox.names();
    let mut text = String::new();
    for checkpoint in log.iter().filter(|checkpoint| !checkpoint.automatic) {
        let named = checkpoint.name.as_ref().and(sandbox.timeline.store().layer(checkpoint.id));
        let name = named.map_or_else(|| "-".to_owned(), |info| one_line(&names.label(&info)));
        let (time, message) = (date::utc(checkpoint.time), one_line(&checkpoint.message));
        // A write to a string cannot fail.
        let _written = writeln!(text, "{}\t{name}\t{time}\t{message}", checkpoint.id);
    }
    text
}

fn checkpoint_line(checkpoint: &Checkpoint) -> String {
    let name =
        checkpoint.name.as_ref().map(|name| format!(" '{}'", one_line(name))).unwrap_or_default();
    format!("{}{name}, {}", checkpoint.id, date::utc(checkpoint.time))
}

/// Escapes characters that would affect the terminal of a reader.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unprintable(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}
