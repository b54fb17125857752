//! How mount(8) calls a filesystem.
//!
//! `mount -t fuse.jailfs BASE MNT` runs `mount.fuse.jailfs BASE MNT [-sfnv] [-o OPTIONS] [-t TYPE]` if there is a
//! program of that name, which may be a link to this one. If not, it runs `mount.fuse3`, which runs
//! `jailfs BASE MNT [-o OPTIONS]`, with `dev` and `suid` added to the options whether or not somebody wanted them: so
//! these two are dropped in that form.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use crate::error::{Error, Kind, Result};

/// Turns the arguments of a mount helper into those of `jailfs mount`; others stay as they are. None if there is
/// nothing to do (`-f`: only pretend).
///
/// # Errors
/// `Usage`: an argument that helpers do not have.
pub(super) fn rewrite(arguments: Vec<OsString>) -> Result<Option<Vec<OsString>>> {
    match form(&arguments) {
        None => Ok(Some(arguments)),
        Some(form) => as_mount(form, arguments.get(1..).unwrap_or_default()),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Called by mount(8) itself.
    Direct,
    /// Called by mount.fuse3.
    ThroughFuse,
}

fn form(arguments: &[OsString]) -> Option<Form> {
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    if name.is_some_and(|name| name == "mount.fuse.jailfs" || name == "mount.jailfs") {
        return Some(Form::Direct);
    }
    // No verb has a slash in it.
    let source = arguments.get(1)?.as_bytes();
    (!source.starts_with(b"-") && source.contains(&b'/')).then_some(Form::ThroughFuse)
}

fn as_mount(form: Form, arguments: &[OsString]) -> Result<Option<Vec<OsString>>> {
    let mut places = Vec::new();
    let mut rewritten: Vec<OsString> = ["jailfs", "mount"].map(OsString::from).to_vec();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_bytes() {
            b"-o" => {
                let options = rest.next().ok_or_else(|| bad(argument))?;
                rewritten.extend([OsString::from("-o"), kept_options(form, options)]);
            }
            b"-t" => drop(rest.next().ok_or_else(|| bad(argument))?),
            flags if flags.starts_with(b"-") && flags.len() > 1 => {
                if !flags.iter().skip(1).all(|flag| b"sfnv".contains(flag)) {
                    return Err(bad(argument));
                }
                if flags.contains(&b'f') {
                    return Ok(None);
                }
            }
            _ => places.push(argument.clone()),
        }
    }
    rewritten.push("--".into());
    rewritten.extend(places);
    Ok(Some(rewritten))
}

fn kept_options(form: Form, options: &OsStr) -> OsString {
    let added_unasked = |option: &[u8]| form == Form::ThroughFuse && (option == b"dev" || option == b"suid");
    let kept: Vec<&[u8]> =
        options.as_bytes().split(|byte| *byte == b',').filter(|option| !added_unasked(option)).collect();
    OsString::from_vec(kept.join(&b','))
}

fn bad(argument: &OsStr) -> Error {
    Error::new(
        Kind::Usage,
        format!("read the argument '{}'", argument.display()),
        "mount(8) gives no such argument to a helper, or its value is missing",
    )
    .hint("by hand: jailfs mount BASE MNT [-o OPTIONS]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> Option<String> {
        let arguments = line.split(' ').map(OsString::from).collect();
        rewrite(arguments).unwrap().map(|words| words.join(OsStr::new(" ")).into_string().unwrap())
    }

    #[test]
    fn a_helper_call_is_a_mount() {
        let table = [
            ("/sbin/mount.fuse.jailfs /b /m", "jailfs mount -- /b /m"),
            ("mount.fuse.jailfs b m -n -o rw,suid", "jailfs mount -o rw,suid -- b m"),
            ("mount.jailfs /b /m -sv -o ro -t fuse.jailfs", "jailfs mount -o ro -- /b /m"),
            ("jailfs /b /m -o rw,dev,suid,noexec", "jailfs mount -o rw,noexec -- /b /m"),
            ("jailfs ./b /m", "jailfs mount -- ./b /m"),
            ("jailfs mount /b /m", "jailfs mount /b /m"),
            ("jailfs -C /x log", "jailfs -C /x log"),
            ("jailfs", "jailfs"),
        ];
        for (line, expected) in table {
            assert_eq!(rewritten(line).as_deref(), Some(expected), "{line}");
        }
        assert_eq!(rewritten("mount.fuse.jailfs /b /m -f"), None);
    }

    #[test]
    fn an_unknown_argument_is_refused() {
        for line in ["mount.fuse.jailfs /b /m -x", "mount.fuse.jailfs /b /m -o", "jailfs /b /m --json"] {
            let arguments = line.split(' ').map(OsString::from).collect();
            assert_eq!(rewrite(arguments).unwrap_err().kind, Kind::Usage, "{line}");
        }
    }
}
