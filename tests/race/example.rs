//! `examples/best_of_n.sh`.

use std::path::Path;

use crate::place::{Place, said};

#[test]
fn the_example_repairs_its_program() {
    let place = Place::new();
    std::fs::create_dir(place.at("work")).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/best_of_n.sh");
    let mut command = place.command("work", "sh");
    let told = said(command.arg(script).arg(place.at("work")));
    assert_eq!(told.code, 0, "{told:?}");
    let passing = |when: &str| {
        let line = told.out.lines().find_map(|line| line.strip_prefix(when));
        line.and_then(|rest| rest.split(' ').next()?.parse::<u32>().ok()).expect("a number")
    };
    let (before, after) = (passing("before: "), passing("after: "));
    assert!(after > before, "{before} of 10 before, {after} after: {told:?}");
    assert!(place.read("work/CHANGES").contains("Repaired"), "{told:?}");
    assert_eq!(place.json("work", "forks").len(), 1, "{told:?}");
}
