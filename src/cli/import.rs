//! `jailfs import`.
//!
//! This process opens the archives, decompresses them and checks their digests. The sandbox takes
//! their bytes from a pipe, and shows them only after all of them were right.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::path::Path;

use clap::Args;

use super::Global;
use super::export::split_tag;
use super::format;
use super::json::Line;
use super::out::{self, Out};
use super::target::{Target, wrong_answer};
use crate::error::{Attempt, Error, Kind, Result};
use crate::oci::{Image, Layout, open_tar};
use crate::sandbox::transfer::{FrameWriter, Stream};
use crate::sandbox::{ImportTerms, Imported, Reply, Request, Rev};

const BUFFER: usize = 256 << 10;

/// Replace the tree by that of an archive or an image, in place
///
/// The output says how to undo it. Files that are in the tree already are kept. Only the archive is
/// read, and nothing outside of the store is written.
#[derive(Args)]
pub(super) struct Import {
    /// A tar archive, plain or compressed by gzip or zstd; '-' for standard input; or an image in
    /// an OCI layout, DIR[:TAG]
    #[arg(value_name = "FILE|DIR[:TAG]")]
    source: OsString,
    /// The head whose tree is replaced. A new one is made if there is none of this name
    #[arg(long, value_name = "HEAD")]
    into: Option<String>,
    /// The archive has only changes to this state, with whiteouts, as 'export --since' writes them
    #[arg(long, value_name = "STATE")]
    onto: Option<String>,
    /// Detach mounts on directories that disappear, instead of refusing
    #[arg(long)]
    detach_mounts: bool,
    /// Print JSON objects
    #[arg(long)]
    json: bool,
}

/// The archives on the host.
enum Source {
    Tar(Box<dyn Read>),
    Image(Layout, Image),
}

impl Import {
    pub(super) fn run(&self, global: &Global) -> Result<u8> {
        let mut target = Target::find(global)?;
        let source = self.open(global)?;
        let terms = ImportTerms {
            name: self.name(),
            into: self.into.clone(),
            onto: self.onto.as_deref().map(Rev::parse),
            is_layers: matches!(source, Source::Image(..)),
            is_state: false,
            after: None,
            detach_mounts: self.detach_mounts,
            stream: Stream::default(),
        };
        let imported = send(&mut target, terms, source)?;
        tell(&imported, "imported", self.json)?;
        Ok(0)
    }

    fn name(&self) -> String {
        let path = Path::new(&self.source);
        path.file_name().unwrap_or(path.as_os_str()).display().to_string()
    }

    fn open(&self, global: &Global) -> Result<Source> {
        if self.source == "-" {
            let stdin = io::stdin();
            let file = std::os::fd::AsFd::as_fd(&stdin).try_clone_to_owned();
            let file = file.attempt(|| "read standard input")?;
            return Ok(Source::Tar(open_tar(file.into(), "-")?));
        }
        let whole = global.at(Path::new(&self.source))?;
        if whole.is_dir() {
            return image(&whole, None);
        }
        if let (dir, Some(tag)) = split_tag(&self.source)
            && !whole.exists()
            && global.at(&dir)?.is_dir()
        {
            return image(&global.at(&dir)?, Some(&tag));
        }
        let attempt = || format!("open '{}'", whole.display());
        let file = OpenOptions::new().read(true).open(&whole).attempt(attempt)?;
        Ok(Source::Tar(open_tar(file, &whole.display().to_string())?))
    }
}

