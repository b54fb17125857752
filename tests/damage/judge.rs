//! The allowed outcomes of a damaged store.

use std::path::Path;

use jailfs::sandbox::Sandbox;
use jailfs::sandbox::{Request, Rev};
use jailfs::types::TreePath;

use crate::cases::Case;
use crate::world::{World, live, log, operations, restore, state};

/// The outcome of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// The damage changes nothing in the file.
    Same,
    /// Everything is as before.
    Truth,
    /// The store does not open, and the error names the file.
    Refused,
    /// The store opens. Some reads give errors, and the others the former content.
    Reported,
    /// The losses that docs/SEMANTICS.md names; the rest is as before.
    Less,
}

impl Verdict {
    /// Parses the outcome in a line of the corpus; `None` for `any`.
    pub fn parse(text: &str) -> Option<Verdict> {
        match text {
            "any" => None,
            "truth" => Some(Verdict::Truth),
            "refused" => Some(Verdict::Refused),
            "reported" => Some(Verdict::Reported),
            "less" => Some(Verdict::Less),
            other => panic!("'{other}' is no verdict"),
        }
    }
}

/// Damages a copy of the store, and reads everything from it.
pub fn judge(world: &World, place: &Path, case: &Case) -> Result<Verdict, String> {
    world.copy_to(place);
    let store = place.join("store");
    if !case.do_to(world, &store) {
        return Ok(Verdict::Same);
    }
    let checked = Sandbox::check_store(&store, true);
    let is_advertised = checked.as_ref().map_or(true, |checked| !checked.problems.is_empty());
    let opened = Sandbox::open(&store);
    if !world.base_is_whole() {
        return Err("it changes the base".to_owned());
    }
    let verdict = match opened {
        Err(error) => {
            let text = format!("{error} {}", error.hint.as_deref().unwrap_or_default());
            if !is_named(case, &text) {
                return Err(format!("the error does not name the file: {text}"));
            }
            if !is_advertised {
                return Err(format!("it is refused, and the check finds nothing: {text}"));
            }
            Verdict::Refused
        }
        Ok(sandbox) => shown(world, case, &sandbox, is_advertised)?,
    };
    if !world.base_is_whole() {
        return Err("it changes the base".to_owned());
    }
    Ok(verdict)
}

/// Whether an error names the file: by path, name or layer.
fn is_named(case: &Case, error: &str) -> bool {
    let mut parts = case.file.split('/');
    let layer = match (parts.next(), parts.next()) {
        (Some("layers"), Some(layer)) => layer.trim_start_matches('0').to_owned(),
        _ => {
            return error.contains(&case.file)
                || case.file == "format" && error.contains("not a jailfs store");
        }
    };
    error.contains(&case.file) || error.contains(&format!("layer {layer}"))
}

fn shown(
    world: &World,
    case: &Case,
    sandbox: &Sandbox,
    is_advertised: bool,
) -> Result<Verdict, String> {
    let truth = &world.truth;
    let in_open_layer = case.file.starts_with(&world.open_layer());
    // Without checksums, damage cannot be noticed.
    let may_be_other = world.is_unsummed(&case.file);
    let (mut less, mut errors) = (false, Vec::new());
    let log = log(sandbox);
    if log != truth.log {
        let lost: Vec<_> = truth.log.iter().filter(|c| !log.contains(c)).collect();
        let new: Vec<_> = log.iter().filter(|c| !truth.log.contains(c)).collect();
        return Err(format!("the log is another: without {lost:?}, with {new:?}"));
    }
    if operations(sandbox) != truth.operations {
        return Err("the log of operations is another".to_owned());
    }
    let mut hold =
        |what: &str, found: Result<Vec<String>, String>, truth: &Vec<String>, may_differ: bool| {
            match found {
                Err(error) => errors.push(format!("{what}: {error}")),
                Ok(found) if found == *truth => {}
                Ok(_) if may_differ => less = true,
                Ok(found) => {
                    let lost: Vec<_> =
                        truth.iter().filter(|line| !found.contains(line)).take(3).collect();
                    let new: Vec<_> =
                        found.iter().filter(|line| !truth.contains(line)).take(3).collect();
                    return Err(format!("{what} is another: without {lost:#?}, with {new:#?}"));
                }
            }
            Ok(())
        };
    hold("the tree", live(sandbox), &truth.now, in_open_layer || may_be_other)?;
    for checkpoint in &truth.log {
        let id = checkpoint.id.to_string();
        hold(&id, state(sandbox, &Rev::Id(checkpoint.id)), &truth.states[&id], may_be_other)?;
    }
    let path = TreePath::parse(b"open").unwrap();
    // It is a convenience: an error is allowed, and so is less content.
    drop(sandbox.handle(Request::History { path }));
    for name in World::RESTORED {
        match restore(sandbox, name) {
            Ok(()) => {
                hold("what was restored", live(sandbox), &truth.restored[name], may_be_other)?
            }
            Err(error) => hold("the restore", Err(error), &Vec::new(), false)?,
        }
    }
    if !errors.is_empty() && !is_advertised {
        return Err(format!("there are errors, and the check finds nothing: {errors:#?}"));
    }
    Ok(match (errors.is_empty(), less) {
        (false, _) => Verdict::Reported,
        (true, true) => Verdict::Less,
        (true, false) => Verdict::Truth,
    })
}
