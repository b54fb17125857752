//! The command line: one file per verb, and the code that they share.
//!
//! Only this folder and `main.rs` read arguments and the environment, and print. Exit codes are an
//! ABI: `Kind::exit_code` for errors, and the command's own for `run`. docs/CLI.md lists them.

mod apply;
mod attach;
mod check;
mod checkpoint;
mod confine;
#[cfg(feature = "registry")]
mod described;
mod diff;
mod discard;
mod export;
mod fork;
mod format;
mod gc;
mod helper;
mod history;
mod host;
mod import;
mod info;
mod json;
mod keep;
mod log;
#[cfg(feature = "registry")]
mod ls;
mod merge;
mod mount;
mod op;
mod options;
mod out;
mod protected;
#[cfg(feature = "registry")]
mod pull;
#[cfg(feature = "registry")]
mod push;
#[cfg(feature = "registry")]
mod remote;
mod remount;
mod restore;
mod run;
mod show;
mod sockets;
mod status;
mod store_path;
mod target;
mod umount;

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::{Args, Parser, Subcommand};

use crate::daemon;
use crate::error::{Attempt, Kind, Result};
use crate::run::EXEC_VERB;
use crate::sandbox::date;
use crate::sys;

/// A jailed, checkpointed overlay filesystem.
///
/// Mounts a directory so that a program can work in it as if it were the original. The original
/// stays unchanged until 'apply'. 'restore' goes back to a checkpoint, exactly and in place.
#[derive(Parser)]
#[command(name = "jailfs", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    verb: Verb,
}

/// The options of every verb.
#[derive(Args, Default)]
struct Global {
    /// Run as if started in DIR
    #[arg(short = 'C', value_name = "DIR", global = true)]
    dir: Option<PathBuf>,
    /// Use this store, whatever the directory
    #[arg(long, value_name = "DIR", global = true)]
    store: Option<PathBuf>,
    /// Use this head of the store: 'main' or a fork; the default is the head of the mount that the
    /// directory lies in
    #[arg(long, value_name = "NAME", global = true)]
    head: Option<String>,
}

impl Global {
    /// The directory that the command works in: absolute, and resolved unless its mount is dead.
    fn dir(&self) -> Result<PathBuf> {
        match &self.dir {
            Some(dir) => host::resolve_mount_point(dir),
            None => std::env::current_dir().attempt(|| "find the current directory"),
        }
    }

    /// Resolves a relative path against that directory.
    fn at(&self, path: &Path) -> Result<PathBuf> {
        match &self.dir {
            Some(_) if path.is_relative() => Ok(self.dir()?.join(path)),
            _ => Ok(path.to_owned()),
        }
    }
}

#[derive(Subcommand)]
enum Verb {
    Mount(mount::Mount),
    Umount(umount::Umount),
    Run(Box<run::Run>),
    Checkpoint(checkpoint::Checkpoint),
    Log(log::Log),
    Status(status::Status),
    Diff(diff::Diff),
    Show(show::Show),
    Restore(restore::Restore),
    History(history::History),
    Undo(history::Undo),
    Redo(history::Redo),
    Apply(apply::Apply),
    Fork(fork::Fork),
    Forks(fork::Forks),
    Discard(discard::Discard),
    Merge(merge::Merge),
    Export(export::Export),
    Import(import::Import),
    #[cfg(feature = "registry")]
    Push(push::Push),
    #[cfg(feature = "registry")]
    Pull(pull::Pull),
    #[cfg(feature = "registry")]
    Ls(ls::Ls),
    Drop(keep::Drop),
    Hold(keep::Hold),
    Release(keep::Release),
    Gc(gc::Gc),
    Check(check::Check),
    Info(info::Info),
    #[command(subcommand)]
    Op(op::Op),
    /// Serve a mount in the background; standard input carries the plan
    #[command(name = daemon::VERB, hide = true)]
    Daemon {
        /// The base and the mount point, shown in process lists
        about: Vec<OsString>,
    },
    #[command(name = helper::REMOUNT, hide = true)]
    Remount(remount::Remount),
    /// Abort a FUSE connection when the daemon has died
    #[command(name = daemon::guard::VERB, hide = true)]
    Guard,
    /// Become the process inside a sandbox of 'run'
    #[command(name = EXEC_VERB, hide = true)]
    Exec {
        /// The socket to the process outside
        #[arg(long)]
        cage: i32,
        /// The command
        #[arg(last = true)]
        words: Vec<OsString>,
    },
}

