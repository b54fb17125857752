//! The table of attacks (`attacker.py`) in every configuration, and where its rows must be seen to
//! get out.
//!
//! The outside is known here and to no process inside: every byte, name, text and attribute
//! contains a word made up for this run, and its inode numbers are known. A row got out if the
//! attacker's output contains any of that, or if anything outside has changed. A row that only
//! fails is safe.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::place::{JAILFS, PATH, Place, STILL_SEEN};

const ATTACKER: &str = include_str!("attacker.py");
const MASK: &str = include_str!("../common/mask.py");
const PYTHON: &str = "/usr/bin/python3";
const ORDINARY_USER: u32 = 65534;

/// A configuration in which the table runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Configuration {
    /// `jailfs mount` as root.
    MountRoot,
    /// `jailfs mount` as an ordinary user, by fusermount3.
    MountUser,
    /// `jailfs run` as root.
    RunRoot,
    /// `jailfs run` as an ordinary user.
    RunUser,
    /// `jailfs mount -o links=deny` as root.
    MountDeny,
    /// `jailfs mount -o links=deny` as root, where openat2(2) fails with this errno.
    Masked(&'static str),
    /// A plain directory: nothing stops an attacker.
    Plain { root: bool },
    /// A kernel overlayfs: nothing stops an attacker.
    Overlay,
}
use Configuration::{Masked, MountDeny, MountRoot, MountUser, Overlay, Plain, RunRoot, RunUser};

/// Rows that read the text of a link that leads out. `links=show` returns it, so with the default
/// options these rows get out of a mount: they learn a text, or open the host's path themselves.
/// `links=deny` refuses them.
const READ_BY_SHOW: [&str; 2] = ["op-readlink-through", "readlink-and-walk-by-hand"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Gets out of a plain directory, and must not get out of our mounts.
    Escape,
    /// Stays inside, and must do the same everywhere.
    Works,
    /// A mount does not stop it, but the walls around the process do.
    Process,
    /// Attacks a checkpoint in the mount, which only our mounts have.
    Checkpoint,
}

#[derive(Clone, Debug)]
struct Row {
    kind: Kind,
    name: String,
    root_only: bool,
    one_disk: bool,
}

impl Configuration {
    fn is_root(self) -> bool {
        !matches!(self, MountUser | RunUser | Plain { root: false })
    }

    /// Whether a row applies in this configuration.
    fn takes(self, row: &Row) -> bool {
        match self {
            MountRoot | MountUser | MountDeny | Masked(_) => row.kind != Kind::Process,
            RunRoot | RunUser => true,
            Plain { .. } | Overlay if row.kind == Kind::Checkpoint => false,
            Plain { root } => root || !row.root_only,
            Overlay => !row.one_disk && row.kind != Kind::Process,
        }
    }

    /// Whether the row must be seen to get out, or must be seen not to.
    fn lets_out(self, row: &Row) -> bool {
        match self {
            Plain { .. } | Overlay => matches!(row.kind, Kind::Escape | Kind::Process),
            MountRoot | MountUser => READ_BY_SHOW.contains(&row.name.as_str()),
            MountDeny | Masked(_) | RunRoot | RunUser => false,
        }
    }

    /// The directory that is attacked.
    fn tree(self) -> &'static str {
        match self {
            MountRoot | MountUser | MountDeny | Masked(_) => "mnt",
            RunRoot | RunUser | Plain { .. } => "base",
            Overlay => "over",
        }
    }

    /// The shell script that runs the attacker.
    fn script(self, attack: &str) -> String {
        let mount = "$JAILFS mount base mnt";
        let end = format!(
            "$JAILFS -C mnt status --json > status; $JAILFS umount mnt 2> end || \
             grep -q '{STILL_SEEN}' end"
        );
        match self {
            MountRoot | MountUser => format!("{mount}; {attack}; {end}"),
            MountDeny => format!("{mount} -o links=deny; {attack}; {end}"),
            Masked(errno) => {
                format!("$PYTHON -I mask.py {errno} {mount} -o links=deny; {attack}; {end}")
            }
            RunRoot | RunUser => format!("cd base; exec $JAILFS run --keep -- {attack}"),
            Plain { .. } | Overlay => format!("exec {attack}"),
        }
    }
}

/// A place with an outside, and the attacker in it.
struct Ground {
    place: Place,
    configuration: Configuration,
    word: String,
    /// The expected outside, and the inode numbers of its nodes.
    before: BTreeMap<PathBuf, String>,
    numbers: Vec<u64>,
    _listener: Option<UnixListener>,
    /// A process outside holds the outside open, as processes of a host do.
    _held: Option<fs::File>,
}

