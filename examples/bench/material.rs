//! Makes the files that the workloads use. They are made once from a fixed seed, and are the same
//! in each run.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::Res;
use crate::args::Size;
use crate::programs::{program, run};

const WORDS: &[&str] = &[
    "the", "tree", "node", "returns", "let", "value", "match", "error", "path", "of", "each",
    "struct", "layer", "if", "some", "none", "read", "write", "offset", "in", "for", "while",
    "range", "file", "name", "and", "not",
];
/// Files in a directory of a tree, and directories in the one above.
const FILES: u64 = 20;
const DIRS: u64 = 20;
/// The branch of the repository that is not checked out, and one file in how many differs there.
pub const OTHER_BRANCH: &str = "other";
pub const CHANGED_ONE_OF: u64 = 6;

/// Numbers that look random (xorshift).
pub struct Numbers(u64);

impl Numbers {
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end.max(1)
    }
}

/// The directory that holds the bases.
pub struct Materials {
    dir: PathBuf,
    pub size: Size,
}

impl Materials {
    pub fn new(dir: PathBuf, size: Size) -> Res<Materials> {
        std::fs::create_dir(&dir)?;
        Ok(Materials { dir, size })
    }

    /// A base that is made at its first use.
    fn once(&self, name: &str, make: impl FnOnce(&Path) -> Res<()>) -> Res<PathBuf> {
        let dir = self.dir.join(name);
        if !dir.exists() {
            std::fs::create_dir(&dir)?;
            make(&dir).map_err(|error| format!("make the base '{name}': {error}"))?;
            sync(&dir)?;
        }
        Ok(dir)
    }

    pub fn empty(&self) -> Res<PathBuf> {
        self.once("empty", |_| Ok(()))
    }

    /// `tree/`: source files under git, packed as after a clone.
    pub fn repository(&self) -> Res<PathBuf> {
        self.once("repository", |dir| {
            let tree = dir.join("tree");
            let git = |args: &[&str]| {
                run(program("git", args, &tree).env("GIT_OPTIONAL_LOCKS", "1")).map(drop)
            };
            // Otherwise git would begin to pack in the background.
            let commit =
                ["-c", "gc.auto=0", "-c", "maintenance.auto=false", "commit", "-q", "-m", "all"];
            let (files, mean) = (self.size.files, self.size.text_bytes / self.size.files);
            write_tree(&tree, files, mean)?;
            git(&["init", "-q", "-b", "main"])?;
            git(&["add", "-A"])?;
            git(&commit)?;
            git(&["checkout", "-q", "-b", OTHER_BRANCH])?;
            for at in (0..files).step_by(usize::try_from(CHANGED_ONE_OF)?) {
                File::options()
                    .append(true)
                    .open(place_in_tree(&tree, at))?
                    .write_all(b"of the other branch\n")?;
            }
            git(&["add", "-A"])?;
            git(&commit)?;
            git(&["checkout", "-q", "main"])?;
            git(&["gc", "-q"])?;
            for at in 0..files {
                File::options().write(true).open(place_in_tree(&tree, at))?.set_modified(old())?;
            }
            git(&["status", "--porcelain"])
        })
    }

    /// `tree/`: many small files.
    pub fn small_files(&self) -> Res<PathBuf> {
        self.once("small-files", |dir| {
            write_tree(&dir.join("tree"), self.size.archive_files, 2_000)
        })
    }

    /// An archive of the small files, outside of all bases.
    pub fn archive(&self) -> Res<PathBuf> {
        let tree = self.small_files()?.join("tree");
        let dir = self.once("archive", |dir| {
            run(program("tar", &["-cf"], dir)
                .arg(dir.join("files.tar"))
                .arg("-C")
                .arg(&tree)
                .arg("."))
            .map(drop)
        })?;
        Ok(dir.join("files.tar"))
    }

    /// `crate/`: a program without dependencies.
    pub fn cargo_crate(&self) -> Res<PathBuf> {
        self.once("crate", |dir| write_crate(&dir.join("crate"), self.size.modules))
    }

    /// `app/`: a package that depends on archives of packages.
    pub fn node_app(&self) -> Res<PathBuf> {
        self.once("npm", |dir| write_packages(&dir.join("app"), self.size.packages))
    }

    /// `big`: one large file.
    pub fn big_file(&self) -> Res<PathBuf> {
        self.once("big", |dir| write_big(&dir.join("big"), self.size.big))
    }

    /// `many/`: so many empty files that a listing takes measurable time.
    pub fn many_files(&self) -> Res<PathBuf> {
        self.once("many", |dir| write_tree(&dir.join("many"), self.size.many, 0))
    }

    /// `db`: a database as large as the large file.
    pub fn database(&self) -> Res<PathBuf> {
        self.once("database", |dir| {
            let script = "import sqlite3, sys\n\
                db = sqlite3.connect('db')\n\
                db.execute('pragma journal_mode=wal')\n\
                db.execute('create table t (id integer primary key, body blob)')\n\
                with db:\n    db.executemany('insert into t values (?, zeroblob(100000))', ((i,) \
                for i in range(int(sys.argv[1]) // 100000)))\n\
                db.execute('pragma wal_checkpoint(truncate)')\n\
                db.close()\n\
                print(0)";
            crate::programs::python(script, &[&self.size.big.to_string()], dir).map(drop)
        })
    }
}

