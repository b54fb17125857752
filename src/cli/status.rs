//! `jailfs status`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use super::{date, format};
use crate::error::Result;
use crate::fs::{Refusal, Refused};
use crate::sandbox::{Reply, Request};

/// Show the state of the sandbox
#[derive(Args)]
pub(super) struct Status {
    /// Print one JSON object for the sandbox, and one per path that is not rolled back, refused
    /// link and problem
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let Reply::Status(status) = target.call(Request::Status)? else {
            return Err(wrong_answer());
        };
        let head = if self.json { None } else { target.head_of_many()? };
        let mut out = Out::new();
        for line in if self.json { json(&status)? } else { text(&status, head.as_deref()) } {
            out.line(&line);
        }
        out.finish()?;
        Ok(0)
    }
}

type Data = crate::sandbox::Status;

fn json(status: &Data) -> Result<Vec<String>> {
    let problems =
        status.base_problems.iter().map(|(path, reason)| Line::base_problem(path, reason));
    let refusals = status.refusals.iter().map(Line::refusal);
    let unresolved = status.unresolved.iter().map(Line::unresolved);
    let rollback =
        status.rollback.iter().flatten().map(|(path, reason)| Line::not_rolled_back(path, reason));
    let lines = std::iter::once(Line::status(status))
        .chain(unresolved)
        .chain(rollback)
        .chain(refusals)
        .chain(problems);
    lines.map(|line| line.text()).collect()
}

/// `head` is the name of the head if there is more than one.
fn text(status: &Data, head: Option<&str>) -> Vec<String> {
    let path = |bytes: &[u8]| format::one_line(&OsStr::from_bytes(bytes).display().to_string());
    let mount = match (&status.mount, status.pid) {
        (Some(mount), Some(pid)) => format!("{} (process {pid})", path(mount)),
        (Some(mount), None) => path(mount),
        (None, _) => "not mounted".to_owned(),
    };
    let (since, mut lines) = match &status.checkpoint {
        Some(checkpoint) => {
            let line = format!(
                "checkpoint  {}, {}",
                format::checkpoint(checkpoint),
                date::utc(checkpoint.time)
            );
            ("since the checkpoint", vec![line])
        }
        None => ("since the base", vec!["checkpoint  none".to_owned()]),
    };
    let mut all = vec![
        format!("base        {}", path(&status.base)),
        format!("mount       {mount}"),
        format!("store       {} ({})", path(&status.store), format::size(status.store_bytes)),
    ];
    all.extend(head.map(|head| format!("head        {}", format::one_line(head))));
    all.append(&mut lines);
    all.push(format!("changed     {} {since}", format::paths(status.changed)));
    if status.checkpoint.is_some() {
        all.push(format!("to apply    {}", format::paths(status.to_apply)));
    }
    all.push(match status.epoch.0 {
        0 => "applied     never".to_owned(),
        epoch => format!("applied     {}", format::times(epoch.into())),
    });
    all.append(&mut failures(status));
    if status.refused_count > 0 {
        let times = format::times(status.refused_count);
        all.push(format!("what leads out was refused {times}, the last:"));
        all.extend(status.refusals.iter().map(refusal));
    }
    if !status.base_problems.is_empty() {
        all.push("problems with the base:".to_owned());
        let problems = status.base_problems.iter();
        all.extend(
            problems.map(|(path, reason)| format!("  {path}: {}", format::one_line(reason))),
        );
    }
    all
}

