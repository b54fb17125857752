//! Checkpoints of databases while they write. Each is what a crash at that moment would have left,
//! so the database recovers, with all transactions that it had acknowledged.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::harness::shell;
use crate::place::{Place, User};

/// The number of checkpoints.
const ROUNDS: usize = 4;

/// A step that runs until a file tells it to end. It is killed, with all processes that it started,
/// when it is dropped before.
struct Begun(Child);

impl Begun {
    fn begin(place: &Place, step: &str) -> Begun {
        let path = place.live.outside().join("begun.log");
        let log = std::fs::OpenOptions::new().write(true).create_new(true).open(path).unwrap();
        let mut command: Command = place.begin(step);
        Begun(command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap())
    }

    /// Waits for its end, which must be a success.
    fn end(mut self, place: &Place) {
        let status = self.0.wait().unwrap();
        let log =
            std::fs::read_to_string(place.live.outside().join("begun.log")).unwrap_or_default();
        assert!(status.success(), "{status}\n{log}");
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        // timeout(1) passes SIGTERM on to its group.
        if let (Ok(None), Ok(pid)) = (self.0.try_wait(), i32::try_from(self.0.id())) {
            let pid = nix::unistd::Pid::from_raw(pid);
            let _ended = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
            drop(self.0.wait());
        }
    }
}

/// Waits until a number has grown by this much.
#[track_caller]
fn grown(by: u64, number: impl Fn() -> u64) {
    let (start, end) = (number(), Instant::now() + Duration::from_secs(60));
    while number() < start + by {
        assert!(Instant::now() < end, "the database does not go on");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn lines(dir: &Path) -> u64 {
    shell(dir, "cat *.committed 2> /dev/null | wc -l").trim().parse().unwrap()
}

#[test]
fn every_checkpoint_of_a_writing_sqlite_is_a_consistent_database() {
    let place = Place::new("sqlite", User::Root, &[]);
    let out = place.out();
    place.step("begin");
    let begun = Begun::begin(&place, "live");
    for round in 0..ROUNDS {
        grown(40, || lines(&out));
        // A transaction that is acknowledged here is committed before the checkpoint.
        shell(&out, &format!("mkdir then{round}; cp *.committed then{round}"));
        place.live.checkpoint(&format!("c{round}"));
    }
    shell(&out, "touch stop");
    begun.end(&place);
    for round in [2, 0, 3, 1] {
        place.live.restore(&format!("c{round}"));
        shell(&out, &format!("rm -rf then; cp -r then{round} then"));
        place.step("lived");
    }
}

/// A server that is stopped if the test fails before that.
struct Server<'a>(&'a Place);

impl Drop for Server<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            drop(self.0.begin("halt").output());
        }
    }
}

#[test]
fn every_checkpoint_of_a_writing_postgres_recovers_as_after_a_crash() {
    let place = Place::new("postgres", User::Ordinary, &["-o", "allow_other"]);
    let out = place.out();
    let _server = Server(&place);
    place.step("begin");
    let begun = Begun::begin(&place, "live");
    let count = || place.step("count").trim().parse::<u64>().unwrap();
    for round in 0..ROUNDS {
        grown(100, count);
        shell(&out, &format!("echo {} > then{round}", count()));
        place.live.checkpoint(&format!("c{round}"));
    }
    place.step("halt");
    begun.end(&place);
    for round in [2, 0, 3, 1] {
        place.live.restore(&format!("c{round}"));
        shell(&out, &format!("cp then{round} then"));
        place.step("lived");
    }
}
