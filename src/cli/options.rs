//! Parses `-o OPTIONS`: mount options, as mount(8) and fstab(5) write them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crate::daemon::{Choice, Links, Snapdir};
use crate::error::{Error, Kind, Result};
use crate::fuse::Wake;
use crate::sys::mount::{OPPOSITES, VFS_OPTIONS};
use crate::types::Name;

/// The most threads that serve a mount.
const MAX_THREADS: u8 = 64;
/// The maximum number of versions of a file.
const MAX_VERSIONS: u32 = 1000;

/// The parsed options: those of the mount, and the store.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) choice: Choice,
    pub(super) store: Option<PathBuf>,
}

impl Options {
    /// Parses options separated by commas. A later option overrides an earlier one; `allow-target`
    /// accumulates. Options for mount(8) or fstab(5) alone are ignored.
    ///
    /// # Errors
    /// `Usage`: an unknown option, or an invalid value.
    pub(super) fn parse(texts: &[OsString]) -> Result<Options> {
        let mut options = Options::default();
        for option in texts.iter().flat_map(|text| text.as_bytes().split(|byte| *byte == b',')) {
            options.take(option)?;
        }
        let Choice { threads, parallel, .. } = options.choice;
        if let (Some(threads), Some(parallel)) = (threads, parallel)
            && parallel > threads
        {
            let option = format!("parallel={parallel}");
            let reason = format!("'threads={threads}' allows at most {threads}");
            return Err(bad(option.as_bytes(), &reason));
        }
        if parallel.is_some_and(|number| number > 1) && options.choice.wake == Wake::Spin {
            return Err(bad(b"wake=spin", "it goes with 'parallel=1' only"));
        }
        Ok(options)
    }

    fn take(&mut self, option: &[u8]) -> Result<()> {
        let (key, value) = match option.iter().position(|byte| *byte == b'=') {
            Some(at) => (option.get(..at).unwrap_or_default(), option.get(at + 1..)),
            None => (option, None),
        };
        let choice = &mut self.choice;
        match (key, value) {
            (b"ro", None) => choice.read_only = true,
            (b"rw", None) => choice.read_only = false,
            (b"allow_other", None) => choice.allow_other = Some(true),
            (b"noallow_other", None) => choice.allow_other = Some(false),
            (b"writeback", None) => choice.writeback = true,
            (b"wake", Some(how)) => choice.wake = wake(how)?,
            (b"threads", Some(text)) => choice.threads = Some(number(option, text, threads)?),
            (b"parallel", Some(text)) => choice.parallel = Some(number(option, text, threads)?),
            (b"suid", None) => choice.suid = true,
            (b"nosuid", None) => choice.suid = false,
            (b"dev", None) => choice.dev = true,
            (b"nodev", None) => choice.dev = false,
            (b"noexec", None) => choice.noexec = true,
            (b"exec", None) => choice.noexec = false,
            (b"fsname", Some(name)) if !name.is_empty() => choice.source = name.to_vec(),
            (b"volatile", None) => choice.volatile = true,
            (b"dedup", Some(b"on")) => choice.no_dedup = false,
            (b"dedup", Some(b"off")) => choice.no_dedup = true,
            (b"links", Some(policy)) => choice.links = links(policy)?,
            (b"allow-target", Some(prefix)) => choice.allowed_targets.push(target(prefix)?),
            (b"max-bytes", Some(text)) => choice.max_bytes = Some(number(option, text, size)?),
            (b"max-files", Some(text)) => choice.max_files = Some(number(option, text, count)?),
            (b"gc", Some(b"on")) => choice.no_gc = false,
            (b"gc", Some(b"off")) => choice.no_gc = true,
            (b"keep", Some(text)) => choice.keep = Some(number(option, text, count)?),
            (b"max-store", Some(text)) => choice.max_store = Some(number(option, text, size)?),
            (b"operations", Some(text)) => {
                choice.operations = Some(number(option, text, operations)?)
            }
            (b"history", Some(text)) => choice.history = Some(number(option, text, versions)?),
            (b"history-bytes", Some(text)) => {
                choice.history_bytes = Some(number(option, text, size)?)
            }
            (b"snapdir", Some(how)) => choice.snapdir = snapdir(how)?,
            (b"snapname", Some(name)) => choice.snapname = snapname(name)?,
            (b"snapmkdir", None) => choice.no_snapmkdir = false,
            (b"nosnapmkdir", None) => choice.no_snapmkdir = true,
            (b"store", Some(path)) if !path.is_empty() => self.store = Some(path_of(path)),
            (option, None) if self.take_vfs(option) => {}
            _ if is_for_other_programs(option) => {}
            _ => return Err(bad(option, "the option is unknown, lacks a value, or takes none")),
        }
        Ok(())
    }
}

