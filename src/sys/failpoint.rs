//! Failpoints: every change of the disk, and every call that reads from it, has a name, at which a
//! test can kill the process or make the call fail.
//!
//! Without the feature `crash-points`, which only tests enable, a failpoint does nothing and costs
//! nothing. With it, the environment variable `JAILFS_FAILPOINTS` holds rules, separated by commas:
//!
//! ```text
//! kill:NAME:N            SIGKILL this process before the N-th NAME (from 1)
//! fail:NAME:N:ERRNO      the N-th NAME fails with ERRNO and does nothing; `N+`: from the N-th on
//! log:FILE               append the name of each failpoint that is hit to FILE, one per line
//! begin:NAME             the rules behind this one do not count before the first NAME
//! ```
//!
//! NAME is a failpoint, or `any` for each change, `base` for each change of the base, or `all` for
//! each call. `any` leaves out the calls that only read: a kill before a read leaves what a kill
//! before the next change leaves. `run.pick` is no call: it is the moment at which a race has a
//! winner.
//!
//! A rule does not count a call that an earlier rule made fail. So a second rule can fail a call of
//! the recovery: after `fail:all:N:EIO`, the rule `fail:all:N:EIO` fails the next call, and one
//! with a greater number fails a later one.
//!
//! `JAILFS_BOOT=ID@SECONDS` makes the process believe in another boot of the machine: its id in
//! hexadecimal, and when it was, in seconds since 1970.
//!
//! A test in the same process sets rules for its own thread by `with`. It observes the changes by
//! `set_recorder`, and the calls of its thread by `trace`.