/// The lines about conflicts to resolve, a failed sync and an unfinished rollback.
fn failures(status: &Data) -> Vec<String> {
    let mut all = Vec::new();
    if !status.unresolved.is_empty() {
        all.push("conflicts of a merge to resolve:".to_owned());
        all.extend(status.unresolved.iter().map(|path| format!("  {path}")));
    }
    if status.sync_failed {
        all.push(
            "a sync of the store failed: what was not synced before may be lost, and nothing can \
             be changed"
                .to_owned(),
        );
        all.push(
            "until it is mounted again; then it shows what was synced. Copy out what you need first"
                .to_owned(),
        );
    }
    if let Some(rollback) = &status.rollback {
        all.push(
            "an apply failed, and the base is not rolled back yet; \
             until then no other apply is possible"
                .to_owned(),
        );
        all.push(
            "(retry: jailfs apply --undo). The mount shows the base as it was before. Not rolled \
             back:"
                .to_owned(),
        );
        all.extend(
            rollback.iter().map(|(path, reason)| format!("  {path}: {}", format::one_line(reason))),
        );
    }
    all
}

fn refusal(refusal: &Refusal) -> String {
    let what = match &refusal.what {
        Refused::Link(target) => format::one_line(&OsStr::from_bytes(target).display().to_string()),
        Refused::Rename(to) => format!("(moved to) {to}"),
    };
    let who = match refusal.pid {
        0 => "a process out of sight".to_owned(),
        pid => {
            let program = OsStr::from_bytes(&refusal.process).display().to_string();
            format!("process {pid} ({})", format::one_line(&program))
        }
    };
    format!("  {} -> {what}, by {who}", refusal.path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Epoch, TreePath};

    fn status() -> Data {
        Data {
            head: "try".to_owned(),
            base: b"/src/repo".to_vec(),
            store: b"/s\xff".to_vec(),
            mount: None,
            pid: None,
            checkpoint: None,
            changed: 2,
            to_apply: 2,
            epoch: Epoch(1),
            store_bytes: 2048,
            kernel_nodes: 0,
            refusals: vec![
                Refusal {
                    path: TreePath::parse(b"l").unwrap(),
                    what: Refused::Link(b"/etc\n".to_vec()),
                    pid: 7,
                    process: b"c\n".to_vec(),
                },
                Refusal {
                    path: TreePath::parse(b"a/d").unwrap(),
                    what: Refused::Rename(TreePath::parse(b"d").unwrap()),
                    pid: 0,
                    process: Vec::new(),
                },
            ],
            refused_count: 3,
            sync_failed: true,
            unresolved: Vec::new(),
            rollback: Some(vec![(
                TreePath::parse(b"half").unwrap(),
                "the base is read-only".to_owned(),
            )]),
            base_problems: vec![(
                TreePath::parse(b"secret").unwrap(),
                "Permission denied".to_owned(),
            )],
        }
    }

    #[test]
    fn a_status_tells_what_is_wrong() {
        assert!(!text(&status(), None).join("\n").contains("head"));
        let text = text(&status(), Some("try\n")).join("\n");
        assert!(text.contains("\nhead        try\\n\n"), "{text}");
        assert!(text.contains("mount       not mounted\n"), "{text}");
        assert!(text.contains("changed     2 paths since the base\n"), "{text}");
        assert!(
            text.contains("refused 3 times, the last:\n  l -> /etc\\n, by process 7 (c\\n)\n"),
            "{text}"
        );
        assert!(text.contains("  a/d -> (moved to) d, by a process out of sight\n"), "{text}");
        assert!(text.contains("\na sync of the store failed: "), "{text}");
        assert!(text.contains(" Not rolled back:\n  half: the base is read-only\n"), "{text}");
        assert!(text.ends_with("problems with the base:\n  secret: Permission denied"), "{text}");
    }

    #[test]
    fn json_has_a_line_per_thing() {
        let lines = json(&status()).unwrap();
        assert_eq!(lines.len(), 5);
        assert!(lines[1].contains(r#""type":"not_rolled_back","path":"half""#), "{}", lines[1]);
        assert!(
            lines[0].starts_with(r#"{"type":"status","base":"/src/repo","store":"/s"#),
            "{}",
            lines[0]
        );
        assert!(lines[0].contains(r#""store_hex":"2f73ff""#), "{}", lines[0]);
    }
}
