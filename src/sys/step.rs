//! Steps: each change of the disk has a name, so that a test can end the process or fail the call at every one of them.
//!
//! Without the feature `crash-points`, which only tests have, a step is nothing and costs nothing. With it, what is to
//! happen is said by the environment variable `JAILFS_STEPS`, rules separated by commas:
//!
//! ```text
//! kill:NAME:N            SIGKILL to this process before the N-th step NAME (from 1)
//! fail:NAME:N:ERRNO      the N-th step NAME fails with ERRNO and does nothing; `N+`: from the N-th on
//! log:FILE               the name of every step is appended to FILE, a line each
//! ```
//!
//! NAME is a step, or `any` for each change, `base` for each change of the base, or `all` for each call. Calls that only
//! read are steps as well. `any` leaves them out: a kill before a read leaves what a kill before the next change leaves.
//!
//! A rule does not count a call that an earlier rule lets fail. So a second rule can fail a call of the recovery: after
//! `fail:all:N:EIO`, the rule `fail:all:N:EIO` fails the next call, and one with a greater number a later one.
//!
//! A test in the same process sets rules for its own thread by `with` instead. It sees by `record` what was done, and by
//! `trace` which calls its thread made.

macro_rules! steps {
    ($($variant:ident $name:literal,)*) => {
        /// A step; `name` is what tests call it.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Step {
            $(#[doc = $name] $variant,)*
        }

        /// Every step.
        pub const ALL: &[Step] = &[$(Step::$variant,)*];

        impl Step {
            /// What tests call it.
            pub fn name(self) -> &'static str {
                match self {
                    $(Step::$variant => $name,)*
                }
            }
        }
    };
}

steps! {
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
    BaseOpen "base.open",
    BaseRead "base.read",
}

impl Step {
    /// Whether it changes something.
    pub fn is_change(self) -> bool {
        !matches!(self, Step::StoreRead | Step::BaseOpen | Step::BaseRead)
    }
}

/// Says that a step is about to be taken.
///
/// # Errors
/// What a test asked for; none without the feature `crash-points`.
#[cfg(not(feature = "crash-points"))]
#[inline(always)]
pub fn begin(_: Step) -> std::io::Result<()> {
    Ok(())
}

#[cfg(feature = "crash-points")]
pub use rules::{Change, begin, boot, note, record, set_boot, trace, with};

#[cfg(feature = "crash-points")]
mod rules {
    use std::cell::RefCell;
    use std::io::{self, Write};
    use std::str::FromStr;
    use std::sync::OnceLock;

    use nix::errno::Errno;
    use parking_lot::{Mutex, RwLock};

    use super::{ALL, Step};
    use crate::types::{ByteRange, Timestamp};

    /// What happens at a step.
    #[derive(Clone, Debug)]
    enum Action {
        Kill,
        Fail(Errno),
        Log(String),
    }

    #[derive(Clone, Debug)]
    struct Rule {
        action: Action,
        steps: Steps,
        nth: u64,
        /// Whether it also holds for all later ones.
        onwards: bool,
        seen: u64,
    }

    /// The steps that a rule is about.
    #[derive(Clone, Copy, Debug)]
    enum Steps {
        Changes,
        OfBase,
        All,
        One(Step),
    }

    impl Steps {
        fn has(self, step: Step) -> bool {
            match self {
                Steps::Changes => step.is_change(),
                Steps::OfBase => step.is_change() && step.name().starts_with("base."),
                Steps::All => true,
                Steps::One(wanted) => wanted == step,
            }
        }
    }

    fn errno(name: &str) -> Option<Errno> {
        use Errno::{EACCES, EAGAIN, EDQUOT, EFBIG, EINTR, EIO, ENOSPC, EPERM, EROFS};
        let known = [EACCES, EAGAIN, EDQUOT, EFBIG, EINTR, EIO, ENOSPC, EPERM, EROFS];
        known.into_iter().find(|errno| format!("{errno:?}") == name)
    }

    impl FromStr for Rule {
        type Err = String;

        fn from_str(text: &str) -> Result<Rule, String> {
            let (verb, rest) = text.split_once(':').ok_or_else(|| text.to_owned())?;
            if verb == "log" {
                let action = Action::Log(rest.to_owned());
                return Ok(Rule { action, steps: Steps::Changes, nth: 1, onwards: true, seen: 0 });
            }
            let mut words = rest.split(':');
            let name = words.next().unwrap_or_default();
            let steps = match name {
                "any" => Steps::Changes,
                "base" => Steps::OfBase,
                "all" => Steps::All,
                name => ALL
                    .iter()
                    .copied()
                    .find(|step| step.name() == name)
                    .map(Steps::One)
                    .ok_or_else(|| format!("no step is called '{name}'"))?,
            };
            let count = words.next().unwrap_or_default();
            let nth = count.trim_end_matches('+').parse().map_err(|_| format!("not a number: '{count}'"))?;
            let action = match (verb, words.next()) {
                ("kill", None) => Action::Kill,
                ("fail", Some(name)) => Action::Fail(errno(name).ok_or_else(|| text.to_owned())?),
                _ => return Err(text.to_owned()),
            };
            Ok(Rule { action, steps, nth, onwards: count.ends_with('+'), seen: 0 })
        }
    }

