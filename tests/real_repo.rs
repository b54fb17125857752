//! A real repository of 20,000 files in a real mount. git, cargo, tar, rsync and sed work in it; it
//! is checkpointed, and half of it is destroyed while a shell is inside. Then it is restored and
//! compared in every attribute, applied, and compared with the base.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const DIRS: usize = 200;
const FILES: usize = 100;

/// The mount of the test; unmounted however the test ends.
struct Mount {
    dir: tempfile::TempDir,
}

fn jailfs() -> Command {
    Command::new(env!("CARGO_BIN_EXE_jailfs"))
}

fn succeed(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

impl Mount {
    fn base(&self) -> PathBuf {
        self.dir.path().join("base")
    }

    fn mnt(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn mount(&self) {
        succeed(
            jailfs()
                .arg("mount")
                .arg(self.base())
                .arg(self.mnt())
                .arg("--store")
                .arg(self.dir.path().join("store")),
        );
    }

    fn unmount(&self) {
        succeed(jailfs().arg("umount").arg(self.mnt()));
    }

    fn verb(&self, words: &[&str]) -> String {
        succeed(jailfs().arg("-C").arg(self.mnt()).args(words))
    }

    /// Runs a script in the mount with a time limit.
    fn sh(&self, script: &str) -> String {
        let home = self.dir.path().join("home");
        std::fs::create_dir_all(&home).unwrap();
        let mut command = Command::new("timeout");
        command.args(["300", "bash", "-euo", "pipefail", "-c", script]).current_dir(self.mnt());
        // cargo and rustup are in the home of the user who runs the tests.
        let real = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let keep = |name: &str, place: &str| {
            std::env::var_os(name).unwrap_or_else(|| real.join(place).into_os_string())
        };
        command
            .env("CARGO_HOME", keep("CARGO_HOME", ".cargo"))
            .env("RUSTUP_HOME", keep("RUSTUP_HOME", ".rustup"));
        command
            .env("HOME", home)
            .env("LC_ALL", "C")
            .env_remove("CARGO_TARGET_DIR")
            .env_remove("RUSTFLAGS");
        for (name, value) in [("NAME", "t"), ("EMAIL", "t@example.org")] {
            command
                .env(format!("GIT_AUTHOR_{name}"), value)
                .env(format!("GIT_COMMITTER_{name}"), value);
        }
        succeed(&mut command)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // It may be unmounted already; after a panic this is the only unmount.
        drop(Command::new("umount").arg("-l").arg(self.mnt()).stderr(Stdio::null()).status());
    }
}

/// A shell in the mount that answers.
struct Shell {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Shell {
    fn at(dir: &Path) -> Shell {
        let mut command = Command::new("sh");
        command.current_dir(dir).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Shell { child, input, output }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{{ {line}; }} 2>&1; echo '::done'").unwrap();
        let mut answer = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the shell ended");
            if line == "::done\n" {
                return answer;
            }
            answer.push_str(&line);
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Everything that lstat and read show of a tree. `host` leaves out what the host decides in an
/// apply.
fn picture(root: &Path, host: bool) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut dirs = vec![root.to_path_buf()];
    while let Some(dir) = dirs.pop() {
        for entry in std::iter::once(dir.clone())
            .chain(std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()))
        {
            let stat = std::fs::symlink_metadata(&entry).unwrap();
            if stat.is_dir() && entry != dir {
                dirs.push(entry);
                continue;
            }
            let content = if stat.is_file() {
                format!("{:x}", crc(&std::fs::read(&entry).unwrap()))
            } else if stat.is_symlink() {
                format!("{:?}", std::fs::read_link(&entry).unwrap())
            } else {
                String::new()
            };
            let mut line = format!(
                "{:o} {} {} {} {}.{:09} {content}",
                stat.mode(),
                stat.uid(),
                stat.gid(),
                if stat.is_dir() { 0 } else { stat.size() },
                stat.mtime(),
                stat.mtime_nsec()
            );
            if !host {
                let more = (
                    stat.ino(),
                    stat.nlink(),
                    stat.ctime(),
                    stat.ctime_nsec(),
                    stat.atime(),
                    stat.atime_nsec(),
                );
                line.push_str(&format!(" {more:?}"));
            }
            all.insert(entry.strip_prefix(root).unwrap().to_path_buf(), line);
        }
    }
    all
}

fn crc(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn assert_same(left: &BTreeMap<PathBuf, String>, right: &BTreeMap<PathBuf, String>, what: &str) {
    let differ: Vec<String> = left
        .keys()
        .chain(right.keys().filter(|k| !left.contains_key(*k)))
        .filter(|path| left.get(*path) != right.get(*path))
        .take(10)
        .map(|path| format!("{}:\n  {:?}\n  {:?}", path.display(), left.get(path), right.get(path)))
        .collect();
    assert!(differ.is_empty(), "{what}\n{}", differ.join("\n"));
}

fn generate(base: &Path) {
    for dir in 0..DIRS {
        let path = base.join(format!("pkg{}/mod{dir}", dir % 20));
        std::fs::create_dir_all(&path).unwrap();
        for file in 0..FILES {
            let text =
                format!("// file {file} of {dir}\npub fn f{file}() -> u32 {{ {} }}\n", dir * file)
                    .repeat(1 + file % 7);
            std::fs::write(path.join(format!("file{file}.rs")), text).unwrap();
        }
    }
    std::fs::create_dir_all(base.join("crate/src")).unwrap();
    let manifest =
        "[package]\nname = \"inner\"\nversion = \"0.1.0\"\nedition = \"2021\"\n[workspace]\n";
    std::fs::write(base.join("crate/Cargo.toml"), manifest).unwrap();
    std::fs::write(base.join("crate/src/main.rs"), "fn main() { println!(\"hello\"); }\n").unwrap();
    std::os::unix::fs::symlink("../pkg0/mod0/file0.rs", base.join("crate/link.rs")).unwrap();
    std::fs::hard_link(base.join("pkg1/mod1/file1.rs"), base.join("twin.rs")).unwrap();
    let git = |words: &[&str]| {
        succeed(
            Command::new("git")
                .args(["-c", "user.name=t", "-c", "user.email=t@example.org"])
                .args(words)
                .current_dir(base),
        )
    };
    git(&["init", "-q", "-b", "main"]);
    // No background job of git may change the tree during the comparison.
    git(&["config", "gc.auto", "0"]);
    git(&["config", "maintenance.auto", "false"]);
    git(&["add", "-A"]);
    git(&["commit", "-qm", "first"]);
}

#[test]
fn a_real_repository_survives_everything_and_is_applied() {
    let mount = Mount { dir: tempfile::tempdir().unwrap() };
    std::fs::create_dir(mount.base()).unwrap();
    std::fs::create_dir(mount.mnt()).unwrap();
    generate(&mount.base());
    let base_before = picture(&mount.base(), true);
    mount.mount();

    // Work as an agent does.
    mount.sh("test -z \"$(git status --porcelain)\"");
    mount.sh("echo '// edited' >> pkg0/mod0/file0.rs; git commit -qam second; \
        git checkout -q -b side HEAD~1; git checkout -q main; git gc -q; git fsck --strict");
    mount.sh("cd crate && cargo build -q --offline && test \"$(target/debug/inner)\" = hello && \
        cargo build --offline 2>&1 | grep -q Finished");
    mount.sh(
        "tar cf ../pkg.tar pkg2 && mkdir un && tar xf ../pkg.tar -C un && diff -r pkg2 un/pkg2",
    );
    mount.sh("rsync -a pkg3/ copy/ && test -z \"$(rsync -ani pkg3/ copy/)\"");
    mount.sh("sed -i 's/file 1 of/FILE 1 OF/' pkg4/mod*/file1.rs && \
        grep -rl 'FILE 1 OF' pkg4 | wc -l | grep -qx 10");
    let status_at_green = mount.sh("git status --porcelain");
    mount.verb(&["checkpoint", "green", "-m", "all is well"]);
    let green = picture(&mount.mnt(), false);
    assert!(green.len() > 20_000);

    // Destroy half of it while shells are inside.
    let mut stays = Shell::at(&mount.mnt().join("pkg0/mod0"));
    let mut goes = Shell::at(&mount.mnt().join("pkg15/mod15"));
    assert_eq!(stays.ask("pwd -P").trim(), mount.mnt().join("pkg0/mod0").to_str().unwrap());
    mount.sh("rm -rf pkg1[0-9] crate/target un; chmod -R go-rwx pkg1; mv pkg5 elsewhere; \
        mkdir pkg5; echo new > pkg5/new; ln pkg6/mod6/file6.rs linked; rm twin.rs; \
        ln -sf ../pkg9/mod9/file9.rs crate/link.rs; touch -d @1 pkg7/mod7/file7.rs; git add -A; \
        git commit -qm destroyed; for i in $(seq 500); do echo $i > pkg8/added$i; done; \
        ln -s /nowhere out; ! cat out 2>/dev/null");
    assert!(goes.ask("mkdir x").contains("No such file"));
    let status = mount.verb(&["status", "--json"]);
    assert!(status.contains("\"changed\""), "{status}");
    mount.verb(&["restore", "green"]);
    assert_same(&green, &picture(&mount.mnt(), false), "after the restore");
    assert_eq!(stays.ask("ls | wc -l").trim(), "100", "a shell in a directory that stayed goes on");
    stays.ask("echo late > ./late; rm ./late");
    assert!(
        goes.ask("mkdir x").contains("No such file"),
        "one in a directory that was removed does not"
    );
    assert!(
        goes.ask("cd ../.. && ls").contains("pkg0"),
        "two levels up from it is still the root of the mount"
    );
    assert_eq!(mount.sh("git status --porcelain"), status_at_green);
    mount.sh("git fsck --strict");
    drop((stays, goes));

    // The same after a remount, and nothing of it in the base.
    mount.verb(&["restore", "green"]);
    let green = picture(&mount.mnt(), false);
    mount.unmount();
    assert_same(&base_before, &picture(&mount.base(), true), "the base before the apply");
    mount.mount();
    assert_same(&green, &picture(&mount.mnt(), false), "after a remount");

    // Apply.
    let output = mount.verb(&["apply", "--protected"]);
    assert!(output.contains("D\t.git/refs/heads/main"), "deletions are listed in full: {output}");
    let shown = picture(&mount.mnt(), true);
    assert_same(&shown, &picture(&mount.base(), true), "the base after the apply");
    assert_eq!(mount.verb(&["diff", "base", "@"]).trim(), "");
    succeed(Command::new("git").args(["fsck", "--strict"]).current_dir(mount.base()));
    mount.verb(&["restore", "green"]);
    assert_same(&green, &picture(&mount.mnt(), false), "a checkpoint from before the apply");
    mount.unmount();
}
