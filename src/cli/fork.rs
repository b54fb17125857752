//! `jailfs fork` and `jailfs forks`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use clap::Args;

use super::attach;
use super::json::Line;
use super::mount::free_mount_point;
use super::options::Options;
use super::out::{self, Out};
use super::target::{Target, wrong_answer};
use super::{Global, date, format, protected, store_path};
use crate::daemon::{MountChoice, Plan};
use crate::error::{Attempt, Error, Kind, Result};
use crate::sandbox::{Fork as Head, Reply, Request, Rev};
use crate::store;

/// Fork the sandbox: a second head that begins with the same tree, and changes apart from it
///
/// Takes the tree as it is now, without stopping the programs that work in it. A fork costs no copy
/// of any file. 'jailfs --head NAME' or a command in its mount uses it; 'jailfs diff NAME@'
/// compares.
#[derive(Args)]
pub(super) struct Fork {
    /// The name of the fork; must be new, and follow the rules for names of checkpoints
    #[arg(required_unless_present = "abandoned")]
    name: Option<String>,
    /// Where to mount it; made if it is missing. With -n, the directory in which each fork is
    /// mounted by its name. With --drop, the name of another fork to drop
    #[arg(value_name = "MNT")]
    mount_point: Option<PathBuf>,
    /// With --drop, the names of more forks to drop
    #[arg(value_name = "NAME", requires = "drop")]
    more: Vec<String>,
    /// The state that it begins with, instead of the tree as it is now
    #[arg(long, value_name = "STATE")]
    from: Option<String>,
    /// Make N forks: NAME-1 to NAME-N
    #[arg(short, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    n: Option<u32>,
    /// Options of the mounts, as of 'jailfs mount'; the default is those of the mount that is
    /// forked
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<OsString>,
    /// Drop the forks that are named; 'jailfs gc' frees their space. A mounted fork is refused
    #[arg(long, conflicts_with_all = ["from", "n", "options"])]
    drop: bool,
    /// With --drop: all forks that a race has left which was killed
    #[arg(long, requires = "drop", conflicts_with = "name")]
    abandoned: bool,
    /// Print one JSON object per fork
    #[arg(long)]
    json: bool,
}

/// List the heads of the store: 'main' and its forks
#[derive(Args)]
pub(super) struct Forks {
    /// Print one JSON object per head
    #[arg(long)]
    json: bool,
}

impl Fork {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        if self.drop {
            return self.drop_forks(&mut target);
        }
        let name = self.name.clone().unwrap_or_default();
        let names: Vec<String> = match self.n {
            Some(n) => (1..=n).map(|number| format!("{name}-{number}")).collect(),
            None => vec![name],
        };
        // A mount point that is no good is refused before anything is made.
        let plans = self.plans(global, &target, &names)?;
        let request = Request::Fork { names, from: self.from.as_deref().map(Rev::parse) };
        let Reply::Forked(mut forks) = target.call(request)? else { return Err(wrong_answer()) };
        let options = match plans.first() {
            Some(plan) if !self.options.is_empty() => {
                MountChoice::Chosen(Box::new(plan.choice.clone()))
            }
            _ => MountChoice::AsHead(target.head().to_owned()),
        };
        // A daemon takes the lock of the store.
        drop(target);
        for (fork, plan) in forks.iter_mut().zip(&plans) {
            attach::mount(plan, &options).inspect_err(|_| {
                out::note(&format!("fork '{}' is made, but not mounted", plan.head));
            })?;
            fork.mount_point = Some(plan.mount_point.as_os_str().as_bytes().to_vec());
        }
        let mut out = Out::new();
        for fork in &forks {
            out.line(&if self.json { Line::fork(fork).text()? } else { line(fork) });
        }
        out.finish()?;
        Ok(0)
    }

    /// Drops forks, each by itself. Ends at the first that is refused.
    fn drop_forks(&self, target: &mut Target) -> Result<u8> {
        let names: Vec<String> = if self.abandoned {
            let Reply::Forks(forks) = target.call(Request::Forks)? else {
                return Err(wrong_answer());
            };
            forks.into_iter().filter(|fork| fork.is_abandoned).map(|fork| fork.name).collect()
        } else {
            let bad = || Error::new(Kind::Usage, "drop a fork", "the name is not UTF-8");
            let second = self.mount_point.as_ref().map(|name| name.to_str().ok_or_else(bad));
            let second = second.transpose()?.map(str::to_owned);
            self.name.iter().cloned().chain(second).chain(self.more.iter().cloned()).collect()
        };
        for name in &names {
            let Reply::Done = target.call(Request::DropFork { name: name.clone() })? else {
                return Err(wrong_answer());
            };
            out::note(&format!("dropped fork '{}'", format::one_line(name)));
        }
        if names.is_empty() {
            out::note("no fork is abandoned");
        }
        Ok(0)
    }

    /// The plans of the mounts. Makes missing mount points.
    fn plans(&self, global: &Global, target: &Target, names: &[String]) -> Result<Vec<Plan>> {
        let mut options = Options::parse(&self.options)?;
        let Some(point) = &self.mount_point else { return Ok(Vec::new()) };
        options.choice.protected = protected::protected()?;
        let point = global.at(point)?;
        let base: PathBuf = OsString::from_vec(store::base_of(target.store())?.path).into();
        let store = target.store().to_owned();
        let plan = |head: &String| {
            let point = if self.n.is_some() { point.join(head) } else { point.clone() };
            let (base, store) = (base.clone(), store.clone());
            // Before the directory is made, and again after a dead mount is gone.
            store_path::check(&base, &store_path::resolve_new(&point)?, &store)?;
            attach::check_outside(&point, &store)?;
            make(&point)?;
            let mount_point = free_mount_point(&point)?;
            store_path::check(&base, &mount_point, &store)?;
            Ok(Plan {
                base,
                mount_point,
                store,
                head: head.clone(),
                choice: options.choice.clone(),
            })
        };
        if self.n.is_some() {
            store_path::check(&base, &store_path::resolve_new(&point)?.join("x"), &store)?;
            make(&point)?;
        }
        names.iter().map(plan).collect()
    }
}