    fn parse(text: &str) -> Vec<Rule> {
        let rules: Result<Vec<Rule>, String> =
            text.split(',').filter(|rule| !rule.is_empty()).map(str::parse).collect();
        rules.unwrap_or_else(|why| {
            log::error!("JAILFS_STEPS: {why}");
            std::process::abort()
        })
    }

    fn of_process() -> &'static Mutex<Vec<Rule>> {
        static RULES: OnceLock<Mutex<Vec<Rule>>> = OnceLock::new();
        RULES.get_or_init(|| Mutex::new(parse(&std::env::var("JAILFS_STEPS").unwrap_or_default())))
    }

    thread_local! {
        static OF_THREAD: RefCell<Vec<Rule>> = const { RefCell::new(Vec::new()) };
        static TRACE: RefCell<Option<Vec<(Step, bool)>>> = const { RefCell::new(None) };
    }

    /// Does something and gives each call that this thread began meanwhile, and whether a rule let it fail.
    pub fn trace<T>(work: impl FnOnce() -> T) -> (T, Vec<(Step, bool)>) {
        TRACE.set(Some(Vec::new()));
        let done = work();
        (done, TRACE.take().unwrap_or_default())
    }

    /// Does something under rules that hold for this thread only.
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

    /// Says that a step is about to be taken.
    ///
    /// # Errors
    /// What a rule asks for.
    pub fn begin(step: Step) -> io::Result<()> {
        let mut begun = OF_THREAD.with_borrow_mut(|rules| follow(rules, step));
        if begun.is_ok() {
            begun = follow(&mut of_process().lock(), step);
        }
        TRACE.with_borrow_mut(|trace| trace.iter_mut().for_each(|all| all.push((step, begun.is_err()))));
        begun
    }

    fn follow(rules: &mut [Rule], step: Step) -> io::Result<()> {
        for rule in rules.iter_mut().filter(|rule| rule.steps.has(step)) {
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
                    writeln!(file, "{}", step.name())?;
                }
            }
        }
        Ok(())
    }

    /// A change of the disk that was made. Files and directories are known by their inode numbers.
    #[derive(Clone, Debug)]
    #[expect(missing_docs, reason = "the fields are the arguments of the call that each variant names")]
    pub enum Change {
        /// A file was opened, and made if it was not there.
        Open { dir: u64, name: String, ino: u64 },
        /// Bytes were written.
        Write { ino: u64, offset: u64, bytes: Vec<u8> },
        /// A file has this length now.
        Cut { ino: u64, len: u64 },
        /// A range became a hole.
        Punch { ino: u64, range: ByteRange },
        /// Everything written to the file survives a power cut.
        Sync { ino: u64 },
        /// A name was moved to another in the same directory.
        Rename { dir: u64, from: String, to: String },
        /// A name was removed.
        Remove { dir: u64, name: String },
        /// A directory is there.
        Mkdir { dir: u64, name: String, ino: u64 },
        /// The names of a directory survive a power cut.
        SyncDir { ino: u64 },
        /// Everything that was done so far does.
        SyncAll {},
    }

    static BOOT: RwLock<Option<([u8; 16], Timestamp)>> = RwLock::new(None);

    /// Says which boot of the machine this is to be, for the whole process: it was at this moment.
    pub fn set_boot(boot: Option<[u8; 16]>) {
        *BOOT.write() = boot.map(|boot| (boot, crate::sys::clock::now()));
    }

    /// The boot that a test wants, and when it was.
    pub fn boot() -> Option<([u8; 16], Timestamp)> {
        *BOOT.read()
    }

    type Recorder = Box<dyn Fn(Change) + Send + Sync>;

    static RECORDER: RwLock<Option<Recorder>> = RwLock::new(None);

    /// Tells every change of a store from now on; none ends it. One at a time in a process.
    pub fn record(recorder: Option<Recorder>) {
        *RECORDER.write() = recorder;
    }

    /// Tells a change.
    ///
    /// # Errors
    /// When it cannot be found out.
    pub fn note(change: impl FnOnce() -> io::Result<Change>) -> io::Result<()> {
        if let Some(recorder) = &*RECORDER.read() {
            recorder(change()?);
        }
        Ok(())
    }
}
