//! `jailfs export`.
//!
//! The sandbox writes a tar archive to a pipe, and this process does everything with it that
//! touches the host: with the rights, the directory and the disk of the caller.

use std::ffi::OsString;
use std::io::{self, IsTerminal, PipeReader, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use clap::Args;
use tempfile::NamedTempFile;

use super::Global;
use super::format;
use super::json::Line;
use super::out::{self, Out};
use super::target::{Target, wrong_answer};
use crate::error::{Attempt, Error, Kind, Result};
use crate::oci::{Layout, is_tag};
use crate::sandbox::transfer::Stream;
use crate::sandbox::{Checkpoint, Detail, ExportTerms, Exported, Reply, Request, Rev};

/// The tag of an image without one.
const DEFAULT_TAG: &str = "latest";
const BUFFER: usize = 256 << 10;

/// Write a state to an archive, an image or a patch
///
/// The same state gives the same bytes. '-' is standard output. A file is complete or not there: it
/// is written beside its name, and then renamed.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("form").required(true).args(["oci", "tar", "patch"])))]
pub(super) struct Export {
    /// The state: '@' for now, the number or name of a checkpoint, '@-N', 'base', 'HEAD@',
    /// 'HEAD@NAME'
    #[arg(value_name = "STATE")]
    state: String,
    /// Only what differs from this state
    #[arg(long, value_name = "STATE")]
    since: Option<String>,
    /// An image in an OCI layout, for umoci, skopeo and podman
    #[arg(long, value_name = "DIR[:TAG]")]
    oci: Option<OsString>,
    /// A tar archive; with --since a layer with whiteouts
    #[arg(long, value_name = "FILE|-")]
    tar: Option<PathBuf>,
    /// A patch for 'git apply', from the base or --since
    #[arg(long, value_name = "FILE|-")]
    patch: Option<PathBuf>,
    /// One layer per checkpoint up to the state, instead of one for all
    #[arg(long, conflicts_with_all = ["tar", "patch"])]
    layers: bool,
    /// Replace a file or a tag that exists
    #[arg(long)]
    force: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

/// The result, for the output.
struct Done {
    form: &'static str,
    /// Where it is; none for standard output.
    at: Option<String>,
    digest: Option<String>,
    exported: Exported,
}

impl Export {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let done = match (&self.oci, &self.tar, &self.patch) {
            (Some(image), _, _) => self.to_layout(&mut target, global, image)?,
            (_, Some(file), _) => self.to_tar(&mut target, global, file)?,
            (_, _, Some(file)) => self.to_patch(&mut target, global, file)?,
            (None, None, None) => return Err(wrong_answer()),
        };
        self.tell(&done)?;
        Ok(0)
    }

    fn terms(&self, is_layer: bool) -> ExportTerms {
        ExportTerms {
            state: Rev::parse(&self.state),
            since: self.since.as_deref().map(Rev::parse),
            is_layer,
            stream: Stream::default(),
        }
    }

    fn to_tar(&self, target: &mut Target, global: &Global, path: &Path) -> Result<Done> {
        let mut file = Output::new(global, path, self.force)?;
        let exported = receive(target, self.terms(false), |mut pipe| {
            copy(&mut pipe, &mut file).attempt(|| "write the archive")
        })?;
        Ok(Done { form: "tar", at: file.finish()?, digest: None, exported })
    }

    fn to_patch(&self, target: &mut Target, global: &Global, path: &Path) -> Result<Done> {
        let mut file = Output::new(global, path, self.force)?;
        let from = self.since.as_deref().map_or(Rev::Base, Rev::parse);
        let (to, paths, detail) = (Rev::parse(&self.state), Vec::new(), Detail::Patch);
        let request = Request::Diff { from, to, paths, detail };
        let Reply::Diff(changes) = target.call(request)? else { return Err(wrong_answer()) };
        let (mut entries, mut bytes) = (0, 0);
        for change in &changes {
            let patch = change?.patch.unwrap_or_default();
            entries += 1;
            bytes += patch.len() as u64;
            file.write_all(&patch).attempt(|| "write the patch")?;
        }
        let exported = Exported { entries, bytes, skipped: Vec::new(), skipped_count: 0 };
        Ok(Done { form: "patch", at: file.finish()?, digest: None, exported })
    }

    fn to_layout(&self, target: &mut Target, global: &Global, image: &OsString) -> Result<Done> {
        let (dir, tag) = split_tag(image);
        let (dir, tag) = (global.at(&dir)?, tag.unwrap_or_else(|| DEFAULT_TAG.to_owned()));
        let steps = if self.layers { self.steps(target)? } else { vec![self.terms(true)] };
        let layout = Layout::create_or_open(&dir)?;
        let place = format!("{}:{tag}", dir.display());
        if !self.force && layout.has_tag(&tag)? {
            return Err(exists(&place));
        }
        let mut layers = Vec::new();
        let mut all = Exported { entries: 0, bytes: 0, skipped: Vec::new(), skipped_count: 0 };
        for (number, terms) in steps.into_iter().enumerate() {
            let text = match self.layers {
                true => format!("jailfs export, layer {}", number + 1),
                false => "jailfs export".to_owned(),
            };
            let mut layer = layout.new_layer()?;
            let exported = receive(target, terms, |mut pipe| {
                copy(&mut pipe, &mut layer).attempt(|| format!("write '{place}'"))
            })?;
            layers.push(layout.finish_layer(layer, text)?);
            all.entries += exported.entries;
            all.bytes += exported.bytes;
            all.skipped_count += exported.skipped_count;
            all.skipped = exported.skipped;
        }
        let digest = layout.tag(&tag, layers)?;
        Ok(Done { form: "oci", at: Some(place), digest: Some(digest), exported: all })
    }

    /// One export per layer: up to the first checkpoint, then from each to the next.
    fn steps(&self, target: &mut Target) -> Result<Vec<ExportTerms>> {
        let Reply::Log(log) = target.call(Request::Log)? else { return Err(wrong_answer()) };
        let until = Rev::parse(&self.state);
        let mut line = lineage(target, &log, &until)?;
        let mut since = self.since.as_deref().map(Rev::parse);
        match &since {
            // The base is the first layer, and then each checkpoint.
            None => line.insert(0, Rev::Base),
            Some(Rev::Base) => {}
            Some(rev) => {
                let from = lineage(target, &log, rev)?;
                line.retain(|step| !from.contains(step) && step != rev);
            }
        }
        if line.last() != Some(&until) {
            line.push(until);
        }
        let terms = line.into_iter().map(|state| {
            let since = since.replace(state.clone());
            ExportTerms { state, since, is_layer: true, stream: Stream::default() }
        });
        Ok(terms.collect())
    }

    fn tell(&self, done: &Done) -> Result<()> {
        let Exported { entries, bytes, skipped, skipped_count } = &done.exported;
        for path in skipped {
            out::note(&format!("'{path}' is a socket, which no archive can hold; it is left out"));
        }
        if let Some(more) = skipped_count.checked_sub(skipped.len() as u64).filter(|n| *n > 0) {
            out::note(&format!("{more} more sockets are left out"));
        }
        let Some(at) = &done.at else { return Ok(()) };
        let mut out = Out::new();
        if self.json {
            let line = Line::Exported {
                form: done.form,
                to: at.clone(),
                digest: done.digest.clone(),
                entries: *entries,
                bytes: *bytes,
                left_out: *skipped_count,
            };
            out.line(&line.text()?);
        } else {
            let state = format::one_line(&self.state);
            let size = format::size(*bytes);
            out.line(&format!("exported {state} to {at}: {entries} entries, {size}"));
            if let Some(digest) = &done.digest {
                out.line(&format!("digest: {digest}"));
            }
        }
        out.finish()
    }
}

/// The checkpoints that lead to a state, oldest first. A named one is the last.
fn lineage(target: &mut Target, log: &[Checkpoint], until: &Rev) -> Result<Vec<Rev>> {
    let found = match until {
        Rev::Base => return Ok(Vec::new()),
        Rev::Now => log.iter().find(|one| one.current),
        Rev::Head { back: 0, .. } => {
            let attempt = format!("find the checkpoints up to '{until}'");
            return Err(Error::new(Kind::Usage, attempt, "--layers takes '@' or a checkpoint"));
        }
        Rev::Id(_) | Rev::Name(_) | Rev::Of { .. } | Rev::Back(_) | Rev::Head { .. } => {
            let Reply::Checkpoint(found) = target.call(Request::Find { rev: until.clone() })?
            else {
                return Err(wrong_answer());
            };
            log.iter().find(|one| one.id == found.id)
        }
    };
    let Some(found) = found else { return Ok(Vec::new()) };
    let mut line = Vec::new();
    let mut at = Some(found);
    while let Some(one) = at {
        if !one.automatic && one.id != found.id {
            line.push(Rev::Id(one.id));
        }
        at = log.iter().find(|below| Some(below.id) == one.parent && below.id < one.id);
    }
    line.reverse();
    if !found.automatic || *until != Rev::Now {
        line.push(if *until == Rev::Now { Rev::Id(found.id) } else { until.clone() });
    }
    Ok(line)
}

/// The parts of `DIR[:TAG]`.
pub(super) fn split_tag(image: &OsString) -> (PathBuf, Option<String>) {
    let bytes = image.as_bytes();
    let colon = bytes.iter().rposition(|byte| *byte == b':');
    let parts = colon.and_then(|at| {
        let tag = std::str::from_utf8(bytes.get(at + 1..)?).ok().filter(|tag| is_tag(tag))?;
        let dir = bytes.get(..at).filter(|dir| !dir.is_empty())?;
        Some((OsString::from_vec(dir.to_vec()).into(), Some(tag.to_owned())))
    });
    parts.unwrap_or_else(|| (PathBuf::from(image), None))
}

/// Asks the sandbox for an archive, and gives the pipe to `consume`.
fn receive(
    target: &mut Target,
    mut terms: ExportTerms,
    consume: impl FnOnce(PipeReader) -> Result<()>,
) -> Result<Exported> {
    let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
    terms.stream = Stream::new(writer);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| target.call(Request::Export(terms)));
        let consumed = consume(reader);
        let reply = asking.join().map_err(|_| wrong_answer())?;
        // After a failed write here, the sandbox only knows that the pipe was closed.
        consumed?;
        match reply? {
            Reply::Exported(exported) => Ok(exported),
            _ => Err(wrong_answer()),
        }
    })
}