impl Ground {
    fn new(configuration: Configuration) -> Ground {
        let place = Place::new(Duration::from_secs(240));
        let word = format!("word{:016x}", jailfs::internals::sys::process::unlikely_number());
        for dir in ["base", "mnt", "home", "out"] {
            fs::create_dir(place.at(dir)).unwrap();
        }
        fs::copy(JAILFS, place.at("jailfs")).unwrap();
        fs::write(place.at("attacker.py"), ATTACKER).unwrap();
        fs::write(place.at("mask.py"), MASK).unwrap();
        let mut ground = Ground {
            place,
            configuration,
            word,
            before: BTreeMap::new(),
            numbers: Vec::new(),
            _listener: None,
            _held: None,
        };
        ground.fill_outside();
        if !configuration.is_root() {
            for dir in ["base", "mnt", "home", ""] {
                chown(ground.place.at(dir), Some(ORDINARY_USER), Some(ORDINARY_USER)).unwrap();
            }
        }
        if configuration == Overlay {
            ground.place.overlay("over");
        }
        ground.prepare();
        ground
    }

    fn out(&self) -> PathBuf {
        self.place.at("out")
    }

    /// Creates the outside.
    fn fill_outside(&mut self) {
        let (out, word) = (self.out(), self.word.clone());
        self._listener = None;
        fs::remove_dir_all(&out).unwrap();
        fs::create_dir(&out).unwrap();
        let files = ["secret", "private", "dir/deep", "tool"];
        fs::create_dir(out.join("dir")).unwrap();
        fs::create_dir(out.join("empty")).unwrap();
        for file in files {
            fs::write(out.join(file), format!("{word} in {file}\n")).unwrap();
        }
        fs::write(out.join("tool"), format!("#!/bin/sh\necho {word}\n")).unwrap();
        fs::write(out.join(format!("outside-{word}")), "").unwrap();
        symlink(format!("text-{word}"), out.join("link")).unwrap();
        let secret = fs::File::options().write(true).open(out.join("secret")).unwrap();
        jailfs::internals::sys::xattr::set(&secret, b"user.mark", word.as_bytes()).unwrap();
        self.listen();
        let all: Vec<PathBuf> = look(&out).into_keys().collect();
        for path in all {
            if !self.configuration.is_root() && path != Path::new("private") {
                std::os::unix::fs::lchown(
                    out.join(&path),
                    Some(ORDINARY_USER),
                    Some(ORDINARY_USER),
                )
                .unwrap();
            }
        }
        fs::set_permissions(out.join("tool"), PermissionsExt::from_mode(0o755)).unwrap();
        fs::set_permissions(out.join("private"), PermissionsExt::from_mode(0o600)).unwrap();
        self._held = Some(fs::File::open(&out).unwrap());
        self.before = look(&out);
        self.numbers = self
            .before
            .keys()
            .map(|path| out.join(path).symlink_metadata().unwrap().ino())
            .collect();
    }

    /// A server that sends the word to every client.
    fn listen(&mut self) {
        let listener = UnixListener::bind(self.out().join("socket")).unwrap();
        let (heard, word) = (listener.try_clone().unwrap(), self.word.clone());
        std::thread::spawn(move || {
            for stream in heard.incoming() {
                // A client that is gone already has received nothing.
                let _sent = stream.and_then(|mut stream| stream.write_all(word.as_bytes()));
            }
        });
        fs::set_permissions(self.out().join("socket"), PermissionsExt::from_mode(0o777)).unwrap();
        self._listener = Some(listener);
    }

