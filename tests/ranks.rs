//! Checks the architecture (docs/ARCHITECTURE.md): a module imports only from lower ranks, only
//! `sys` is unsafe, and one file knows bincode.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a failure is what a test is for")]

use std::path::{Path, PathBuf};

/// The ranks, lowest first. Modules of one rank do not import each other.
const RANKS: &[&[&str]] = &[
    &["types"],
    &["error"],
    &["sys"],
    &["tree"],
    &["store", "base", "jail"],
    &["fs"],
    &["timeline"],
    &["sandbox"],
    &["fuse", "control"],
    &["daemon", "run"],
    &["cli"],
];

fn rank(module: &str) -> usize {
    RANKS
        .iter()
        .position(|rank| rank.contains(&module))
        .unwrap_or_else(|| panic!("module '{module}' has no rank"))
}

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// The top-level modules that a line of code names by `crate::`; comments do not count.
fn named(line: &str) -> Vec<String> {
    let code = line.split("//").next().unwrap_or("");
    code.split("crate::")
        .skip(1)
        .map(|rest| rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect())
        .filter(|word: &String| !word.is_empty())
        .collect()
}

#[test]
fn modules_import_only_from_lower_ranks() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let mut checked = 0;
    let mut broken = Vec::new();
    for file in files {
        let inside = file.strip_prefix(&src).unwrap();
        let first = inside.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.strip_suffix(".rs").unwrap_or(first);
        if matches!(module, "lib" | "main" | "internals") {
            continue;
        }
        for (number, line) in std::fs::read_to_string(&file).unwrap().lines().enumerate() {
            for other in named(line) {
                checked += 1;
                if other != module && rank(&other) >= rank(module) {
                    broken.push(format!(
                        "{}:{}: {module} uses {other}",
                        inside.display(),
                        number + 1
                    ));
                }
            }
        }
    }
    assert!(checked > 200, "the test reads the sources: {checked}");
    assert!(broken.is_empty(), "\n{}", broken.join("\n"));
}

#[test]
fn every_module_has_a_rank() {
    let lib =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let modules = lib.lines().filter_map(|line| {
        line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ")?.strip_suffix(';')
    });
    let modules = modules.filter(|module| *module != "internals");
    assert_eq!(modules.map(rank).count(), RANKS.iter().map(|r| r.len()).sum::<usize>());
}

#[test]
fn only_sys_is_unsafe() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    for file in files.iter().filter(|f| !f.starts_with(src.join("sys"))) {
        for line in std::fs::read_to_string(file).unwrap().lines() {
            let code = line.split("//").next().unwrap_or("");
            assert!(
                !code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == "unsafe"),
                "{}",
                file.display()
            );
        }
    }
}

#[test]
fn one_file_knows_bincode() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    let users: Vec<_> = files
        .iter()
        .filter(|f| std::fs::read_to_string(f).unwrap().contains("bincode::"))
        .collect();
    assert_eq!(users, [&src.join("store/io/codec.rs")]);
}
