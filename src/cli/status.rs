//! `jailfs status`.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use clap::Args;

use super::Global;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use super::{date, show};
use crate::error::Result;
use crate::sandbox::verbs::{Reply, Request};

/// Show where the sandbox is and how it stands
#[derive(Args)]
pub(super) struct Status {
    /// Print one JSON object for the sandbox, and one per refused link and problem
    #[arg(long)]
    json: bool,
}

impl Status {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let Reply::Status(status) = Target::find(global)?.call(Request::Status)? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        for line in if self.json { json(&status)? } else { text(&status) } {
            out.line(&line);
        }
        out.finish()?;
        Ok(0)
    }
}

type Data = crate::sandbox::verbs::Status;

fn json(status: &Data) -> Result<Vec<String>> {
    let links = status.refused_links.iter().map(|(link, target)| Line::refused_link(link, target));
    let problems = status.base_problems.iter().map(|(path, reason)| Line::base_problem(path, reason));
    std::iter::once(Line::status(status)).chain(links).chain(problems).map(|line| line.text()).collect()
}

fn text(status: &Data) -> Vec<String> {
    let path = |bytes: &[u8]| show::one_line(&OsStr::from_bytes(bytes).display().to_string());
    let mount = match (&status.mount, status.pid) {
        (Some(mount), Some(pid)) => format!("{} (process {pid})", path(mount)),
        (Some(mount), None) => path(mount),
        (None, _) => "not mounted".to_owned(),
    };
    let (since, mut lines) = match &status.checkpoint {
        Some(checkpoint) => {
            let line =
                format!("checkpoint  {}, {}", show::checkpoint(checkpoint), date::utc(checkpoint.time));
            ("since the checkpoint", vec![line])
        }
        None => ("since the base", vec!["checkpoint  none".to_owned()]),
    };
    let mut all = vec![
        format!("base        {}", path(&status.base)),
        format!("mount       {mount}"),
        format!("store       {} ({})", path(&status.store), show::size(status.store_bytes)),
    ];
    all.append(&mut lines);
    all.push(format!("changed     {} {since}", show::paths(status.changed)));
    all.push(match status.epoch.0 {
        0 => "applied     never".to_owned(),
        epoch => format!("applied     {}", show::times(epoch.into())),
    });
    if status.refused_count > 0 {
        all.push(format!(
            "links that lead out were refused {}, the last:",
            show::times(status.refused_count)
        ));
        let links = status.refused_links.iter();
        all.extend(links.map(|(link, target)| format!("  {link} -> {}", path(target))));
    }
    if !status.base_problems.is_empty() {
        all.push("problems with the base:".to_owned());
        let problems = status.base_problems.iter();
        all.extend(problems.map(|(path, reason)| format!("  {path}: {}", show::one_line(reason))));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Epoch, TreePath};

    fn status() -> Data {
        Data {
            base: b"/src/repo".to_vec(),
            store: b"/s\xff".to_vec(),
            mount: None,
            pid: None,
            checkpoint: None,
            changed: 2,
            epoch: Epoch(1),
            store_bytes: 2048,
            kernel_nodes: 0,
            refused_links: vec![(TreePath::parse(b"l").unwrap(), b"/etc\n".to_vec())],
            refused_count: 3,
            base_problems: vec![(TreePath::parse(b"secret").unwrap(), "Permission denied".to_owned())],
        }
    }

    #[test]
    fn a_status_tells_what_is_wrong() {
        let text = text(&status()).join("\n");
        assert!(text.contains("mount       not mounted\n"), "{text}");
        assert!(text.contains("changed     2 paths since the base\n"), "{text}");
        assert!(text.contains("refused 3 times, the last:\n  l -> /etc\\n\n"), "{text}");
        assert!(text.ends_with("problems with the base:\n  secret: Permission denied"), "{text}");
    }

    #[test]
    fn json_has_a_line_per_thing() {
        let lines = json(&status()).unwrap();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].starts_with(r#"{"type":"status","base":"/src/repo","store":"/s"#), "{}", lines[0]);
        assert!(lines[0].contains(r#""store_hex":"2f73ff""#), "{}", lines[0]);
    }
}