impl Options {
    /// Takes an option that every filesystem has, or its opposite. Returns whether it is one.
    fn take_vfs(&mut self, option: &[u8]) -> bool {
        let have = &mut self.choice.vfs;
        let find = |word: &[u8]| {
            VFS_OPTIONS.iter().map(|(name, _)| *name).find(|name| name.as_bytes() == word)
        };
        let opposite =
            OPPOSITES.iter().find(|(word, _)| word.as_bytes() == option).map(|(_, name)| *name);
        match (find(option), opposite) {
            (Some(name), _) => {
                // Of the three access-time options the last one counts.
                have.retain(|known| {
                    known != name && !(ATIMES.contains(&name) && ATIMES.contains(&known.as_str()))
                });
                have.push(name.to_owned());
            }
            (None, Some(name)) => have.retain(|known| known != name),
            (None, None) => return false,
        }
        true
    }
}

/// Options that exclude each other.
const ATIMES: &[&str] = &["noatime", "relatime", "strictatime"];

fn number<T>(
    option: &[u8],
    text: &[u8],
    read: fn(&str) -> std::result::Result<T, String>,
) -> Result<T> {
    let text = std::str::from_utf8(text).map_err(|_| bad(option, "its value is not UTF-8"))?;
    read(text).map_err(|reason| bad(option, &reason))
}

/// Parses a size in bytes: `4096`, `512K`, `1.5G`. The units are powers of 1024.
pub(super) fn size(text: &str) -> std::result::Result<u64, String> {
    let wrong = || "a size is a number of bytes, or a number followed by K, M, G or T".to_owned();
    let (number, unit) = match text.char_indices().last() {
        Some((at, 'K' | 'k')) => (text.get(..at), 1u64 << 10),
        Some((at, 'M' | 'm')) => (text.get(..at), 1 << 20),
        Some((at, 'G' | 'g')) => (text.get(..at), 1 << 30),
        Some((at, 'T' | 't')) => (text.get(..at), 1 << 40),
        _ => (Some(text), 1),
    };
    let number = number.unwrap_or_default();
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(unit).ok_or_else(wrong);
    }
    // A fraction of a unit, down to a thousandth.
    let (whole, part) = number.split_once('.').ok_or_else(wrong)?;
    let digits = part.len();
    if unit == 1 || digits == 0 || digits > 3 || !part.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(wrong());
    }
    let thousandths = format!("{part:0<3}").parse::<u64>().map_err(|_| wrong())?;
    let whole =
        whole.parse::<u64>().ok().and_then(|whole| whole.checked_mul(unit)).ok_or_else(wrong)?;
    whole
        .checked_add(unit / 1000 * thousandths + unit % 1000 * thousandths / 1000)
        .ok_or_else(wrong)
}

/// Parses a positive number.
pub(super) fn count(text: &str) -> std::result::Result<u64, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("the value is a number, at least 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

/// Parses a number of operations, which may be 0.
fn operations(text: &str) -> std::result::Result<u64, String> {
    text.parse().map_err(|_| "the value is a number, 0 for none".to_owned())
}

/// Parses a number of threads.
fn threads(text: &str) -> std::result::Result<u8, String> {
    let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && (1..=MAX_THREADS).contains(number));
    number.ok_or_else(|| format!("the value is a number from 1 to {MAX_THREADS}"))
}

/// Parses the number of versions that are kept of a file.
fn versions(text: &str) -> std::result::Result<u32, String> {
    let digits = !text.is_empty() && text.bytes().all(|digit| digit.is_ascii_digit());
    let number = text.parse().ok().filter(|number| digits && *number <= MAX_VERSIONS);
    number.ok_or_else(|| format!("the value is a number from 0 (none) to {MAX_VERSIONS}"))
}

