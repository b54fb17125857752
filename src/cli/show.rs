//! `jailfs show`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::{Error, Kind, Result};
use crate::sandbox::{Node, Reply, Request, Rev, Shown};
use crate::types::{FileKind, TreePath};

/// Print a path of a state: the bytes of a file, the target of a symlink, the names in a directory
#[derive(Args)]
pub(super) struct Show {
    /// A state ('@' now, '@-1' the last checkpoint, 'base', a number or a name), a colon, and a
    /// path
    #[arg(value_name = "ID:PATH")]
    what: OsString,
    /// Print a JSON object for the node, or for each entry of the directory
    #[arg(long)]
    json: bool,
}

impl Show {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let (rev, path) = self.split(&mut target)?;
        let path = target.paths(&[path])?.pop().unwrap_or_default();
        let mut shown = part(&mut target, &rev, &path, 0)?;
        let mut out = Out::new();
        if self.json {
            let one = std::slice::from_ref(&shown.node);
            let nodes = if shown.node.file == FileKind::Dir { &shown.entries[..] } else { one };
            for node in nodes {
                out.line(&Line::node(node).text()?);
            }
            out.finish()?;
            return Ok(0);
        }
        match shown.node.file {
            FileKind::Dir => shown.entries.iter().for_each(|entry| out.bytes(&listed(entry))),
            FileKind::Symlink => out.bytes(&shown.bytes),
            FileKind::File => {
                let (mut offset, rev, first) = (0, shown.rev.clone(), shown.node.clone());
                while !shown.bytes.is_empty() {
                    out.bytes(&shown.bytes);
                    offset += shown.bytes.len() as u64;
                    shown = part(&mut target, &rev, &path, offset)?;
                    if shown.node != first {
                        let attempt = format!("show '{path}' of {rev}");
                        return Err(Error::new(
                            Kind::Failed,
                            attempt,
                            "it was changed while it was read",
                        )
                        .hint("a checkpoint does not change"));
                    }
                }
            }
            FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {
                let attempt = format!("show '{path}'");
                return Err(Error::new(
                    Kind::Failed,
                    attempt,
                    "it is not a file and has no content",
                ));
            }
        }
        out.finish()?;
        Ok(0)
    }

    /// Splits the argument into the state and the path. The name of a checkpoint may contain a
    /// colon.
    fn split(&self, target: &mut Target) -> Result<(Rev, PathBuf)> {
        let bytes = self.what.as_bytes();
        let mut unknown = None;
        for at in bytes.iter().enumerate().filter(|(_, byte)| **byte == b':').map(|(at, _)| at) {
            let (Some(rev), Some(path)) = (bytes.get(..at), bytes.get(at + 1..)) else { break };
            let Ok(text) = std::str::from_utf8(rev) else { break };
            let rev = Rev::parse(text);
            let is_known = match &rev {
                Rev::Name(name) | Rev::Of { name, .. } => has_name(target, name)?,
                Rev::Now | Rev::Back(_) | Rev::Base | Rev::Id(_) | Rev::Head { .. } => true,
            };
            if is_known {
                return Ok((rev, PathBuf::from(OsStr::from_bytes(path))));
            }
            unknown.get_or_insert(rev);
        }
        match unknown {
            Some(rev) => {
                let attempt = format!("find checkpoint '{rev}'");
                Err(Error::new(Kind::NoStore, attempt, "there is no such checkpoint")
                    .hint("'jailfs log' lists them"))
            }
            None => {
                let attempt = format!("read '{}'", self.what.display());
                Err(Error::new(Kind::Usage, attempt, "it is not a state, a colon and a path")
                    .hint("for one, '@-1:src/main.rs'"))
            }
        }
    }
}

fn has_name(target: &mut Target, name: &str) -> Result<bool> {
    let Reply::Log(log) = target.call(Request::Log)? else { return Err(wrong_answer()) };
    Ok(log.iter().any(|checkpoint| checkpoint.name.as_deref() == Some(name)))
}

fn part(target: &mut Target, rev: &Rev, path: &TreePath, offset: u64) -> Result<Shown> {
    let request = Request::Show { rev: rev.clone(), path: path.clone(), offset };
    match target.call(request)? {
        Reply::Shown(shown) => Ok(shown),
        _ => Err(wrong_answer()),
    }
}

/// The name of an entry, byte for byte; directories end in `/`.
fn listed(entry: &Node) -> Vec<u8> {
    let name = entry.path.split().map_or_else(Vec::new, |(_, name)| name.as_bytes().to_vec());
    let slash: &[u8] = if entry.file == FileKind::Dir { b"/\n" } else { b"\n" };
    [&name, slash].concat()
}
