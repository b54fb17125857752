//! Whether a checkpoint takes longer beside many processes, and after many checkpoints.

use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use crate::Res;
use crate::material::Materials;
use crate::programs::program;
use crate::runner::Run;
use crate::workloads::Workload;

/// Checkpoints of one step.
const PER_STEP: u64 = 100;
/// Processes that sleep beside a step.
const PROCESSES: usize = 500;
/// Writes 3,000 bytes to one of 50 files and sleeps for 2 ms, again and again until it is killed.
const WRITER: &str = "import itertools, os, time\n\
    for i in itertools.count():\n    with open(f'w{i % 50}', 'wb') as file:\n        \
    file.write(os.urandom(3000))\n    time.sleep(0.002)\n";

pub fn all() -> Vec<Workload> {
    let about = "checkpoints by mkdir(2), more and more of them, each mean of 100";
    vec![Workload::new("state", "checkpoints", about, Materials::empty, checkpoints).jailfs_only()]
}

/// A process beside the measured one. It is killed when this is dropped.
struct Beside(Child);

impl Beside {
    /// Fails if the process has ended.
    fn check(&mut self) -> Res<()> {
        match self.0.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("the process beside has ended: {status}").into()),
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        // The kill fails only if the process has ended.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Makes checkpoints. Their names begin with the name of the step.
fn make(run: &mut Run, step: &str, count: u64) -> Res<Duration> {
    let dir = run.root().join(".jailfs/checkpoints");
    let begin = Instant::now();
    for at in 0..count {
        std::fs::create_dir(dir.join(format!("{step}-{at}")))?;
    }
    Ok(begin.elapsed())
}

fn checkpoints(run: &mut Run) -> Res<()> {
    let root = run.root();
    let start = |name: &str, args: &[&str]| -> Res<Beside> {
        let mut command = program(name, args, &root);
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Beside(quiet.spawn()?))
    };
    let step =
        |run: &mut Run, step: &str| run.step(step, PER_STEP, |run| make(run, step, PER_STEP));
    step(run, "checkpoints-alone")?;
    {
        let _sleeping: Vec<Beside> =
            (0..PROCESSES).map(|_| start("sleep", &["600"])).collect::<Res<_>>()?;
        step(run, "checkpoints-beside-processes")?;
    }
    let mut writer = start("python3", &["-c", WRITER])?;
    while !root.join("w9").exists() {
        writer.check()?;
        std::thread::sleep(Duration::from_millis(1));
    }
    step(run, "checkpoints-under-load")?;
    let more = run.size.checkpoints_under_load.saturating_sub(4 * PER_STEP);
    make(run, "more", more)?;
    step(run, "checkpoints-under-load-at-last")?;
    writer.check()
}