/// Makes a directory unless it exists. A dead mount exists too.
fn make(dir: &Path) -> Result<()> {
    match std::fs::create_dir(dir) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        made => made.attempt(|| format!("create '{}'", dir.display())),
    }
}

impl Forks {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let Reply::Forks(heads) = target.call(Request::Forks)? else { return Err(wrong_answer()) };
        let mut out = Out::new();
        let width = heads.iter().map(|head| head.name.chars().count()).max().unwrap_or(0);
        for head in &heads {
            let is_meant = head.name == target.head();
            out.line(&match self.json {
                true => Line::fork(head).text()?,
                false => listed(head, is_meant, width),
            });
        }
        out.finish()?;
        Ok(0)
    }
}

/// `fork try-1 of main at /mnt/try-1`.
fn line(fork: &Head) -> String {
    let mut line = format!("fork {}", format::one_line(&fork.name));
    if let Some(parent) = &fork.parent {
        line.push_str(&format!(" of {}", format::one_line(parent)));
    }
    if let Some(point) = &fork.mount_point {
        line.push_str(&format!(" at {}", path(point)));
    }
    line
}

/// `* try-1  2026-01-02 03:04:05Z  of main, checkpoint 4  at /mnt/try-1`. The mark is at the head
/// that the command means.
fn listed(head: &Head, is_meant: bool, width: usize) -> String {
    let mark = if is_meant { '*' } else { ' ' };
    let (name, time) = (format::one_line(&head.name), date::utc(head.time));
    let of = head.parent.as_deref().map_or_else(String::new, |parent| {
        let at = head.forked_at.map_or_else(|| "the base".to_owned(), |at| at.to_string());
        format!("  of {} at {at}", format::one_line(parent))
    });
    let mount = match &head.mount_point {
        Some(point) => path(point),
        None => "not mounted".to_owned(),
    };
    let left = if head.is_abandoned { "  left by a race that was killed" } else { "" };
    format!("{mark} {name:width$}  {time}  {mount}{of}{left}")
}

fn path(bytes: &[u8]) -> String {
    format::one_line(&OsStr::from_bytes(bytes).display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{LayerId, Timestamp};

    #[test]
    fn a_list_of_heads_says_where_each_is_and_where_it_came_from() {
        let mut head = Head {
            name: "main".to_owned(),
            parent: None,
            forked_at: None,
            time: Timestamp { secs: 1_767_323_045, nanos: 0 },
            top: LayerId(9),
            is_abandoned: false,
            mount_point: Some(b"/mnt\n".to_vec()),
        };
        assert_eq!(listed(&head, true, 5), "* main   2026-01-02 03:04:05Z  /mnt\\n");
        head.name = "try-1".to_owned();
        (head.parent, head.forked_at) = (Some("main".to_owned()), Some(LayerId(4)));
        assert_eq!(line(&head), "fork try-1 of main at /mnt\\n");
        head.mount_point = None;
        assert_eq!(
            listed(&head, false, 5),
            "  try-1  2026-01-02 03:04:05Z  not mounted  of main at 4"
        );
        assert_eq!(line(&head), "fork try-1 of main");
        head.is_abandoned = true;
        assert!(listed(&head, false, 5).ends_with(" at 4  left by a race that was killed"));
    }
}
