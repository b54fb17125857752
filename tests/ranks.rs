//! Checks the architecture (docs/ARCHITECTURE.md): a module imports only from lower ranks, only
//! `sys` is unsafe, one file knows bincode, and the files of a folder do not import each other in
//! circles.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The ranks, lowest first. Modules of one rank do not import each other.
const RANKS: &[&[&str]] = &[
    &["types"],
    &["error"],
    &["sys"],
    &["tree", "tar", "oci"],
    &["store", "base", "jail", "registry"],
    &["fs", "artifact"],
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

#[test]
fn files_of_one_folder_do_not_import_each_other_in_circles() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let modules = modules(&src);
    let mut imports: BTreeMap<Module, BTreeSet<Module>> = BTreeMap::new();
    for (module, file) in modules.iter().filter(|(module, _)| !is_test(module)) {
        let code = code_of(&std::fs::read_to_string(file).unwrap());
        let paths = imported(&code, module);
        let found = paths.into_iter().filter_map(|path| module_of(path, &modules));
        imports.entry(module.clone()).or_default().extend(found);
    }
    let edges = imports.values().map(BTreeSet::len).sum::<usize>();
    assert!(edges > 500, "the test reads the sources: {edges} imports");
    let folders: BTreeSet<Module> =
        modules.keys().filter_map(|module| module.split_last()).map(|(_, up)| up.into()).collect();
    let circles: BTreeSet<(String, Vec<String>)> =
        folders.iter().flat_map(|folder| circles_in(folder, &imports)).collect();
    assert_eq!(circles, BTreeSet::new(), "files that import each other in a circle");
}

/// The path of a module, from the root of the crate.
type Module = Vec<String>;

/// The file of each module.
fn modules(src: &Path) -> BTreeMap<Module, PathBuf> {
    let mut files = Vec::new();
    sources(src, &mut files);
    let path_of = |file: &PathBuf| {
        let path = file.strip_prefix(src).unwrap().with_extension("");
        let mut names: Module = path.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
        names.pop_if(|name| name == "mod");
        names
    };
    files.into_iter().map(|file| (path_of(&file), file)).collect()
}

fn is_test(module: &Module) -> bool {
    module.last().is_some_and(|name| name == "tests" || name.ends_with("_tests"))
}

/// The code of a file, without comments and without its test module, which is at the end.
fn code_of(text: &str) -> String {
    let lines: Vec<&str> = text.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let is_test_module = |at: &usize| {
        let mut rest = lines[at + 1..].iter().map(|line| line.trim());
        lines[*at].trim() == "#[cfg(test)]"
            && rest
                .find(|line| !line.starts_with("#["))
                .is_some_and(|line| line.starts_with("mod ") && line.ends_with('{'))
    };
    let end = (0..lines.len()).find(is_test_module).unwrap_or(lines.len());
    lines[..end].join("\n")
}

/// The paths in the crate that the code of a module names by `crate::` or `super::`.
fn imported(code: &str, module: &Module) -> Vec<Module> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        path_tree(&code[at + "crate::".len()..], Vec::new(), &mut found);
    }
    let parent = module.split_last().map_or(&[][..], |(_, up)| up);
    for (at, _) in code.match_indices("super::").filter(|(at, _)| !code[..*at].ends_with("super::"))
    {
        let (mut rest, mut up) = (&code[at + "super::".len()..], parent);
        while let Some(next) = rest.strip_prefix("super::") {
            (rest, up) = (next, up.split_last().map_or(up, |(_, up)| up));
        }
        path_tree(rest, up.to_vec(), &mut found);
    }
    found
}

/// Collects the paths of a use tree such as `a::{b, c::d}`. Returns the code behind it.
fn path_tree<'c>(code: &'c str, mut path: Module, found: &mut Vec<Module>) -> &'c str {
    let mut rest = code.trim_start();
    loop {
        if let Some(group) = rest.strip_prefix('{') {
            rest = group.trim_start();
            while !rest.is_empty() && !rest.starts_with('}') {
                let after = path_tree(rest, path.clone(), found).trim_start();
                let next = after.strip_prefix(',').unwrap_or(after).trim_start();
                // A group that is no use tree, such as `crate::f({ .. })`.
                if next.len() == rest.len() {
                    return rest;
                }
                rest = next;
            }
            return rest.strip_prefix('}').unwrap_or(rest);
        }
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (name, after) = rest.split_at(end);
        if !name.is_empty() && name != "self" {
            path.push(name.to_owned());
        }
        match after.strip_prefix("::") {
            Some(next) if !name.is_empty() => rest = next,
            _ => {
                found.push(path);
                return after;
            }
        }
    }
}

/// The module that a path leads into.
fn module_of(mut path: Module, modules: &BTreeMap<Module, PathBuf>) -> Option<Module> {
    while !path.is_empty() && !modules.contains_key(&path) {
        path.pop();
    }
    (!path.is_empty()).then_some(path)
}

/// The circles among the files and folders of one folder.
fn circles_in(
    folder: &Module,
    imports: &BTreeMap<Module, BTreeSet<Module>>,
) -> Vec<(String, Vec<String>)> {
    let name_in = |module: &Module| {
        module.strip_prefix(folder.as_slice()).and_then(|rest| rest.first()).cloned()
    };
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, used) in imports {
        let Some(name) = name_in(module) else { continue };
        let others = used.iter().filter_map(name_in).filter(|other| *other != name);
        graph.entry(name.clone()).or_default().extend(others);
    }
    let reached: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|name| (name, reached_from(name, &graph))).collect();
    let circle_of = |name: &String| -> Vec<String> {
        let meets = |other: &&&String| reached.get(**other).is_some_and(|of| of.contains(name));
        reached[name].iter().filter(meets).map(|other| other.to_string()).collect()
    };
    let circles: BTreeSet<Vec<String>> =
        graph.keys().map(circle_of).filter(|circle| circle.len() > 1).collect();
    circles.into_iter().map(|circle| (folder.join("::"), circle)).collect()
}

/// The names that imports lead to from `name`, in any number of steps.
fn reached_from<'g>(
    name: &'g String,
    graph: &'g BTreeMap<String, BTreeSet<String>>,
) -> BTreeSet<&'g String> {
    let mut reached = BTreeSet::new();
    let mut next = vec![name];
    while let Some(name) = next.pop() {
        let others = graph.get(name).into_iter().flatten();
        next.extend(others.filter(|other| reached.insert(*other)));
    }
    reached
}

#[test]
fn use_trees_are_read_whole() {
    let code = "use crate::a::{self, b::{C, d}, E};\nsuper::f::g(); crate::h::i({ 1 });";
    let mut paths: Vec<String> =
        imported(code, &vec!["x".into(), "y".into()]).iter().map(|path| path.join("::")).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["a", "a::E", "a::b::C", "a::b::d", "h::i", "x::f::g"]);
}
