//! The interface of mount(8) to a filesystem.
//!
//! `mount -t fuse.jailfs BASE MNT` runs `mount.fuse.jailfs BASE MNT [-sfnv] [-o OPTIONS] [-t TYPE]`
//! if a program of that name exists; it may be a symlink to this one. Otherwise mount(8) runs
//! `mount.fuse3`, which runs `jailfs BASE MNT [-o OPTIONS]`.
//!
//! In both forms root gets the defaults of mount(8): set-id programs and device nodes work unless
//! the options say `nosuid` and `nodev`, which `user` and `users` in fstab(5) imply. A manual call
//! (`jailfs mount`) allows neither.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use crate::error::{Error, Kind, Result};

/// The hidden verb of a remount.
pub(super) const REMOUNT: &str = "__remount";

/// Rewrites the arguments of a mount helper into those of `jailfs mount`. Other arguments stay as
/// they are. None if there is nothing to do (`-f`, a dry run).
///
/// # Errors
/// `Usage`: mount(8) passes no such argument to a helper.
pub(super) fn rewrite(arguments: Vec<OsString>, is_root: bool) -> Result<Option<Vec<OsString>>> {
    if !is_helper_call(&arguments) {
        return Ok(Some(arguments));
    }
    as_mount(arguments.get(1..).unwrap_or_default(), is_root)
}

fn is_helper_call(arguments: &[OsString]) -> bool {
    let name = arguments.first().and_then(|program| Path::new(program).file_name());
    if name.is_some_and(|name| name == "mount.fuse.jailfs" || name == "mount.jailfs") {
        return true;
    }
    // No verb contains a slash. The source of a remount is the value of `fsname=`, if there is one.
    let source = arguments.get(1).map(|source| source.as_bytes());
    let is_path = source.is_some_and(|source| !source.starts_with(b"-") && source.contains(&b'/'));
    is_path || arguments.iter().any(|words| is_remount(words))
}

/// Whether an argument is a list of options with `remount` in it.
fn is_remount(words: &OsStr) -> bool {
    words.as_bytes().split(|byte| *byte == b',').any(|word| word == b"remount")
}

fn as_mount(arguments: &[OsString], is_root: bool) -> Result<Option<Vec<OsString>>> {
    let mut places = Vec::new();
    let mut lists = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        match argument.as_bytes() {
            b"-o" => {
                let options = rest.next().ok_or_else(|| bad(argument))?;
                lists.push(kept_options(options, is_root));
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
    // A remount keeps the flags that its options do not name, so the defaults apply to a first
    // mount only.
    let verb = if lists.iter().any(|list| is_remount(list)) {
        REMOUNT
    } else {
        if is_root {
            lists.insert(0, "dev,suid".into());
        }
        "mount"
    };
    let options = lists.into_iter().flat_map(|list| ["-o".into(), list]);
    let words = ["jailfs", verb].map(OsString::from).into_iter().chain(options);
    Ok(Some(words.chain(["--".into()]).chain(places).collect()))
}

/// Drops `dev` and `suid` from the options of an ordinary user.
fn kept_options(options: &OsStr, is_root: bool) -> OsString {
    let is_kept = |option: &&[u8]| is_root || !matches!(*option, b"dev" | b"suid");
    let kept: Vec<&[u8]> = options.as_bytes().split(|byte| *byte == b',').filter(is_kept).collect();
    OsString::from_vec(kept.join(&b','))
}

fn bad(argument: &OsStr) -> Error {
    Error::new(
        Kind::Usage,
        format!("read the argument '{}'", argument.display()),
        "mount(8) passes no such argument to a helper, or its value is missing",
    )
    .hint("to mount without mount(8): jailfs mount BASE MNT [-o OPTIONS]")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(line: &str) -> Option<String> {
        let arguments = line.split(' ').map(OsString::from).collect();
        rewrite(arguments, false)
            .unwrap()
            .map(|words| words.join(OsStr::new(" ")).into_string().unwrap())
    }

    #[test]
    fn a_helper_call_is_a_mount() {
        let table = [
            ("/sbin/mount.fuse.jailfs /b /m", "jailfs mount -- /b /m"),
            ("mount.fuse.jailfs b m -n -o rw,suid", "jailfs mount -o rw -- b m"),
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
        let remount = ["jailfs", "/b", "/m", "-o", "rw,remount,ro"].map(OsString::from).to_vec();
        let words = rewrite(remount, true).unwrap().unwrap().join(OsStr::new(" "));
        assert_eq!(words, "jailfs __remount -o rw,remount,ro -- /b /m");
        let by_root = ["jailfs", "/b", "/m", "-o", "rw,nosuid"].map(OsString::from).to_vec();
        let words = rewrite(by_root, true).unwrap().unwrap().join(OsStr::new(" "));
        assert_eq!(words, "jailfs mount -o dev,suid -o rw,nosuid -- /b /m");
    }

    #[test]
    fn an_unknown_argument_is_refused() {
        for line in
            ["mount.fuse.jailfs /b /m -x", "mount.fuse.jailfs /b /m -o", "jailfs /b /m --json"]
        {
            let arguments = line.split(' ').map(OsString::from).collect();
            assert_eq!(rewrite(arguments, true).unwrap_err().kind, Kind::Usage, "{line}");
        }
    }
}