/// Parses the arguments of the process, runs the verb, and returns the exit code.
pub fn main() -> ExitCode {
    sys::memory::share_arenas();
    let arguments =
        match helper::rewrite(std::env::args_os().collect(), nix::unistd::geteuid().is_root()) {
            Ok(Some(arguments)) => arguments,
            Ok(None) => return ExitCode::SUCCESS,
            Err(error) => {
                out::error(&error);
                return error.kind.exit_code().into();
            }
        };
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version go to standard output and are not errors.
            return if error.print().is_ok() && !error.use_stderr() {
                ExitCode::SUCCESS
            } else {
                Kind::Usage.exit_code().into()
            };
        }
    };
    start_log(&cli.verb);
    match cli.verb.run(&cli.global) {
        Ok(code) => code.into(),
        Err(error) => {
            out::error(&error);
            cli.verb.code_of(error.kind).into()
        }
    }
}

impl Verb {
    /// Runs the verb and returns the exit code.
    fn run(&self, global: &Global) -> Result<u8> {
        match self {
            Verb::Mount(verb) => verb.run(global),
            Verb::Umount(verb) => verb.run(global),
            Verb::Run(verb) => verb.run(global),
            Verb::Checkpoint(verb) => verb.run(global),
            Verb::Log(verb) => verb.run(global),
            Verb::Status(verb) => verb.run(global),
            Verb::Diff(verb) => verb.run(global),
            Verb::Show(verb) => verb.run(global),
            Verb::Restore(verb) => verb.run(global),
            Verb::History(verb) => verb.run(global),
            Verb::Undo(verb) => verb.run(global),
            Verb::Redo(verb) => verb.run(global),
            Verb::Apply(verb) => verb.run(global),
            Verb::Fork(verb) => verb.run(global),
            Verb::Forks(verb) => verb.run(global),
            Verb::Discard(verb) => verb.run(global),
            Verb::Merge(verb) => verb.run(global),
            Verb::Export(verb) => verb.run(global),
            Verb::Import(verb) => verb.run(global),
            #[cfg(feature = "registry")]
            Verb::Push(verb) => verb.run(global),
            #[cfg(feature = "registry")]
            Verb::Pull(verb) => verb.run(global),
            #[cfg(feature = "registry")]
            Verb::Ls(verb) => verb.run(),
            Verb::Drop(verb) => verb.run(global),
            Verb::Hold(verb) => verb.run(global),
            Verb::Release(verb) => verb.run(global),
            Verb::Gc(verb) => verb.run(global),
            Verb::Check(verb) => verb.run(global),
            Verb::Info(verb) => verb.run(global),
            Verb::Op(verb) => verb.run(global),
            Verb::Daemon { .. } => Ok(daemon::main()),
            Verb::Remount(verb) => verb.run(global),
            Verb::Guard => Ok(daemon::guard::main()),
            Verb::Exec { cage, words } => Ok(crate::run::become_command(*cage, words)),
        }
    }

    /// The exit code of an error. For `run` it is 125, so that it differs from the codes of the
    /// command.
    fn code_of(&self, kind: Kind) -> u8 {
        match self {
            Verb::Run(_) => run::FAILED,
            _ => kind.exit_code(),
        }
    }
}

/// Logs to standard error. JAILFS_LOG sets the filter; the default is warnings and errors.
fn start_log(verb: &Verb) {
    let mut log =
        env_logger::Builder::from_env(env_logger::Env::new().filter_or("JAILFS_LOG", "warn"));
    if !matches!(verb, Verb::Daemon { .. }) {
        // For people: no time, no module.
        log.format(|to, record| {
            let level = record.level().as_str().to_ascii_lowercase();
            let text = record.args().to_string();
            writeln!(to, "jailfs: {level}: {}", format::harmless(text.as_bytes()))
        });
    }
    let log = log.build();
    ::log::set_max_level(log.filter());
    let lines = matches!(verb, Verb::Daemon { .. }).then(AtomicU64::default);
    if ::log::set_boxed_logger(Box::new(Filtered { log, lines })).is_err() {
        out::note("the log is already set up");
    }
}

/// The length of a daemon's log is checked once per this many lines.
const CHECK_EVERY: u64 = 1000;

/// A log that drops expected records, and limits the length of a daemon's log.
struct Filtered {
    log: env_logger::Logger,
    /// The number of lines so far, in a daemon.
    lines: Option<AtomicU64>,
}

impl ::log::Log for Filtered {
    fn enabled(&self, metadata: &::log::Metadata<'_>) -> bool {
        self.log.enabled(metadata)
    }

    fn log(&self, record: &::log::Record<'_>) {
        self.log.log(record);
        let lines = self.lines.as_ref().filter(|_| self.log.matches(record));
        if lines.is_some_and(|lines| {
            lines.fetch_add(1, Ordering::Relaxed) % CHECK_EVERY == CHECK_EVERY - 1
        }) {
            crate::daemon::limit_log();
        }
    }