/// Waits until all writes are on disk, so that no measured step waits for them.
pub fn sync(dir: &Path) -> Res<()> {
    nix::unistd::syncfs(File::open(dir)?)?;
    Ok(())
}

/// Makes files of `mean` bytes in a tree three levels deep. They are old, because git
/// reads files that are as new as its index.
fn write_tree(root: &Path, files: u64, mean: u64) -> Res<()> {
    let mut numbers = Numbers::new(files);
    for at in 0..files {
        let path = place_in_tree(root, at);
        if let (0, Some(dir)) = (at % FILES, path.parent()) {
            std::fs::create_dir_all(dir)?;
        }
        let mut file = File::create(path)?;
        if mean > 0 {
            let len = mean / 4 + numbers.below(mean * 3 / 2);
            file.write_all(text(&mut numbers, len).as_bytes())?;
        }
        file.set_modified(old())?;
    }
    Ok(())
}

fn old() -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(1_600_000_000)
}

/// The path of a file of a tree.
fn place_in_tree(root: &Path, file: u64) -> PathBuf {
    let (dir, subdir) = (file / FILES / DIRS, file / FILES % DIRS);
    root.join(format!("d{dir}/s{subdir}/file{file}.rs"))
}

/// Lines of words.
fn text(numbers: &mut Numbers, len: u64) -> String {
    let len = usize::try_from(len).unwrap_or(0);
    let mut text = String::with_capacity(len + 16);
    while text.len() < len {
        let word = numbers.below(WORDS.len() as u64 * 3 / 2);
        match WORDS.get(usize::try_from(word).unwrap_or(0)) {
            Some(word) => text.push_str(word),
            None => text.push_str(&word.to_string()),
        }
        text.push(if numbers.below(9) == 0 { '\n' } else { ' ' });
    }
    text
}

fn write_crate(dir: &Path, modules: u64) -> Res<()> {
    std::fs::create_dir_all(dir.join("src"))?;
    std::fs::write(
        dir.join("Cargo.toml"),
        "[package]\nname = \"generated\"\nversion = \"0.0.0\"\nedition = \"2021\"\n[workspace]\n",
    )?;
    let mut main = String::new();
    for module in 0..modules {
        let mut text = String::new();
        for function in 0..40 {
            writeln!(
                text,
                "pub fn f{function}(x: u64) -> String {{\n    let mut all = Vec::new();\n    for i \
                 in 0..x % 17 {{ all.push(format!(\"{{}} {{}}\", i * {function}, x)); \
                 }}\n    all.sort(); all.join(\",\")\n}}"
            )?;
        }
        std::fs::write(dir.join(format!("src/m{module}.rs")), text)?;
        writeln!(main, "mod m{module};")?;
    }
    main.push_str("fn main() {\n");
    for module in 0..modules {
        for function in 0..40 {
            writeln!(main, "    println!(\"{{}}\", m{module}::f{function}({module}));")?;
        }
    }
    main.push_str("}\n");
    std::fs::write(dir.join("src/main.rs"), main)?;
    Ok(())
}

/// Archives as `npm pack` makes them, and a package that needs them all.
fn write_packages(app: &Path, packages: u64) -> Res<()> {
    let archives = app.join("archives");
    let package = app.join("package");
    std::fs::create_dir_all(&archives)?;
    let mut numbers = Numbers::new(packages);
    let mut needs = Vec::new();
    for at in 0..packages {
        std::fs::create_dir_all(package.join("lib"))?;
        let about = format!("{{\"name\":\"p{at}\",\"version\":\"1.0.0\",\"main\":\"lib/f0.js\"}}");
        std::fs::write(package.join("package.json"), about)?;
        for file in 0..20 {
            std::fs::write(package.join(format!("lib/f{file}.js")), text(&mut numbers, 3_000))?;
        }
        let archive = archives.join(format!("p{at}.tgz"));
        run(program("tar", &["-czf"], app).arg(&archive).arg("package"))?;
        std::fs::remove_dir_all(&package)?;
        needs.push(format!("\"p{at}\":\"file:archives/p{at}.tgz\""));
    }
    let about = format!(
        "{{\"name\":\"app\",\"version\":\"1.0.0\",\"dependencies\":{{{}}}}}",
        needs.join(",")
    );
    std::fs::write(app.join("package.json"), about)?;
    Ok(())
}

fn write_big(path: &Path, len: u64) -> Res<()> {
    let mut numbers = Numbers::new(len);
    let piece: Vec<u8> =
        (0..1 << 20).map(|_| u8::try_from(numbers.below(256)).unwrap_or(0)).collect();
    let mut file = File::create(path)?;
    for _ in 0..len >> 20 {
        file.write_all(&piece)?;
    }
    Ok(())
}