    fn prepare(&self) {
        let tree = self.place.at(self.configuration.tree());
        let base = if self.configuration == Overlay { tree.clone() } else { self.place.at("base") };
        let halves: &[(&str, bool)] = if self.configuration.is_root() {
            &[("all", true)]
        } else {
            &[("root", true), ("user", false)]
        };
        for (half, root) in halves {
            let mut command = if *root { Command::new(PYTHON) } else { as_user(PYTHON) };
            command.arg("-I").arg(self.place.at("attacker.py")).arg("prepare");
            command.arg(&base).arg(&tree).arg(self.out()).arg(half).env("PATH", PATH);
            let output = command.output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }

    /// The parts of the outside that the attacker has seen or changed.
    fn is_out(&self, said: &str) -> Option<String> {
        let now = look(&self.out());
        if now != self.before {
            let differs = |path: &&PathBuf| now.get(*path) != self.before.get(*path);
            let paths: Vec<_> = now.keys().chain(self.before.keys()).filter(differs).collect();
            return Some(format!("changed {paths:?}"));
        }
        let number = self.numbers.iter().any(|number| said.contains(&format!("ino:{number};")));
        (said.contains(&self.word) || said.contains("REVEALED") || number)
            .then(|| format!("revealed {said}"))
    }
}

fn as_user(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", program]);
    command
}

/// Every node below a directory, with all that is visible except access times.
fn look(root: &Path) -> BTreeMap<PathBuf, String> {
    crate::common::snapshot(root)
        .into_iter()
        .map(|seen| {
            let is_dir = seen.stat[2] & 0o170_000 == 0o040_000;
            // The attacker's reads in the control run change access times, and ours change those of
            // directories.
            let stat: Vec<i64> = seen
                .stat
                .iter()
                .enumerate()
                .filter(|(at, _)| !(9..=10).contains(at))
                .map(|(_, n)| *n)
                .collect();
            (seen.path, format!("{stat:?} {is_dir} {:?}", seen.bytes))
        })
        .collect()
}

/// The attacker in a configuration.
struct Attacker {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Attacker {
    fn start(ground: &Ground) -> Attacker {
        let place = &ground.place;
        let [base, tree, out] =
            ["base", ground.configuration.tree(), "out"].map(|dir| place.at(dir));
        let base = if ground.configuration == Overlay { tree.clone() } else { base };
        // The attacker's text is passed as an argument, because the command of a run may not see
        // the file.
        let words = [base, tree, out].map(|path| format!("'{}'", path.display())).join(" ");
        let attack = format!("$PYTHON -I -S -c \"$ATTACKER\" attack {words}");
        let script =
            format!("cd {}; {}", place.top().display(), ground.configuration.script(&attack));
        let mut command = if ground.configuration.is_root() {
            let mut command = Command::new("sh");
            command.args(["-euc", &script]);
            command
        } else {
            // On a usual host all users can use the device; containers often reserve it for root.
            let device =
                "mknod fuse c 10 229 && chmod 666 fuse && mount --bind fuse /dev/fuse && rm fuse";
            let user =
                "exec setpriv --reuid 65534 --regid 65534 --clear-groups sh -euc \"$SCRIPT\"";
            let mut command = Command::new("unshare");
            command.args(["-m", "sh", "-euc", &format!("{device}; {user}")]).env("SCRIPT", script);
            command
        };
        place.environment(&mut command);
        command.env("JAILFS", place.at("jailfs")).env("PYTHON", PYTHON).env("ATTACKER", ATTACKER);
        command
            .current_dir(place.top())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut attacker = Attacker { child, stdin, stdout };
        assert_eq!(attacker.hear(), "\"ready\"");
        attacker
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut error = String::new();
            self.child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
            panic!("the attacker process ended: {error}");
        }
        line.trim_end().to_owned()
    }

    /// Runs a row. Returns how it ended, and its output.
    fn attack(&mut self, row: &Row) -> (String, String) {
        writeln!(self.stdin.as_mut().unwrap(), "\"{}\"", row.name).unwrap();
        serde_json::from_str(&self.hear()).unwrap()
    }

    /// Ends the attacker, and the rest of its script.
    fn end(mut self) {
        self.stdin = None;
        let mut error = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert!(self.child.wait().unwrap().success(), "{error}");
    }
}

fn rows() -> Vec<Row> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("attacker.py");
    fs::write(&file, ATTACKER).unwrap();
    let output = Command::new(PYTHON).arg("-I").arg(file).arg("list").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let rows: Vec<(String, String, bool, bool)> =
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    rows.into_iter()
        .map(|(kind, name, root_only, one_disk)| {
            let kind = match kind.as_str() {
                "ESCAPE" => Kind::Escape,
                "WORKS" => Kind::Works,
                "PROCESS" => Kind::Process,
                "CHECKPOINT" => Kind::Checkpoint,
                other => panic!("no such kind: {other}"),
            };
            Row { kind, name, root_only, one_disk }
        })
        .collect()
}

