//! `jailfs info`.

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{LayerSpace, Reply, Request};

/// Show the size of the store, layer by layer
///
/// LOGICAL is the content that was written and is still live. STORED is the space of the layer on
/// disk, with its records. SHARED is the content that is stored once with equal content of the same
/// or another layer.
#[derive(Args)]
pub(super) struct Info {
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

type Data = crate::sandbox::Info;

impl Info {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let Reply::Info(info) = Target::find(global)?.call(Request::Info)? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        for line in if self.json { json(&info)? } else { text(&info) } {
            out.line(&line);
        }
        out.finish()?;
        Ok(0)
    }
}

fn json(info: &Data) -> Result<Vec<String>> {
    info.layers.iter().map(Line::layer).chain([Line::info(info)]).map(|line| line.text()).collect()
}

fn text(info: &Data) -> Vec<String> {
    let row = |name: &str, sizes: [u64; 3]| {
        let [logical, stored, shared] = sizes.map(format::size);
        format!("{logical:>11} {stored:>11} {shared:>11}  {name}")
    };
    let mut lines = vec![format!("{:>11} {:>11} {:>11}", "LOGICAL", "STORED", "SHARED")];
    for space in &info.layers {
        let name = match (&space.name, space.open) {
            (Some(name), _) => format!("{} '{}'", space.layer, name.escape_debug()),
            (None, true) => format!("{} (open)", space.layer),
            (None, false) => space.layer.to_string(),
        };
        lines.push(row(&name, [space.logical, space.stored, space.shared]));
    }
    let sum = |of: fn(&LayerSpace) -> u64| info.layers.iter().map(of).sum();
    lines.push(row("in all", [sum(|s| s.logical), sum(|s| s.stored), sum(|s| s.shared)]));
    lines.push(format!("the store takes {}", format::size(info.store_bytes)));
    if info.to_do > 0 {
        lines.push(format!("{} layers are not deduplicated yet", info.to_do));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::LayerId;

    #[test]
    fn layers_and_their_sum_line_up() {
        let space = |layer, name: Option<&str>, open, logical, stored, shared| LayerSpace {
            layer: LayerId(layer),
            name: name.map(str::to_owned),
            open,
            logical,
            stored,
            shared,
        };
        let layers = vec![
            space(1, Some("green"), false, 1 << 30, 1 << 20, 1 << 29),
            space(2, None, true, 0, 8192, 0),
        ];
        let info = Data { layers, store_bytes: 2 << 20, to_do: 3 };
        assert_eq!(
            text(&info),
            [
                "    LOGICAL      STORED      SHARED",
                "    1.0 GiB     1.0 MiB   512.0 MiB  1 'green'",
                "    0 bytes     8.0 KiB     0 bytes  2 (open)",
                "    1.0 GiB     1.0 MiB   512.0 MiB  in all",
                "the store takes 2.0 MiB",
                "3 layers are not deduplicated yet",
            ]
        );
        let lines = json(&info).unwrap();
        assert_eq!(
            lines[0],
            concat!(
                r#"{"type":"layer","layer":1,"name":"green","open":false,"#,
                r#""logical":1073741824,"stored":1048576,"shared":536870912}"#
            )
        );
        assert!(
            lines[2]
                .starts_with(r#"{"type":"info","layers":2,"logical":1073741824,"stored":1056768"#),
            "{}",
            lines[2]
        );
    }
}
