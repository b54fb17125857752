//! The systems: ways to make a writable view of a base.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount, umount2};

use crate::Res;
use crate::machine::{self, Usage};
use crate::serve::{self, Daemon};

/// The time limit for a mount to appear, and for a busy one to become free.
const PATIENCE: Duration = Duration::from_secs(20);

/// The options of jailfs that can be measured.
const OPTIONS: [&str; 5] = ["writeback", "wake=off", "wake=latency", "wake=spin", serve::NO_ALLOW];

/// A system. They take turns in this order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum System {
    /// The directory itself.
    Native,
    /// overlayfs of the kernel.
    Overlayfs,
    /// The program of that name.
    FuseOverlayfs(PathBuf),
    /// jailfs with a mount option.
    Jailfs(Option<&'static str>),
}

/// The number of messages from the kernel, by name.
pub type Messages = BTreeMap<String, u64>;

impl System {
    pub fn parse(name: &str) -> Option<System> {
        match name.split_once('=') {
            Some(("fuse-overlayfs", program)) => Some(System::FuseOverlayfs(program.into())),
            Some(_) | None => match name {
                "native" => Some(System::Native),
                "overlayfs" => Some(System::Overlayfs),
                "fuse-overlayfs" => Some(System::FuseOverlayfs("fuse-overlayfs".into())),
                "jailfs" => Some(System::Jailfs(None)),
                _ => OPTIONS
                    .iter()
                    .find(|option| name.strip_prefix("jailfs-") == Some(option))
                    .map(|option| System::Jailfs(Some(option))),
            },
        }
    }

    pub fn name(&self) -> String {
        match self {
            System::Native => "native".to_owned(),
            System::Overlayfs => "overlayfs".to_owned(),
            System::FuseOverlayfs(program) if program.components().count() == 1 => {
                "fuse-overlayfs".to_owned()
            }
            System::FuseOverlayfs(program) => format!("fuse-overlayfs={}", program.display()),
            System::Jailfs(None) => "jailfs".to_owned(),
            System::Jailfs(Some(option)) => format!("jailfs-{option}"),
        }
    }

    pub fn is_jailfs(&self) -> bool {
        matches!(self, System::Jailfs(_))
    }

    /// Returns the version of the installed system.
    ///
    /// # Errors
    /// The reason why the system is missing.
    pub fn version(&self) -> Res<String> {
        match self {
            System::Native => Ok("the directory itself".to_owned()),
            System::Overlayfs => {
                let known = std::fs::read_to_string("/proc/filesystems")?;
                // The first mount loads the module.
                let loaded = known.lines().any(|line| line.ends_with("\toverlay"));
                Ok(if loaded { "of this kernel" } else { "of this kernel, not loaded yet" }
                    .to_owned())
            }
            System::FuseOverlayfs(program) => {
                let output = Command::new(program).arg("--version").output();
                let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
                let text = String::from_utf8(output.stdout)?;
                let line = text
                    .lines()
                    .find(|line| line.starts_with("fuse-overlayfs"))
                    .unwrap_or("unknown");
                Ok(line.to_owned())
            }
            System::Jailfs(_) => Ok(env!("CARGO_PKG_VERSION").to_owned()),
        }
    }

    /// Mounts `base` below `place`, a directory that keeps the writes: a later mount at the same
    /// place shows them again.
    pub fn mount(&self, base: &Path, place: &Path) -> Res<Live> {
        let [mnt, upper, work] = ["mnt", "upper", "work"].map(|name| place.join(name));
        if let System::Native = self {
            return Ok(Live {
                root: base.to_owned(),
                mount_point: None,
                daemon: Serving::NoProcess,
            });
        }
        for dir in [&mnt, &upper, &work] {
            std::fs::create_dir_all(dir)?;
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            base.display(),
            upper.display(),
            work.display()
        );
        let daemon = match self {
            System::Native => Serving::NoProcess,
            System::Overlayfs => {
                mount(
                    Some("overlay"),
                    &mnt,
                    Some("overlay"),
                    MsFlags::empty(),
                    Some(options.as_str()),
                )
                .map_err(|error| format!("mount overlayfs: {error}"))?;
                Serving::Kernel
            }
            System::FuseOverlayfs(program) => {
                Serving::Program(start_program(program, &options, &mnt)?)
            }
            System::Jailfs(option) => {
                Serving::Jailfs(Daemon::start(base, &mnt, &place.join("store"), *option)?)
            }
        };
        Ok(Live { root: mnt.clone(), mount_point: Some(mnt), daemon })
    }
}