fn copy(from: &mut impl Read, to: &mut impl Write) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(got) => to.write_all(buffer.get(..got).unwrap_or_default())?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn exists(place: &str) -> Error {
    Error::new(Kind::Failed, format!("write '{place}'"), "it exists")
        .hint("choose another name, or replace it with --force")
}

/// Where an archive goes: standard output, or a file that gets its name at the end.
enum Output {
    Stdout(io::Stdout),
    File { file: NamedTempFile, path: PathBuf, replace: bool },
}

impl Output {
    fn new(global: &Global, path: &Path, replace: bool) -> Result<Output> {
        if path == Path::new("-") {
            let stdout = io::stdout();
            if stdout.is_terminal() {
                let why = "standard output is a terminal";
                return Err(Error::new(Kind::Usage, "write the archive", why)
                    .hint("name a file, or send it to a program by '|'"));
            }
            return Ok(Output::Stdout(stdout));
        }
        let path = global.at(path)?;
        if !replace && path.symlink_metadata().is_ok() {
            return Err(exists(&path.display().to_string()));
        }
        let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty());
        let mode = std::fs::Permissions::from_mode(0o666);
        let file = tempfile::Builder::new()
            .prefix(".jailfs-")
            .permissions(mode)
            .tempfile_in(dir.unwrap_or(Path::new(".")));
        let file = file.attempt(|| format!("write '{}'", path.display()))?;
        Ok(Output::File { file, path, replace })
    }

    /// Makes the file visible. Returns its path.
    fn finish(self) -> Result<Option<String>> {
        match self {
            Output::Stdout(mut stdout) => {
                stdout.flush().attempt(|| "write the output")?;
                Ok(None)
            }
            Output::File { file, path, replace } => {
                let shown = path.display().to_string();
                let attempt = || format!("write '{shown}'");
                file.as_file().sync_all().attempt(attempt)?;
                let named = match replace {
                    true => file.persist(&path),
                    false => file.persist_noclobber(&path),
                };
                named.map(drop).map_err(|error| error.error).attempt(attempt)?;
                Ok(Some(shown))
            }
        }
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Output::Stdout(stdout) => stdout.write(bytes),
            Output::File { file, .. } => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Output::Stdout(stdout) => stdout.flush(),
            Output::File { file, .. } => file.flush(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_stands_behind_the_last_colon() {
        for (image, dir, tag) in [
            ("img", "img", None),
            ("img:v1", "img", Some("v1")),
            ("/a:b/img", "/a:b/img", None),
            ("/a:b/img:x-1.2", "/a:b/img", Some("x-1.2")),
            (":x", ":x", None),
            ("img:", "img:", None),
        ] {
            let expected = (PathBuf::from(dir), tag.map(str::to_owned));
            assert_eq!(split_tag(&OsString::from(image)), expected, "{image}");
        }
    }
}
