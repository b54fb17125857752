//! Prints the measurements, for people and for programs.
//!
//! For people: per step a line for each system, with the median, the minimum and the maximum, the
//! ratio to each peer, the messages in all and per operation, and the usage of the daemon. At the
//! end the missed targets, and the missing programs.

use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;

use serde_json::{Value, json};

use crate::Res;
use crate::args::Args;
use crate::machine;
use crate::runner::{Measured, Unit};
use crate::systems::System;
use crate::targets;
use crate::workloads::Workload;

/// All measurements of one workload: per step, in order, per system, all rounds.
type Results = Vec<(String, BTreeMap<System, Vec<Measured>>)>;

pub struct Report {
    json: bool,
    results: Results,
    missing: Vec<String>,
    failed: Vec<String>,
    lost: Vec<String>,
}

impl Report {
    pub fn begin(args: &Args, machine: String) -> Report {
        let load = machine::load();
        let (size, rounds) = (args.size.name, args.rounds);
        if args.json {
            say(json!({
                "type": "machine", "machine": machine, "load": load,
                "size": size, "rounds": rounds,
            }));
        } else {
            say(format!(
                "{machine}\nload {load}; size {size}, {rounds} rounds, medians; \
                 the systems take turns"
            ));
        }
        Report {
            json: args.json,
            results: Vec::new(),
            missing: Vec::new(),
            failed: Vec::new(),
            lost: Vec::new(),
        }
    }

    pub fn system(&self, system: &System, version: &str) {
        if self.json {
            say(json!({"type": "system", "system": system.name(), "version": version}));
        } else {
            say(format!("{:<18} {version}", system.name()));
        }
    }

    /// Notes a peer or a workload that is missing.
    pub fn missing(&mut self, what: &str, why: &str) {
        if self.json {
            say(json!({"type": "missing", "what": what, "why": why}));
        } else {
            say(format!("MISSING {what}: {why}"));
        }
        self.missing.push(format!("{what}: {why}"));
    }

    pub fn workload(&mut self, workload: &Workload) {
        self.results.clear();
        if !self.json {
            say(format!(
                "\n{}/{}: {}   (load {})",
                workload.group,
                workload.name,
                workload.about,
                machine::load()
            ));
        }
    }

    /// One run of a workload on one system.
    pub fn run(&mut self, workload: &Workload, system: &System, result: Res<Vec<Measured>>) {
        match result {
            Err(error) => {
                let what = format!("{}/{} on {}", workload.group, workload.name, system.name());
                if self.json {
                    say(json!({"type": "failed", "what": what, "why": error.to_string()}));
                } else {
                    say(format!("FAILED {what}: {error}"));
                }
                self.failed.push(format!("{what}: {error}"));
            }
            Ok(all) => {
                for measured in all {
                    let at = self.results.iter().position(|(step, _)| *step == measured.step);
                    let at = at.unwrap_or_else(|| {
                        self.results.push((measured.step.clone(), BTreeMap::new()));
                        self.results.len() - 1
                    });
                    if let Some((_, systems)) = self.results.get_mut(at) {
                        systems.entry(system.clone()).or_default().push(measured);
                    }
                }
            }
        }
    }

    pub fn end_workload(&mut self, workload: &Workload) {
        for (step, systems) in std::mem::take(&mut self.results) {
            self.step(workload, &step, &systems);
        }
    }

    fn step(&mut self, workload: &Workload, step: &str, systems: &BTreeMap<System, Vec<Measured>>) {
        let first = systems.values().flatten().next();
        let operations = first.map_or(1, |measured| measured.operations);
        if !self.json {
            say(format!("  {step} ({operations})"));
        }
        for (system, all) in systems {
            let spread = spread(all);
            let ratios: Vec<(String, f64)> = systems
                .iter()
                .filter(|(other, _)| !other.is_jailfs() && *other != system)
                .map(|(other, theirs)| (other.name(), ratio(all, theirs)))
                .collect();
            let row = Row { workload, step, system, operations, spread, ratios: &ratios, all };
            self.judge(&row);
            if self.json { say(row.json()) } else { say(format!("    {}", row.text())) }
        }
    }

    /// Notes missed targets, also those against a fuse-overlayfs.
    fn judge(&mut self, row: &Row<'_>) {
        if *row.system != (System::Jailfs(None)) {
            return;
        }
        let full = format!("{}/{} {}", row.workload.group, row.workload.name, row.step);
        let native = row.ratios.iter().find(|(name, _)| name == "native");
        if let Some(wanted) = targets::ratio(row.workload.group, row.workload.name, row.step)
            && let Some((_, reached)) = native
            && *reached > wanted
        {
            self.lost.push(format!("{full}: {reached:.2} times the bare disk, wanted {wanted}"));
        }
        let median = row.spread.median;
        if let Some(wanted) = targets::most(row.workload.name, row.step, row.operations)
            && median > wanted
        {
            let unit = row.all.first().map_or(Unit::Seconds, |measured| measured.unit);
            self.lost.push(format!(
                "{full}: {}, wanted {}",
                show(median, unit),
                show(wanted, unit)
            ));
        }
        let is_time = row.all.first().is_some_and(|measured| measured.unit == Unit::Seconds);
        let wanted = targets::peer_ratio(row.workload.group, row.workload.name, row.step);
        for (other, times) in row.ratios {
            if is_time && other.starts_with("fuse-overlayfs") && *times > wanted {
                self.lost.push(format!("{full}: {times:.2} times {other}, wanted {wanted}"));
            }
        }
    }