fn start_program(program: &Path, options: &str, mnt: &Path) -> Res<Child> {
    let mut command = Command::new(program);
    command.arg("-f").arg("-o").arg(options).arg(mnt).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.stdin(Stdio::null()).spawn()?;
    let end = Instant::now() + PATIENCE;
    while !is_mounted(mnt)? {
        if child.try_wait()?.is_some() || Instant::now() > end {
            child.kill()?;
            child.wait()?;
            return Err(format!("{} did not mount", program.display()).into());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(child)
}

fn is_mounted(point: &Path) -> Res<bool> {
    let mounts = std::fs::read_to_string("/proc/self/mounts")?;
    let point = point.to_str().ok_or("a directory that is not text")?;
    Ok(mounts.lines().any(|line| line.split(' ').nth(1) == Some(point)))
}

/// The process that serves a mount.
enum Serving {
    NoProcess,
    Kernel,
    Program(Child),
    Jailfs(Daemon),
}

/// A mounted base.
pub struct Live {
    /// The directory of the workload.
    pub root: PathBuf,
    mount_point: Option<PathBuf>,
    daemon: Serving,
}

impl Live {
    fn pid(&self) -> Option<u32> {
        match &self.daemon {
            Serving::NoProcess | Serving::Kernel => None,
            Serving::Program(child) => Some(child.id()),
            Serving::Jailfs(daemon) => Some(daemon.pid()),
        }
    }

    /// The usage of the daemon, if there is one.
    pub fn usage(&self) -> Res<Option<Usage>> {
        self.pid().map(machine::usage).transpose()
    }

    /// The messages so far, if the system counts them.
    pub fn messages(&mut self) -> Res<Option<Messages>> {
        let Serving::Jailfs(daemon) = &mut self.daemon else { return Ok(None) };
        let text = daemon.ask("counters")?;
        let pairs = text.split(' ').filter_map(|pair| pair.split_once('='));
        Ok(Some(pairs.filter_map(|(name, n)| Some((name.to_owned(), n.parse().ok()?))).collect()))
    }

    /// Sends another question to the daemon of jailfs.
    pub fn ask(&mut self, question: &str) -> Res<String> {
        match &mut self.daemon {
            Serving::Jailfs(daemon) => daemon.ask(question),
            _ => Err("only jailfs can be asked".into()),
        }
    }

    /// Unmounts and waits for the daemon.
    pub fn end(mut self) -> Res<()> {
        let point = self.mount_point.take();
        match std::mem::replace(&mut self.daemon, Serving::NoProcess) {
            Serving::NoProcess => Ok(()),
            Serving::Kernel => leave(point),
            Serving::Program(mut child) => {
                leave(point)?;
                child.wait()?;
                Ok(())
            }
            Serving::Jailfs(daemon) => daemon.end(),
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        // After an error. The server ends with the mount.
        if let Some(point) = self.mount_point.take()
            && let Err(error) = umount2(&point, MntFlags::MNT_DETACH)
        {
            eprintln!("bench: unmount {}: {error}", point.display());
        }
    }
}

fn leave(point: Option<PathBuf>) -> Res<()> {
    let Some(point) = point else { return Ok(()) };
    let end = Instant::now() + PATIENCE;
    loop {
        match umount(&point) {
            Ok(()) => return Ok(()),
            Err(nix::errno::Errno::EBUSY) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(2))
            }
            Err(error) => return Err(format!("unmount {}: {error}", point.display()).into()),
        }
    }
}
