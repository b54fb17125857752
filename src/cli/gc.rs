//! `jailfs gc`.

use clap::Args;

use super::Global;
use super::format;
use super::json::Line;
use super::out::Out;
use super::target::{Target, wrong_answer};
use crate::error::Result;
use crate::sandbox::{Reply, Request};

/// Free the space of unused data
///
/// In use are the current tree, all checkpoints, held states, the states that recent operations can
/// go back to, and files that programs hold open. The mount stays usable meanwhile.
#[derive(Args)]
pub(super) struct Gc {
    /// Only print how much would be freed
    #[arg(long)]
    dry_run: bool,
    /// Keep the states that the last N operations can go back to
    #[arg(long, value_name = "N", default_value_t = 100)]
    operations: u64,
    /// Drop all checkpoints except the newest N of each head and those that are held; 'op restore'
    /// cannot go back to them either
    #[arg(long, value_name = "N")]
    keep: Option<u64>,
    /// Drop the oldest checkpoints until the store takes no more than SIZE (bytes, or with K, M, G,
    /// T)
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    max_store: Option<u64>,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

impl Gc {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let (operations, dry_run) = (self.operations, self.dry_run);
        let request =
            Request::Gc { operations, keep: self.keep, max_store: self.max_store, dry_run };
        let Reply::Collected(collected) = Target::find(global)?.call(request)? else {
            return Err(wrong_answer());
        };
        let mut out = Out::new();
        if self.json {
            for checkpoint in &collected.dropped {
                out.line(&Line::checkpoint(checkpoint).text()?);
            }
            out.line(&Line::collected(&collected, self.dry_run).text()?);
            out.finish()?;
            return Ok(0);
        }
        let (drop, free) =
            if self.dry_run { ("would drop", "would free") } else { ("dropped", "freed") };
        for checkpoint in &collected.dropped {
            out.line(&format!("{drop} {}", format::checkpoint(checkpoint)));
        }
        let (freed, left) = (format::size(collected.bytes), format::size(collected.store_bytes));
        out.line(&format!("{free} {freed}; the store takes {left}"));
        out.finish()?;
        Ok(0)
    }
}

/// Parses a size in bytes: digits, optionally with K, M, G or T for powers of 1,024.
///
/// # Errors
/// A message for people, for any other text and for a size above u64.
pub(super) fn bytes(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let shift = match text.get(digits.len()..) {
        Some("") => 0,
        Some("K" | "k" | "KiB") => 10,
        Some("M" | "m" | "MiB") => 20,
        Some("G" | "g" | "GiB") => 30,
        Some("T" | "t" | "TiB") => 40,
        _ => return Err("not a size: digits, and perhaps K, M, G or T".to_owned()),
    };
    let number: u64 =
        digits.parse().map_err(|_| "not a size: digits, and perhaps K, M, G or T".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_digits_and_a_unit() {
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(bytes("12"), Ok(12));
        assert_eq!(bytes("3K"), Ok(3 << 10));
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        for wrong in ["", "K", "-1", "1.5G", "1X", "99999999999T"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