/// Prints what was imported or pulled.
pub(super) fn tell(imported: &Imported, verb: &str, is_json: bool) -> Result<()> {
    let mut out = Out::new();
    if is_json {
        for change in &imported.changes {
            out.line(&Line::change(&change?).text()?);
        }
        let line = Line::Imported {
            name: imported.name.clone(),
            head: imported.head.clone(),
            new_head: imported.is_new_head,
            entries: imported.entries,
            left_out: imported.left_out,
            checkpoints: imported.checkpoints,
            edits: imported.edits,
            unnamed: imported.unnamed.clone(),
            before: imported.before.map(|before| before.0),
            undo: imported.undo,
            detached: imported.detached.iter().map(ToString::to_string).collect(),
            changes: imported.changes.len(),
        };
        out.line(&line.text()?);
        return out.finish();
    }
    let (name, head) = (format::one_line(&imported.name), format::one_line(&imported.head));
    if imported.is_new_head {
        out.line(&format!("{verb} {name} into the new head {head}"));
    } else {
        let changes = format::summary(&imported.changes)?;
        out.line(&format!("{verb} {name} into {head}: {changes}"));
        format::list(&imported.changes, true, |line| out.line(line))?;
    }
    if imported.left_out > 0 {
        let count = imported.left_out;
        out.line(&format!("left out: {count} extended attributes of other systems"));
    }
    match imported.checkpoints {
        0 => {}
        1 => out.line("1 checkpoint came along"),
        count => out.line(&format!("{count} checkpoints came along")),
    }
    match imported.edits {
        0 => {}
        1 => out.line("1 edit came along"),
        count => out.line(&format!("{count} edits came along")),
    }
    for name in &imported.unnamed {
        let name = format::one_line(name);
        out::note(&format!("there is a checkpoint '{name}' already; the pulled one has no name"));
    }
    for point in &imported.detached {
        out.line(&format!("detached: the mount at {point}"));
    }
    if let Some(op) = imported.undo {
        out.line(&format!("undo: jailfs op restore {op}"));
    }
    out.finish()
}

fn image(dir: &Path, tag: Option<&str>) -> Result<Source> {
    let layout = Layout::open(dir)?;
    let image = layout.image(tag)?;
    Ok(Source::Image(layout, image))
}

/// Why archives could not be sent.
enum NotSent {
    /// They cannot be read, or are not what they should be.
    Source(Error),
    /// The sandbox has closed the pipe, and its reply says why.
    Pipe(Error),
}

/// Sends archives to the sandbox.
fn send(target: &mut Target, mut terms: ImportTerms, source: Source) -> Result<Imported> {
    let (reader, writer) = io::pipe().attempt(|| "make a pipe")?;
    terms.stream = Stream::new(reader);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| target.call(Request::Import(terms)));
        let sent = send_all(FrameWriter::new(writer), source);
        let reply = asking.join().map_err(|_| wrong_answer())?;
        if let Err(NotSent::Source(error)) = sent {
            return Err(error);
        }
        match (reply?, sent) {
            (Reply::Imported(imported), Ok(())) => Ok(imported),
            (_, Err(NotSent::Pipe(error) | NotSent::Source(error))) => Err(error),
            _ => Err(wrong_answer()),
        }
    })
}

fn send_all(
    mut to: FrameWriter<io::PipeWriter>,
    source: Source,
) -> std::result::Result<(), NotSent> {
    match source {
        Source::Tar(archive) => send_one(&mut to, archive)?,
        Source::Image(layout, image) => {
            for (layer, diff_id) in &image.layers {
                let bytes = layout.layer(layer, diff_id.as_deref()).map_err(NotSent::Source)?;
                send_one(&mut to, bytes).map_err(|failed| match failed {
                    NotSent::Source(error) => {
                        NotSent::Source(error.during(format!("layer {}", layer.digest())))
                    }
                    NotSent::Pipe(error) => NotSent::Pipe(error),
                })?;
            }
        }
    }
    to.commit().attempt(|| "send the archive").map_err(NotSent::Pipe)
}

fn send_one(
    to: &mut FrameWriter<io::PipeWriter>,
    mut from: Box<dyn Read>,
) -> std::result::Result<(), NotSent> {
    let mut buffer = vec![0; BUFFER];
    let sending = |error| NotSent::Pipe(Error::io("send the archive", &error));
    loop {
        match from.read(&mut buffer) {
            Ok(0) => return to.end_archive().map_err(sending),
            Ok(got) => to.bytes(buffer.get(..got).unwrap_or_default()).map_err(sending)?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                let why = match error.raw_os_error() {
                    Some(_) => Error::io("read the archive", &error),
                    None => Error::new(Kind::Failed, "read the archive", error.to_string()),
                };
                return Err(NotSent::Source(why));
            }
        }
    }
}