    pub fn end(self) -> ExitCode {
        let all = [
            ("missing", &self.missing),
            ("failed", &self.failed),
            ("missed its target", &self.lost),
        ];
        if self.json {
            say(json!({
                "type": "end", "load": machine::load(), "missing": self.missing,
                "failed": self.failed, "lost": self.lost,
            }));
        } else {
            say(format!("\nload {}", machine::load()));
            for (what, lines) in all {
                say(format!("{what}: {}", if lines.is_empty() { "nothing" } else { "" }));
                lines.iter().for_each(|line| say(format!("  {line}")));
            }
        }
        if self.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// The ratio to another system: the median of the ratios of all rounds, because within a round the
/// load of the machine is alike.
fn ratio(ours: &[Measured], theirs: &[Measured]) -> f64 {
    let pairs = ours.iter().zip(theirs).filter(|(_, theirs)| theirs.value > 0.0);
    median(pairs.map(|(ours, theirs)| ours.value / theirs.value).collect())
}

#[derive(Clone, Copy)]
struct Spread {
    median: f64,
    least: f64,
    most: f64,
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let middle = values.len() / 2;
    let at = |at: usize| values.get(at).copied().unwrap_or_default();
    if values.len() % 2 == 1 {
        at(middle)
    } else {
        (at(middle.saturating_sub(1)) + at(middle)) / 2.0
    }
}

fn spread(all: &[Measured]) -> Spread {
    let values: Vec<f64> = all.iter().map(|measured| measured.value).collect();
    Spread {
        least: values.iter().copied().fold(f64::INFINITY, f64::min),
        most: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        median: median(values),
    }
}

/// The measurements of one system in one step.
struct Row<'a> {
    workload: &'a Workload,
    step: &'a str,
    system: &'a System,
    operations: u64,
    spread: Spread,
    /// The ratio to each peer.
    ratios: &'a [(String, f64)],
    all: &'a [Measured],
}

impl Row<'_> {
    /// The number of messages in the last round, by name, the most first. Rounds hardly differ.
    fn messages(&self) -> Option<Vec<(&str, u64)>> {
        let messages = self.all.last()?.messages.as_ref()?;
        let mut all: Vec<(&str, u64)> =
            messages.iter().map(|(name, n)| (name.as_str(), *n)).collect();
        all.sort_unstable_by_key(|(_, n)| std::cmp::Reverse(*n));
        Some(all)
    }

    fn cpu(&self) -> Option<f64> {
        let all: Vec<f64> = self.all.iter().filter_map(|measured| measured.cpu).collect();
        (!all.is_empty()).then(|| median(all))
    }

    fn peak(&self) -> Option<u64> {
        self.all.iter().filter_map(|measured| measured.peak).max()
    }

    fn json(&self) -> Value {
        let Spread { median, least, most } = self.spread;
        let is_bytes = self.all.first().is_some_and(|m| m.unit == Unit::Bytes);
        json!({
            "type": "step",
            "workload": format!("{}/{}", self.workload.group, self.workload.name),
            "step": self.step,
            "system": self.system.name(),
            "operations": self.operations,
            "unit": if is_bytes { "bytes" } else { "seconds" },
            "median": median, "least": least, "most": most,
            "ratios": self.ratios.iter().cloned().collect::<BTreeMap<_, _>>(),
            "target": targets::ratio(self.workload.group, self.workload.name, self.step),
            "messages": self.messages().map(|all| all.into_iter().collect::<BTreeMap<_, _>>()),
            "daemon_cpu_seconds": self.cpu(),
            "daemon_peak_bytes": self.peak(),
            "load": machine::load(),
        })
    }

    fn text(&self) -> String {
        let unit = self.all.first().map_or(Unit::Seconds, |measured| measured.unit);
        let Spread { median, least, most } = self.spread;
        let mut line = format!(
            "{:<18}{:>10}  {:>10} .. {:<10}",
            self.system.name(),
            show(median, unit),
            show(least, unit),
            show(most, unit)
        );
        for (name, ratio) in self.ratios {
            line.push_str(&format!("  {ratio:.2} x {name}"));
        }
        if let Some(messages) = self.messages() {
            let sum: u64 = messages.iter().map(|(_, n)| n).sum();
            let each = sum as f64 / self.operations as f64;
            line.push_str(&format!("  {sum} messages, {each:.2} each"));
            let most: Vec<_> =
                messages.iter().take(4).map(|(name, n)| format!("{name} {n}")).collect();
            if sum > 0 {
                line.push_str(&format!(" ({})", most.join(", ")));
            }
        }
        if let (Some(cpu), Some(peak)) = (self.cpu(), self.peak()) {
            line.push_str(&format!("  daemon {cpu:.2} s, {} MiB", peak >> 20));
        }
        line
    }
}

fn show(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Bytes => format!("{value:.0} B"),
        Unit::Seconds if value < 0.001 => format!("{:.0} us", value * 1e6),
        Unit::Seconds if value < 1.0 => format!("{:.2} ms", value * 1e3),
        Unit::Seconds => format!("{value:.2} s"),
    }
}

/// Prints a line. Exits if stdout is closed.
fn say(line: impl std::fmt::Display) {
    if writeln!(std::io::stdout(), "{line}").is_err() {
        std::process::exit(1);
    }
}
