//! Failpoints: every change of the disk has a name, at which a test can kill the process or make
//! the call fail.
//!
//! Without the feature `crash-points`, which only tests enable, a failpoint does nothing and costs
//! nothing. With it, the environment variable `JAILFS_FAILPOINTS` holds rules, separated by commas:
//!
//! ```text
//! kill:NAME:N            SIGKILL this process before the N-th NAME (from 1; `any`: each name)
//! fail:NAME:N:ERRNO      the N-th NAME fails with ERRNO and does nothing; `N+`: from the N-th on
//! log:FILE               append the name of each failpoint that is hit to FILE, one per line
//! ```
//!
//! A test in the same process sets rules for its own thread by `with`, and observes the changes by
//! `set_recorder`.

macro_rules! failpoints {
    ($($variant:ident $name:literal,)*) => {
        /// A failpoint.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Failpoint {
            $(#[doc = $name] $variant,)*
        }

        /// Every failpoint.
        pub const ALL: &[Failpoint] = &[$(Failpoint::$variant,)*];

        impl Failpoint {
            /// Its name in rules.
            pub fn name(self) -> &'static str {
                match self {
                    $(Failpoint::$variant => $name,)*
                }
            }
        }
    };
}

failpoints! {
    StoreOpen "store.open",
    StoreWrite "store.write",
    StoreCut "store.cut",
    StorePunch "store.punch",
    StoreAllocate "store.allocate",
    StoreSync "store.sync",
    StoreRename "store.rename",
    StoreRemove "store.remove",
    StoreMkdir "store.mkdir",
    StoreSyncDir "store.sync-dir",
    BaseStage "base.stage",
    BaseWrite "base.write",
    BaseRename "base.rename",
    BaseRemove "base.remove",
    BaseMkdir "base.mkdir",
    BaseLink "base.link",
    BaseAttributes "base.attributes",
    BaseSync "base.sync",
}

/// Marks that the named change is about to be made.
///
/// # Errors
/// The error of a test's rule; none without the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn hit(_: Failpoint) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "crash-points")]
pub use rules::{Change, boot, hit, record, set_boot, set_recorder, with};

#[cfg(feature = "crash-points")]
mod rules {
    use std::cell::RefCell;
    use std::io::{self, Write};
    use std::str::FromStr;
    use std::sync::OnceLock;

    use nix::errno::Errno;
    use parking_lot::{Mutex, RwLock};

    use super::{ALL, Failpoint};
    use crate::types::{ByteRange, Timestamp};

    /// What a rule does.
    #[derive(Clone, Debug)]
    enum Action {
        Kill,
        Fail(Errno),
        Log(String),
    }

    #[derive(Clone, Debug)]
    struct Rule {
        action: Action,
        /// `None`: every failpoint.
        failpoint: Option<Failpoint>,
        nth: u64,
        /// Whether it also applies to all later hits.
        onwards: bool,
        seen: u64,
    }

    impl FromStr for Rule {
        type Err = String;

        fn from_str(text: &str) -> Result<Rule, String> {
            let (verb, rest) = text.split_once(':').ok_or_else(|| text.to_owned())?;
            if verb == "log" {
                let action = Action::Log(rest.to_owned());
                return Ok(Rule { action, failpoint: None, nth: 1, onwards: true, seen: 0 });
            }
            let mut words = rest.split(':');
            let name = words.next().unwrap_or_default();
            let failpoint = ALL.iter().copied().find(|failpoint| failpoint.name() == name);
            if failpoint.is_none() && name != "any" {
                return Err(format!("there is no failpoint '{name}'"));
            }
            let count = words.next().unwrap_or_default();
            let nth = count.trim_end_matches('+').parse().map_err(|_| format!("not a number: '{count}'"))?;
            let action = match (verb, words.next()) {
                ("kill", None) => Action::Kill,
                ("fail", Some("ENOSPC")) => Action::Fail(Errno::ENOSPC),
                ("fail", Some("EDQUOT")) => Action::Fail(Errno::EDQUOT),
                ("fail", Some("EIO")) => Action::Fail(Errno::EIO),
                _ => return Err(text.to_owned()),
            };
            Ok(Rule { action, failpoint, nth, onwards: count.ends_with('+'), seen: 0 })
        }
    }