/// Whether an option is for mount(8), systemd or fstab(5) alone.
fn is_for_other_programs(option: &[u8]) -> bool {
    let known: [&[u8]; 13] = [
        b"",
        b"defaults",
        b"auto",
        b"noauto",
        b"nofail",
        b"_netdev",
        b"user",
        b"nouser",
        b"users",
        b"owner",
        b"group",
        b"silent",
        b"loud",
    ];
    known.contains(&option)
        || [&b"x-"[..], b"X-", b"comment="].iter().any(|prefix| option.starts_with(prefix))
}

fn links(policy: &[u8]) -> Result<Links> {
    match policy {
        b"deny" => Ok(Links::Deny),
        b"rewrite" => Ok(Links::Rewrite),
        b"literal" => Ok(Links::Literal),
        b"show" => Ok(Links::Show),
        _ => Err(bad(policy, "links is deny, show, rewrite or literal")),
    }
}

fn wake(how: &[u8]) -> Result<Wake> {
    match how {
        b"auto" => Ok(Wake::Auto),
        b"off" => Ok(Wake::Off),
        b"latency" => Ok(Wake::Latency),
        b"spin" => Ok(Wake::Spin),
        _ => Err(bad(how, "wake is auto, off, latency or spin")),
    }
}

fn snapdir(how: &[u8]) -> Result<Snapdir> {
    match how {
        b"hidden" => Ok(Snapdir::Hidden),
        b"visible" => Ok(Snapdir::Visible),
        b"off" => Ok(Snapdir::Off),
        _ => Err(bad(how, "snapdir is hidden, visible or off")),
    }
}

/// Parses how checkpoints are shown.
pub(super) fn snapdir_text(text: &str) -> std::result::Result<Snapdir, String> {
    snapdir(text.as_bytes()).map_err(|error| error.reason)
}

/// Parses the name of the directory that shows checkpoints.
pub(super) fn snapname_text(text: &str) -> std::result::Result<String, String> {
    snapname(text.as_bytes()).map(|_| text.to_owned()).map_err(|error| error.reason)
}

fn snapname(name: &[u8]) -> Result<Vec<u8>> {
    let name = Name::new(name).map_err(|_| bad(name, "snapname is one name, without '/'"))?;
    Ok(name.as_bytes().to_vec())
}

/// Parses a prefix of symlink targets. It must be absolute and without dots, or it would match
/// other paths than it seems to.
fn target(prefix: &[u8]) -> Result<Vec<u8>> {
    let plain =
        prefix.split(|byte| *byte == b'/').skip(1).all(|name| name != b"." && name != b"..");
    if prefix.starts_with(b"/") && prefix.len() > 1 && plain {
        Ok(prefix.strip_suffix(b"/").unwrap_or(prefix).to_vec())
    } else {
        Err(bad(prefix, "allow-target is an absolute path below '/', without '.' and '..'"))
    }
}

fn path_of(bytes: &[u8]) -> PathBuf {
    OsString::from_vec(bytes.to_vec()).into()
}