/// Runs the table in a configuration. Returns the rows that failed, and why.
fn run(configuration: Configuration) -> Ground {
    let mut ground = Ground::new(configuration);
    let mut attacker = Attacker::start(&ground);
    let works = expected();
    let mut wrong = Vec::new();
    let (mut done, mut out) = (0, 0);
    for row in rows().iter().filter(|row| configuration.takes(row)) {
        let (how, said) = attacker.attack(row);
        let escaped = ground.is_out(&said);
        done += 1;
        out += u32::from(escaped.is_some());
        match (configuration.lets_out(row), &escaped) {
            (true, None) => wrong.push(format!("{}: stays in, {how} {said}", row.name)),
            (false, Some(escaped)) => wrong.push(format!("{}: gets out, {escaped}", row.name)),
            _ => {}
        }
        if row.kind == Kind::Works
            && works.get(&row.name).is_some_and(|want| *want != (how.clone(), said.clone()))
        {
            wrong.push(format!("{}: {how} {said}, and not {:?}", row.name, works[&row.name]));
        }
        if row.kind == Kind::Checkpoint && (how.as_str(), said.as_str()) != ("done", "'refused'") {
            wrong.push(format!("{}: {how} {said}", row.name));
        }
        if how == "odd" {
            wrong.push(format!("{}: {said}", row.name));
        }
        if escaped.is_some() {
            ground.fill_outside();
        }
    }
    attacker.end();
    eprintln!("{configuration:?}: {done} rows, {out} of them get out");
    assert_eq!(wrong, Vec::<String>::new(), "{configuration:?}");
    ground
}

/// The output of the rows that work, in a plain directory.
fn expected() -> &'static BTreeMap<String, (String, String)> {
    static EXPECTED: std::sync::OnceLock<BTreeMap<String, (String, String)>> =
        std::sync::OnceLock::new();
    EXPECTED.get_or_init(|| {
        let ground = Ground::new(Plain { root: true });
        let mut attacker = Attacker::start(&ground);
        let all = rows();
        let works = all.iter().filter(|row| row.kind == Kind::Works);
        let said = works.map(|row| (row.name.clone(), attacker.attack(row))).collect();
        attacker.end();
        said
    })
}

#[test]
fn the_table_is_large_and_its_rows_are_different() {
    let rows = rows();
    let of = |kind| rows.iter().filter(|row| row.kind == kind).count();
    eprintln!(
        "{} escapes, {} that work, {} of the process, {} on checkpoints",
        of(Kind::Escape),
        of(Kind::Works),
        of(Kind::Process),
        of(Kind::Checkpoint)
    );
    assert!(of(Kind::Escape) >= 120 && of(Kind::Works) >= 40 && of(Kind::Process) >= 12);
    assert!(of(Kind::Checkpoint) >= 60);
    assert!(expected().values().all(|(how, said)| how == "done" && !said.contains("Traceback")));
}

#[test]
fn every_attack_gets_out_of_a_plain_directory() {
    run(Plain { root: true });
}

#[test]
fn every_attack_of_a_user_gets_out_of_a_plain_directory() {
    run(Plain { root: false });
}

#[test]
fn every_attack_gets_out_of_an_overlayfs() {
    run(Overlay);
}

/// Every blocked escape is counted and reported with link, target and process.
fn check_status(ground: &Ground) {
    let status = fs::read_to_string(ground.place.at("status")).unwrap();
    let lines: Vec<serde_json::Value> =
        status.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines[0]["refused_links"].as_u64() > Some(100), "{}", lines[0]);
    let refused: Vec<_> = lines.iter().filter(|line| line["type"] == "refused_link").collect();
    assert_eq!(
        refused.len() + lines.iter().filter(|line| line["type"] == "refused_rename").count(),
        100
    );
    assert!(
        refused.iter().all(|line| line["pid"].as_u64() > Some(0) && line["target"] != ""),
        "{refused:?}"
    );
    assert!(refused.iter().any(|line| line["process"] == "python3"), "{refused:?}");
    let log = ground.place.at("home/.local/state/jailfs");
    let store = fs::read_dir(log).unwrap().next().unwrap().unwrap().path();
    let log = fs::read_to_string(store.join("daemon.log")).unwrap();
    assert!(
        log.contains(
            "refused the link 'op-read/l', which leads to '../../out/secret', for process "
        ),
        "{log}"
    );
    assert!(log.contains("refused to move '"), "{log}");
}

#[test]
fn nothing_gets_out_of_a_mount_by_root() {
    check_status(&run(MountRoot));
}

#[test]
fn nothing_gets_out_of_a_mount_that_denies_links() {
    check_status(&run(MountDeny));
}

#[test]
fn nothing_gets_out_of_a_mount_by_a_user() {
    check_status(&run(MountUser));
}

#[test]
fn nothing_gets_out_of_a_run_by_root() {
    run(RunRoot);
}

#[test]
fn nothing_gets_out_of_a_run_by_a_user() {
    run(RunUser);
}

#[test]
fn nothing_gets_out_where_openat2_is_missing() {
    check_status(&run(Masked("ENOSYS")));
}

#[test]
fn nothing_gets_out_where_openat2_is_forbidden() {
    check_status(&run(Masked("EPERM")));
}