    fn parse(text: &str) -> Vec<Rule> {
        let rules: Result<Vec<Rule>, String> =
            text.split(',').filter(|rule| !rule.is_empty()).map(str::parse).collect();
        rules.unwrap_or_else(|why| {
            log::error!("JAILFS_FAILPOINTS: {why}");
            std::process::abort()
        })
    }

    fn of_process() -> &'static Mutex<Vec<Rule>> {
        static RULES: OnceLock<Mutex<Vec<Rule>>> = OnceLock::new();
        RULES.get_or_init(|| Mutex::new(parse(&std::env::var("JAILFS_FAILPOINTS").unwrap_or_default())))
    }

    thread_local! {
        static OF_THREAD: RefCell<Vec<Rule>> = const { RefCell::new(Vec::new()) };
    }

    /// Runs `work` under rules for this thread only.
    pub fn with<T>(rules: &str, work: impl FnOnce() -> T) -> T {
        struct Reset;
        impl Drop for Reset {
            fn drop(&mut self) {
                OF_THREAD.with_borrow_mut(Vec::clear);
            }
        }
        OF_THREAD.with_borrow_mut(|now| *now = parse(rules));
        let _reset = Reset;
        work()
    }

    /// Marks that the named change is about to be made.
    ///
    /// # Errors
    /// The error of a rule.
    pub fn hit(failpoint: Failpoint) -> io::Result<()> {
        OF_THREAD.with_borrow_mut(|rules| follow(rules, failpoint))?;
        follow(&mut of_process().lock(), failpoint)
    }

    fn follow(rules: &mut [Rule], failpoint: Failpoint) -> io::Result<()> {
        for rule in rules.iter_mut().filter(|rule| rule.failpoint.is_none_or(|wanted| wanted == failpoint)) {
            rule.seen += 1;
            if rule.seen != rule.nth && !(rule.onwards && rule.seen > rule.nth) {
                continue;
            }
            match &rule.action {
                Action::Kill => {
                    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL)?;
                }
                Action::Fail(errno) => return Err(io::Error::from(*errno)),
                Action::Log(path) => {
                    let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path)?;
                    writeln!(file, "{}", failpoint.name())?;
                }
            }
        }
        Ok(())
    }

    /// A change that was made on disk. Files and directories are identified by inode numbers.
    #[derive(Clone, Debug)]
    #[expect(missing_docs, reason = "the fields are the arguments of the call that each variant names")]
    pub enum Change {
        /// A file was opened, and created if it did not exist.
        Open { dir: u64, name: String, ino: u64 },
        /// Bytes were written.
        Write { ino: u64, offset: u64, bytes: Vec<u8> },
        /// A file was truncated or extended to this length.
        Cut { ino: u64, len: u64 },
        /// A range became a hole.
        Punch { ino: u64, range: ByteRange },
        /// The file was synced.
        Sync { ino: u64 },
        /// A name was renamed within its directory.
        Rename { dir: u64, from: String, to: String },
        /// A name was removed.
        Remove { dir: u64, name: String },
        /// A directory was created.
        Mkdir { dir: u64, name: String, ino: u64 },
        /// A directory was synced.
        SyncDir { ino: u64 },
        /// Everything was synced.
        SyncAll {},
    }

    static BOOT: RwLock<Option<([u8; 16], Timestamp)>> = RwLock::new(None);

    /// Sets the boot id that this process sees, with the present moment as the time of boot.
    pub fn set_boot(boot: Option<[u8; 16]>) {
        *BOOT.write() = boot.map(|boot| (boot, crate::sys::clock::now()));
    }

    /// The boot id and time of boot that a test has set.
    pub fn boot() -> Option<([u8; 16], Timestamp)> {
        *BOOT.read()
    }

    type Recorder = Box<dyn Fn(Change) + Send + Sync>;

    static RECORDER: RwLock<Option<Recorder>> = RwLock::new(None);

    /// Passes every change of a store to `recorder` from now on; `None` ends that. There is one
    /// recorder per process.
    pub fn set_recorder(recorder: Option<Recorder>) {
        *RECORDER.write() = recorder;
    }

    /// Passes a change to the recorder.
    ///
    /// # Errors
    /// When the change cannot be determined.
    pub fn record(change: impl FnOnce() -> io::Result<Change>) -> io::Result<()> {
        if let Some(recorder) = &*RECORDER.read() {
            recorder(change()?);
        }
        Ok(())
    }
}