fn bad(option: &[u8], reason: &str) -> Error {
    let option = OsStr::from_bytes(option);
    Error::new(Kind::Usage, format!("read the mount option '{}'", option.display()), reason)
        .hint("'jailfs mount --help' lists the options")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Options> {
        Options::parse(&[text.into()])
    }

    fn choice(text: &str) -> Choice {
        parse(text).unwrap().choice
    }

    #[test]
    fn the_number_of_threads_is_set() {
        for (text, threads) in [("threads=1", 1), ("threads=8,threads=64", 64)] {
            let options = Options::parse(&[text.into()]).unwrap();
            assert_eq!(options.choice.threads, Some(threads));
        }
        assert_eq!(choice("threads=4,parallel=4").parallel, Some(4));
    }

    #[test]
    fn every_option_sets_its_field() {
        let plain = Choice::default;
        let table = [
            ("", plain()),
            ("ro", Choice { read_only: true, ..plain() }),
            ("ro,rw", plain()),
            ("allow_other", Choice { allow_other: Some(true), ..plain() }),
            ("noallow_other", Choice { allow_other: Some(false), ..plain() }),
            ("writeback", Choice { writeback: true, ..plain() }),
            ("wake=off", Choice { wake: Wake::Off, ..plain() }),
            ("wake=latency", Choice { wake: Wake::Latency, ..plain() }),
            ("wake=spin", Choice { wake: Wake::Spin, ..plain() }),
            ("wake=spin,wake=auto", plain()),
            ("suid,dev,noexec", Choice { suid: true, dev: true, noexec: true, ..plain() }),
            ("suid,dev,noexec,nosuid,nodev,exec", plain()),
            ("volatile", Choice { volatile: true, ..plain() }),
            ("dedup=off", Choice { no_dedup: true, ..plain() }),
            ("dedup=off,dedup=on", plain()),
            ("links=deny", Choice { links: Links::Deny, ..plain() }),
            ("links=rewrite", Choice { links: Links::Rewrite, ..plain() }),
            ("links=literal", Choice { links: Links::Literal, ..plain() }),
            ("links=show", plain()),
            (
                "allow-target=/usr/bin,allow-target=/nix/",
                Choice { allowed_targets: vec![b"/usr/bin".to_vec(), b"/nix".to_vec()], ..plain() },
            ),
            (
                "max-bytes=1.5G,max-files=1000",
                Choice { max_bytes: Some(3 << 29), max_files: Some(1000), ..plain() },
            ),
            (
                "history=0,history-bytes=64M",
                Choice { history: Some(0), history_bytes: Some(64 << 20), ..plain() },
            ),
            (
                "keep=3,max-store=1G,operations=0,gc=off",
                Choice {
                    keep: Some(3),
                    max_store: Some(1 << 30),
                    operations: Some(0),
                    no_gc: true,
                    ..plain()
                },
            ),
            ("gc=off,gc=on", plain()),
            ("snapdir=hidden,snapmkdir", plain()),
            (
                "snapdir=visible,nosnapmkdir",
                Choice { snapdir: Snapdir::Visible, no_snapmkdir: true, ..plain() },
            ),
            (
                "snapdir=off,snapname=.past",
                Choice { snapdir: Snapdir::Off, snapname: b".past".to_vec(), ..plain() },
            ),
            ("defaults,rw,_netdev,noauto,user,nofail,x-systemd.automount,X-a=b,comment=c", plain()),
        ];
        for (text, expected) in table {
            assert_eq!(choice(text), expected, "{text}");
        }
    }

    #[test]
    fn a_size_has_units_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("2k", 2048),
            ("3M", 3 << 20),
            ("0.5K", 512),
            ("1.25G", 5 << 28),
            ("1T", 1 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn options_may_be_repeated_and_have_any_bytes() {
        let texts = [OsString::from("ro"), OsString::from_vec(b"store=/s\xff".to_vec())];
        let options = Options::parse(&texts).unwrap();
        assert!(options.choice.read_only);
        assert_eq!(options.store.unwrap().as_os_str().as_bytes(), b"/s\xff");
    }

    #[test]
    fn unknown_options_and_values_are_refused() {
        let bad = [
            "nonsense",
            "ro=1",
            "links",
            "links=",
            "links=maybe",
            "store",
            "store=",
            "allow-target",
            "dedup",
            "dedup=maybe",
            "allow-target=usr",
            "allow-target=/",
            "allow-target=/usr/../etc",
            "rw,ro,oops",
            "RO",
            "userx",
            "max-bytes",
            "max-bytes=",
            "max-bytes=x",
            "max-bytes=1.G",
            "max-bytes=1.5",
            "max-bytes=99999999T",
            "max-files=0",
            "snapdir",
            "snapdir=shown",
            "snapname=",
            "snapname=a/b",
            "snapname=..",
            "max-files=1K",
            "keep=0",
            "keep=x",
            "max-store=",
            "operations=-1",
            "gc",
            "gc=maybe",
            "wake",
            "wake=",
            "wake=maybe",
            "wake=500",
            "threads=0",
            "threads=65",
            "threads=+2",
            "threads=",
            "parallel=0",
            "parallel=65",
            "parallel=3,threads=2",
            "parallel=2,wake=spin",
            "spin=500",
            "history=",
            "history=-1",
            "history=1001",
            "history-bytes=x",
        ];
        for text in bad {
            let error = parse(text).unwrap_err();
            assert!(error.kind == Kind::Usage && error.hint.is_some(), "{text}");
        }
    }
}
