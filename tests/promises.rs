//! Every test that docs/SEMANTICS.md names for a promise exists.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::path::Path;

/// The names in `(test: `one`, `two`)`, in any number of lines.
fn named_tests(text: &str) -> BTreeSet<String> {
    let groups = text.split("(test:").skip(1).filter_map(|rest| rest.split(')').next());
    groups.flat_map(|group| group.split('`').skip(1).step_by(2).map(str::to_owned)).collect()
}

/// The names of all test functions below a directory, those in `proptest!` included.
fn tests_below(dir: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests_below(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            for rest in text.split("#[test]").skip(1) {
                let name = rest.split("fn ").nth(1).and_then(|name| name.split('(').next());
                found.extend(name.map(str::to_owned));
            }
        }
    }
}

#[test]
fn every_test_named_by_a_promise_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let named = named_tests(&std::fs::read_to_string(root.join("docs/SEMANTICS.md")).unwrap());
    assert!(named.len() > 50, "tests are named as `(test: ...)`");
    let mut existing = BTreeSet::new();
    for dir in ["src", "tests"] {
        tests_below(&root.join(dir), &mut existing);
    }
    let missing: Vec<_> = named.difference(&existing).collect();
    assert!(missing.is_empty(), "docs/SEMANTICS.md names tests that do not exist: {missing:?}");
}

#[test]
fn test_names_are_found_in_the_text() {
    let text = "1. A promise. (test: `one`,\n   `two`) More `code`. (test: `three`)";
    let expected = ["one", "three", "two"].map(str::to_owned);
    assert_eq!(named_tests(text), BTreeSet::from(expected));
}