macro_rules! failpoints {
    ($($variant:ident $name:literal,)*) => {
        /// A failpoint.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Failpoint {
            $(#[doc = $name] $variant,)*
        }

        /// Every failpoint.
        #[cfg(feature = "crash-points")]
        pub const ALL: &[Failpoint] = &[$(Failpoint::$variant,)*];

        impl Failpoint {
            /// Its name in rules.
            #[cfg(feature = "crash-points")]
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
    StoreRead "store.read",
    // The kernel lost bytes of a file that it should have written.
    StoreCheck "store.check",
    BaseOpen "base.open",
    BaseRead "base.read",
    RunPick "run.pick",
}

impl Failpoint {
    /// Whether the call changes the disk.
    #[cfg(feature = "crash-points")]
    pub fn is_change(self) -> bool {
        use Failpoint::{BaseOpen, BaseRead, RunPick, StoreCheck, StoreRead};
        !matches!(self, StoreRead | StoreCheck | BaseOpen | BaseRead | RunPick)
    }
}

/// Marks that the named call is about to be made.
///
/// # Errors
/// The errno that a test asked for; none without the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn hit(_: Failpoint) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "crash-points")]
pub use rules::{Change, boot, hit, record, set_boot, set_recorder, trace, with};

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

    /// The action at a failpoint.
    #[derive(Clone, Debug)]
    enum Action {
        Kill,
        Fail(Errno),
        Log(String),
        Begin,
    }

    #[derive(Clone, Debug)]
    struct Rule {
        action: Action,
        names: Names,
        nth: u64,
        /// Whether the rule also applies to all later hits.
        onwards: bool,
        seen: u64,
    }

    /// The failpoints to which a rule applies.
    #[derive(Clone, Copy, Debug)]
    enum Names {
        Changes,
        OfBase,
        All,
        One(Failpoint),
    }

    impl Names {
        fn has(self, failpoint: Failpoint) -> bool {
            match self {
                Names::Changes => failpoint.is_change(),
                Names::OfBase => failpoint.is_change() && failpoint.name().starts_with("base."),
                Names::All => true,
                Names::One(wanted) => wanted == failpoint,
            }
        }
    }

    fn names(text: &str) -> Result<Names, String> {
        let one = || ALL.iter().copied().find(|failpoint| failpoint.name() == text);
        match text {
            "any" => Ok(Names::Changes),
            "base" => Ok(Names::OfBase),
            "all" => Ok(Names::All),
            _ => one().map(Names::One).ok_or_else(|| format!("no failpoint is called '{text}'")),
        }
    }

    fn errno(name: &str) -> Option<Errno> {
        use Errno::{EACCES, EAGAIN, EDQUOT, EFBIG, EINTR, EIO, ENOSPC, EOPNOTSUPP, EPERM, EROFS};
        let known = [EACCES, EAGAIN, EDQUOT, EFBIG, EINTR, EIO, ENOSPC, EOPNOTSUPP, EPERM, EROFS];
        known.into_iter().find(|errno| format!("{errno:?}") == name)
    }

    impl FromStr for Rule {
        type Err = String;

        fn from_str(text: &str) -> Result<Rule, String> {
            let (verb, rest) = text.split_once(':').ok_or_else(|| text.to_owned())?;
            if verb == "log" {
                let action = Action::Log(rest.to_owned());
                return Ok(Rule { action, names: Names::Changes, nth: 1, onwards: true, seen: 0 });
            }
            if verb == "begin" {
                let names = names(rest)?;
                return Ok(Rule { action: Action::Begin, names, nth: 1, onwards: false, seen: 0 });
            }
            let mut words = rest.split(':');
            let name = words.next().unwrap_or_default();
            let names = names(name)?;
            let count = words.next().unwrap_or_default();
            let nth = count
                .trim_end_matches('+')
                .parse()
                .map_err(|_| format!("not a number: '{count}'"))?;
            let action = match (verb, words.next()) {
                ("kill", None) => Action::Kill,
                ("fail", Some(name)) => Action::Fail(errno(name).ok_or_else(|| text.to_owned())?),
                _ => return Err(text.to_owned()),
            };
            Ok(Rule { action, names, nth, onwards: count.ends_with('+'), seen: 0 })
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
        RULES.get_or_init(|| {
            Mutex::new(parse(&std::env::var("JAILFS_FAILPOINTS").unwrap_or_default()))
        })
    }

    thread_local! {
        static OF_THREAD: RefCell<Vec<Rule>> = const { RefCell::new(Vec::new()) };
        static TRACE: RefCell<Option<Vec<(Failpoint, bool)>>> = const { RefCell::new(None) };
    }

    /// Runs `work`. Returns each call that this thread made meanwhile, and whether a rule made it
    /// fail.
    pub fn trace<T>(work: impl FnOnce() -> T) -> (T, Vec<(Failpoint, bool)>) {
        TRACE.set(Some(Vec::new()));
        let done = work();
        (done, TRACE.take().unwrap_or_default())
    }

    /// Runs `work` under rules that apply to this thread only.
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

    /// Marks that the named call is about to be made.
    ///
    /// # Errors
    /// The errno of a rule that makes this call fail.
    pub fn hit(failpoint: Failpoint) -> io::Result<()> {
        let mut begun = OF_THREAD.with_borrow_mut(|rules| follow(rules, failpoint));
        if begun.is_ok() {
            begun = follow(&mut of_process().lock(), failpoint);
        }
        TRACE.with_borrow_mut(|trace| {
            trace.iter_mut().for_each(|all| all.push((failpoint, begun.is_err())))
        });
        begun
    }

    fn follow(rules: &mut [Rule], failpoint: Failpoint) -> io::Result<()> {
        for rule in rules.iter_mut() {
            let is_begun = rule.seen > 0;
            rule.seen += u64::from(rule.names.has(failpoint));
            match rule.action {
                Action::Begin if is_begun => continue,
                Action::Begin => return Ok(()),
                _ if !rule.names.has(failpoint) => continue,
                _ => {}
            }
            if rule.seen != rule.nth && !(rule.onwards && rule.seen > rule.nth) {
                continue;
            }
            match &rule.action {
                Action::Kill => {
                    nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL)?;
                }
                Action::Fail(errno) => return Err(io::Error::from(*errno)),
                Action::Log(path) => {
                    let mut file =
                        std::fs::OpenOptions::new().append(true).create(true).open(path)?;
                    writeln!(file, "{}", failpoint.name())?;
                }
                Action::Begin => {}
            }
        }
        Ok(())
    }

    /// A completed change of the disk. Files and directories are named by their inode numbers.
    #[derive(Clone, Debug)]
    #[expect(
        missing_docs,
        reason = "the fields are the arguments of the call that each variant names"
    )]
    pub enum Change {
        /// A file was opened, and created if it did not exist.
        Open { dir: u64, name: String, ino: u64 },
        /// Bytes were written.
        Write { ino: u64, offset: u64, bytes: Vec<u8> },
        /// A file was cut or extended to this length.
        Cut { ino: u64, len: u64 },
        /// A range became a hole.
        Punch { ino: u64, range: ByteRange },
        /// Everything written to the file survives a power cut.
        Sync { ino: u64 },
        /// A name was renamed in its directory, and replaced the other name.
        Rename { dir: u64, from: String, to: String },
        /// A name was removed.
        Remove { dir: u64, name: String },
        /// A directory was created or existed already.
        Mkdir { dir: u64, name: String, ino: u64 },
        /// The names of a directory survive a power cut.
        SyncDir { ino: u64 },
        /// All changes so far survive a power cut.
        SyncAll {},
    }

    static BOOT: RwLock<Option<([u8; 16], Timestamp)>> = RwLock::new(None);

    /// Replaces the boot id and the time of boot for the whole process, or ends the replacement.
    pub fn set_boot(boot: Option<([u8; 16], Timestamp)>) {
        *BOOT.write() = boot;
    }

    /// The boot id and the time of boot that a test has set, in this process or in `JAILFS_BOOT`.
    pub fn boot() -> Option<([u8; 16], Timestamp)> {
        static OF_PROCESS: OnceLock<Option<([u8; 16], Timestamp)>> = OnceLock::new();
        let of_process = || parse_boot(&std::env::var("JAILFS_BOOT").ok()?);
        BOOT.read().or_else(|| *OF_PROCESS.get_or_init(of_process))
    }

    fn parse_boot(text: &str) -> Option<([u8; 16], Timestamp)> {
        let (id, secs) = text.split_once('@')?;
        let at = Timestamp { secs: secs.parse().ok()?, nanos: 0 };
        Some((u128::from_str_radix(id, 16).ok()?.to_be_bytes(), at))
    }

    type Recorder = Box<dyn Fn(Change) + Send + Sync>;

    static RECORDER: RwLock<Option<Recorder>> = RwLock::new(None);

    /// Passes every change of a store to `recorder` from now on; `None` ends that. A process has
    /// one recorder.
    pub fn set_recorder(recorder: Option<Recorder>) {
        *RECORDER.write() = recorder;
    }

    /// Passes a change to the recorder, if there is one.
    ///
    /// # Errors
    /// Those of `change`, which computes it.
    pub fn record(change: impl FnOnce() -> io::Result<Change>) -> io::Result<()> {
        if let Some(recorder) = &*RECORDER.read() {
            recorder(change()?);
        }
        Ok(())
    }
}
