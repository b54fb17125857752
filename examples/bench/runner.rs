//! Runs the workloads: in every round each system once, so that other work on the machine affects
//! all systems alike.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use crate::Res;
use crate::args::{Args, Size};
use crate::machine::{self, Usage};
use crate::material::{Materials, sync};
use crate::programs;
use crate::report::Report;
use crate::systems::{Live, Messages, System};
use crate::workloads::{self, Workload};

/// The measurements of one step of a workload.
#[derive(Clone, Debug)]
pub struct Measured {
    pub step: String,
    /// A number of `unit`.
    pub value: f64,
    pub unit: Unit,
    /// The number of files, reads or rows, by which the figure is divided.
    pub operations: u64,
    /// The messages of the kernel, if the system counts them.
    pub messages: Option<Messages>,
    /// The CPU seconds of the daemon in this step, if there is a daemon.
    pub cpu: Option<f64>,
    /// The peak memory of the daemon so far, in bytes.
    pub peak: Option<u64>,
}

/// The unit of a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    Seconds,
    Bytes,
}

/// One run of a workload on one system.
pub struct Run<'a> {
    pub system: &'a System,
    pub materials: &'a Materials,
    pub size: Size,
    /// The tree of the workload, and a directory next to it outside the mount.
    pub base: PathBuf,
    pub place: PathBuf,
    live: Option<Live>,
    measured: Vec<Measured>,
}

impl<'a> Run<'a> {
    /// The root of the mounted tree.
    pub fn root(&self) -> PathBuf {
        self.live.as_ref().map(|live| live.root.clone()).unwrap_or_default()
    }

    /// Mounts. Earlier writes at this place are visible again.
    pub fn mount(&mut self) -> Res<()> {
        self.live = Some(self.system.mount(&self.base, &self.place)?);
        Ok(())
    }

    /// Unmounts.
    pub fn unmount(&mut self) -> Res<()> {
        self.live.take().map_or(Ok(()), Live::end)
    }

    /// Runs a step that measures its own time, and notes the usage of the daemon with it.
    pub fn step(
        &mut self,
        step: &str,
        operations: u64,
        work: impl FnOnce(&mut Self) -> Res<Duration>,
    ) -> Res<()> {
        let (messages, usage) = self.look()?;
        let taken = work(self)?;
        let (messages_after, usage_after) = self.look()?;
        let messages = messages_after.map(|after| {
            let before = messages.unwrap_or_default();
            let grown = |(name, n): (String, u64)| {
                let new = n - before.get(&name).copied().unwrap_or(0);
                (new > 0).then_some((name, new))
            };
            after.into_iter().filter_map(grown).collect()
        });
        self.measured.push(Measured {
            step: step.to_owned(),
            value: taken.as_secs_f64(),
            unit: Unit::Seconds,
            operations,
            messages,
            // A daemon that started within the step had no usage before.
            cpu: usage_after.map(|after| after.cpu - usage.unwrap_or_default().cpu.min(after.cpu)),
            peak: usage_after.map(|after| after.peak),
        });
        Ok(())
    }

    /// Runs a program in a directory of the mount and takes the time of the whole command.
    pub fn command(&mut self, step: &str, operations: u64, command: &mut Command) -> Res<()> {
        self.step(step, operations, |_| programs::run(command))
    }

    /// As above, for a program whose exit code 1 means that it found nothing.
    pub fn search(&mut self, step: &str, operations: u64, command: &mut Command) -> Res<()> {
        self.step(step, operations, |_| programs::run_to(command, &[0, 1]))
    }

    /// Measures the time of work in this process.
    pub fn timed(
        &mut self,
        step: &str,
        operations: u64,
        work: impl FnOnce(&mut Self) -> Res<()>,
    ) -> Res<()> {
        self.step(step, operations, |run| {
            let begin = Instant::now();
            work(run)?;
            Ok(begin.elapsed())
        })
    }

    /// Notes a number of bytes.
    pub fn bytes(&mut self, step: &str, operations: u64, value: f64) {
        let (unit, step) = (Unit::Bytes, step.to_owned());
        self.measured.push(Measured {
            step,
            value,
            unit,
            operations,
            messages: None,
            cpu: None,
            peak: None,
        });
    }

    /// The usage of the daemon, if there is one.
    pub fn usage(&self) -> Res<Option<Usage>> {
        Ok(self.live.as_ref().map(Live::usage).transpose()?.flatten())
    }

    /// Sends a question to the daemon of jailfs.
    pub fn ask(&mut self, question: &str) -> Res<String> {
        self.live.as_mut().ok_or("nothing is mounted")?.ask(question)
    }

    fn look(&mut self) -> Res<(Option<Messages>, Option<Usage>)> {
        let usage = self.usage()?;
        let messages = self.live.as_mut().map(Live::messages).transpose()?.flatten();
        Ok((messages, usage))
    }
}

/// Runs all selected workloads.
pub fn run(args: &Args, dir: &Path) -> Res<ExitCode> {
    let materials = Materials::new(dir.join("material"), args.size)?;
    let mut report = Report::begin(args, machine::describe(dir));
    let mut systems = Vec::new();
    for system in &args.systems {
        match system.version() {
            Ok(version) => {
                report.system(system, &version);
                systems.push(system.clone());
            }
            Err(error) => report.missing(&system.name(), &error.to_string()),
        }
    }
    for workload in workloads::all().into_iter().filter(|w| args.wants(w.group, w.name)) {
        let lacks: Vec<_> =
            workload.needs.iter().filter_map(|name| programs::missing(name)).collect();
        if !lacks.is_empty() {
            report.missing(&format!("{}/{}", workload.group, workload.name), &lacks.join("; "));
            continue;
        }
        report.workload(&workload);
        let base = (workload.base)(&materials)?;
        for round in 0..args.rounds {
            for system in
                systems.iter().filter(|system| !workload.jailfs_only || system.is_jailfs())
            {
                let place = dir.join(format!("run-{round}"));
                let result = run_once(&workload, system, &materials, &base, &place);
                report.run(&workload, system, result);
                std::fs::remove_dir_all(&place)?;
                sync(dir)?;
            }
        }
        report.end_workload(&workload);
    }
    Ok(report.end())
}

fn run_once(
    workload: &Workload,
    system: &System,
    materials: &Materials,
    base: &Path,
    place: &Path,
) -> Res<Vec<Measured>> {
    std::fs::create_dir(place)?;
    let base = if *system == System::Native && workload.mutates {
        let copy = place.join("base");
        programs::run(programs::program("cp", &["-a"], place).arg(base).arg(&copy))?;
        sync(place)?;
        copy
    } else {
        base.to_owned()
    };
    let size = materials.size;
    let mut run = Run {
        system,
        materials,
        size,
        base,
        place: place.to_owned(),
        live: None,
        measured: Vec::new(),
    };
    run.mount()?;
    (workload.run)(&mut run)?;
    run.unmount()?;
    Ok(run.measured)
}