    fn flush(&self) {
        self.log.flush();
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Cli {
        Cli::try_parse_from(line.split(' ')).unwrap_or_else(|error| panic!("{line}: {error}"))
    }

    #[test]
    fn the_definition_passes_the_checks_of_clap() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_documented_form_is_understood() {
        for line in [
            "jailfs mount /b /m",
            "jailfs mount /b /m --store /s -f -o ro,allow_other -o noexec",
            "jailfs mount -o ro /b /m --volatile",
            "jailfs umount /m",
            "jailfs umount -l /m",
            "jailfs checkpoint",
            "jailfs checkpoint green -m tests",
            "jailfs -C /m checkpoint --json",
            "jailfs log --all --json",
            "jailfs status --store /s",
            "jailfs diff",
            "jailfs diff @-1 @ -p src",
            "jailfs diff --stat base -- src",
            "jailfs restore 3 --dry-run",
            "jailfs restore green --json",
            "jailfs history src/main.rs --json",
            "jailfs undo src/main.rs -n 3",
            "jailfs undo --json x",
            "jailfs redo x --steps 2",
            "jailfs diff x@2 x",
            "jailfs restore green src a/b --dry-run",
            "jailfs show @-1:src/main.rs",
            "jailfs show green: --json",
            "jailfs apply --dry-run src",
            "jailfs apply --undo",
            "jailfs fork try",
            "jailfs fork try /m --from green -o ro",
            "jailfs fork try mounts -n 8 --json",
            "jailfs fork --drop try",
            "jailfs forks --json",
            "jailfs --head try status",
            "jailfs mount --head try /b /m",
            "jailfs diff try@-1 try@ src",
            "jailfs discard",
            "jailfs drop green --json",
            "jailfs hold 3",
            "jailfs check --read-data --repair --json",
            "jailfs release @-1",
            "jailfs info --json",
            "jailfs gc --dry-run --keep 10 --max-store 2G --json",
            "jailfs export @ --tar -",
            "jailfs export green --since base --tar x.tar --force",
            "jailfs export green --oci img:v1 --layers --json",
            "jailfs export @-1 --since base --patch -",
            "jailfs import x.tar",
            "jailfs import img:v1 --into try --json",
            "jailfs import - --onto base --detach-mounts",
            "jailfs op log --json",
            "jailfs op restore 3",
            "jailfs run --keep -- make test",
            "jailfs run make -C sub --json --store x",
            "jailfs __daemon /b /m",
            "jailfs __guard",
            "jailfs __exec --cage 3 -- ls -l",
        ] {
            parse(line);
        }
    }

    #[cfg(feature = "registry")]
    #[test]
    fn every_form_for_registries_is_understood() {
        for line in [
            "jailfs push ghcr.io/me/repo:green",
            "jailfs push localhost:5000/repo:x green --parent localhost:5000/repo --plain-http",
            "jailfs push ghcr.io/me/repo @-1 --json",
            "jailfs pull 10.0.0.1:5000/repo --into try --plain-http=10.0.0.1:5000",
            "jailfs pull ghcr.io/me/repo --detach-mounts --json",
            "jailfs ls ghcr.io/me/repo --json",
        ] {
            parse(line);
        }
    }

    #[test]
    fn every_wrong_form_is_refused() {
        for line in [
            "jailfs",
            "jailfs mount /b",
            "jailfs run",
            "jailfs run --keep --apply x",
            "jailfs diff -p --stat",
            "jailfs op restore x",
            "jailfs restore",
            "jailfs undo",
            "jailfs undo x -n 0",
            "jailfs undo x y",
            "jailfs apply --undo src",
            "jailfs gc --max-store much",
            "jailfs drop",
            "jailfs fork",
            "jailfs fork try -n 0",
            "jailfs fork --drop try --from green",
            "jailfs export @",
            "jailfs export --tar -",
            "jailfs export @ --tar x --oci y",
            "jailfs export @ --tar x --layers",
            "jailfs import",
            "jailfs push",
            "jailfs pull",
            "jailfs ls",
            "jailfs nonsense",
        ] {
            assert!(Cli::try_parse_from(line.split(' ')).is_err(), "{line}");
        }
    }

    #[test]
    fn what_follows_the_command_of_run_is_its_own() {
        let cli = parse("jailfs -C /b run make -C sub --store x --keep -- y");
        assert_eq!(cli.global.dir.as_deref(), Some(Path::new("/b")));
        assert!(cli.global.store.is_none());
        let Verb::Run(run) = cli.verb else { panic!("not run") };
        assert_eq!(
            run.command,
            ["make", "-C", "sub", "--store", "x", "--keep", "--", "y"].map(OsString::from)
        );
        let Verb::Run(run) = parse("jailfs run --keep -- -weird --").verb else {
            panic!("not run")
        };
        assert_eq!(run.command, ["-weird", "--"].map(OsString::from));
    }

    #[test]
    fn an_error_of_run_keeps_the_codes_of_the_command() {
        assert_eq!(parse("jailfs run x").verb.code_of(Kind::InUse), 125);
        assert_eq!(parse("jailfs log").verb.code_of(Kind::InUse), 11);
    }
}
