//! Where the bytes of lower files are stored, and the records that copy-up makes of lower nodes.

use std::fs::File;
use std::sync::Arc;

use crate::base::{BaseStat, require_file};
use crate::error::{FsError, FsResult};
use crate::fs::merged::answers::{self, Question};
use crate::fs::merged::extent_reader::{FoundExtents, HostExtent};
use crate::fs::merged::fingerprint::ANY_TIMES;
use crate::fs::merged::lower::{Lower, LowerNode, meta_of};
use crate::store::record::PreNode;
use crate::sys;
use crate::tree::{Body, Node, Origin, Source, within};
use crate::types::{ByteRange, Epoch, FileKind, TreePath};

/// The most runs of data that copy-up records for one base file. The last one extends to the end.
const MAX_DATA_RUNS: usize = 1000;

/// Ranges of a file, and where each is stored.
pub type Extents = Vec<(ByteRange, Source)>;

impl Lower {
    /// The record that copies a node up, and where its bytes are.
    ///
    /// # Errors
    /// Those of the host.
    pub fn record(&self, path: &TreePath, node: &LowerNode) -> FsResult<(Node, Extents)> {
        match node {
            LowerNode::Pre(pre, _) => Ok(record_of_pre_image(path, pre)),
            LowerNode::Base(stat) => {
                let origin = || Arc::new(Origin { path: path.clone(), print: stat.fingerprint() });
                // All questions are put before the first missing answer counts, so that a served
                // operation runs again once.
                let xattrs = self.xattrs(path, node);
                let mut extents = Ok(Vec::new());
                let body = match stat.kind {
                    FileKind::File => {
                        let origin = origin();
                        extents = self.data_of(&origin, stat);
                        Body::File { size: stat.size, origin: Some(origin) }
                    }
                    FileKind::Dir => Body::Dir { base: Some(path.clone()) },
                    FileKind::Symlink => Body::Symlink { target: self.readlink(path, node)? },
                    FileKind::Fifo | FileKind::Socket | FileKind::Char | FileKind::Block => {
                        Body::Special
                    }
                };
                Ok((Node { meta: meta_of(stat), xattrs: xattrs?, body }, extents?))
            }
        }
    }

    /// The extents of a base file. Holes have none, so only the space that the file takes on disk
    /// counts as content of the sandbox. A file whose holes cannot be found is one extent.
    fn data_of(&self, origin: &Origin, stat: &BaseStat) -> FsResult<Extents> {
        let has_holes = stat.blocks.saturating_mul(512) < stat.size;
        let runs =
            if has_holes { answers::known(self.data_runs(origin, stat.size))? } else { None };
        let runs = runs.unwrap_or_else(|| vec![ByteRange::at(0, stat.size)]);
        let runs = runs.into_iter().filter(|run| !run.is_empty());
        Ok(runs.map(|run| (run, Source::Base { offset: run.start })).collect())
    }

    fn data_runs(&self, origin: &Origin, size: u64) -> FsResult<Vec<ByteRange>> {
        let file = self.open_origin(origin)?;
        answers::answer(Question::DataRuns(origin.path.clone()), move || {
            let (mut runs, mut at) = (Vec::new(), 0);
            while let Some(start) = sys::file::seek_data(&file, at)?.filter(|start| *start < size) {
                let hole = sys::file::seek_hole(&file, start)?.unwrap_or(size).min(size);
                // A run has at least one byte, or this loop would not end.
                let is_last = runs.len() + 1 >= MAX_DATA_RUNS || hole <= start;
                at = if is_last { size } else { hole };
                runs.push(ByteRange { start, end: at });
            }
            Ok(runs)
        })
    }

    /// Where the bytes of a range of a node are, cut at its size.
    ///
    /// # Errors
    /// EISDIR or EINVAL for a node without content; EACCES for hidden content; those of the host.
    pub fn plan(
        &self,
        path: &TreePath,
        node: &LowerNode,
        range: ByteRange,
    ) -> FsResult<Vec<HostExtent>> {
        require_file(node.kind())?;
        self.check_not_hidden(path)?;
        match node {
            LowerNode::Base(stat) => {
                let range = within(range, stat.size);
                if range.is_empty() {
                    return Ok(Vec::new());
                }
                let file = self.open(path, stat)?;
                let extent = HostExtent::in_base(range.len(), file, range.start, path);
                Ok(vec![extent.expecting(&stat.fingerprint())])
            }
            LowerNode::Pre(pre, epoch) => {
                self.locate_pre(pre, within(range, pre.node.size()), *epoch)
            }
        }
    }

    /// Where the bytes of `range` of a base file are now, as this epoch shows the file.
    ///
    /// # Errors
    /// [`FsError::Drift`] if the file no longer matches `origin`; those of the host.
    pub fn locate(&self, origin: &Origin, range: ByteRange) -> FsResult<Vec<HostExtent>> {
        self.locate_in(origin, range, self.epoch)
    }

    fn locate_in(
        &self,
        origin: &Origin,
        range: ByteRange,
        epoch: Epoch,
    ) -> FsResult<Vec<HostExtent>> {
        self.check_not_hidden(&origin.path)?;
        match self.pre_image(&origin.path, epoch) {
            Some((Some(pre), epoch)) => self.locate_pre(pre, range, epoch),
            Some((None, _)) => Err(FsError::Drift(origin.path.clone())),
            None => {
                if let Some((pre, epoch)) = self.pre_image_of_link(origin.print.ino, epoch) {
                    return self.locate_pre(pre, range, epoch);
                }
                let file = self.open_origin(origin)?;
                let extent = HostExtent::in_base(range.len(), file, range.start, &origin.path);
                // While an apply sets the file's attributes, its times change and its content does
                // not.
                let has_times = origin.print.ctime != ANY_TIMES;
                Ok(vec![if has_times { extent.expecting(&origin.print) } else { extent }])
            }
        }
    }

    /// Where the bytes of `range` of a pre-image are; `epoch` is the epoch that its apply began.
    ///
    /// # Errors
    /// As [`Lower::locate`].
    pub fn locate_pre(
        &self,
        pre: &PreNode,
        range: ByteRange,
        epoch: Epoch,
    ) -> FsResult<Vec<HostExtent>> {
        let mut found = FoundExtents::default();
        let mut at = range.start;
        // Search, because a read of a file with many extents takes many steps.
        let first = pre.extents.partition_point(|(extent, _)| extent.end <= range.start);
        let rest = pre.extents.get(first..).unwrap_or_default();
        for (extent, source) in rest.iter().take_while(|(extent, _)| extent.start < range.end) {
            if extent.start > at {
                found.add(Ok([HostExtent::hole(extent.start - at)]))?;
                at = extent.start;
            }
            let end = extent.end.min(range.end);
            match source.advanced(at - extent.start) {
                Source::Pool { layer, offset } => {
                    found.add(HostExtent::in_pool(end - at, &self.store, layer, offset))?;
                }
                Source::Base { offset } => {
                    let Body::File { origin: Some(origin), .. } = &pre.node.body else {
                        return Err(FsError::Damage(
                            "a pre-image refers to the base without an origin",
                        ));
                    };
                    let in_base = ByteRange::at(offset, end - at);
                    found.add(self.locate_in(origin, in_base, epoch))?;
                }
            }
            at = end;
        }
        if at < range.end {
            found.add(Ok([HostExtent::hole(range.end - at)]))?;
        }
        found.all()
    }

    /// Opens the base file that a copied-up node refers to, or finds it open. The file must still
    /// have the fingerprint that it had at copy-up.
    ///
    /// # Errors
    /// [`FsError::Drift`]; those of the host.
    fn open_origin(&self, origin: &Origin) -> FsResult<Arc<File>> {
        let (files, path, print) = (self.files.clone(), origin.path.clone(), origin.print);
        let question = Question::Origin(origin.path.clone(), origin.print);
        let opened = answers::answer(question, move || files.open_as(&path, &print));
        match opened {
            Ok((file, now)) if self.files.is_as(&origin.print, &now) => Ok(file),
            // The path has another file, no node, or one that is not a regular file.
            Ok(_)
            | Err(
                FsError::NotFound
                | FsError::NotADirectory
                | FsError::IsADirectory
                | FsError::Invalid,
            ) => Err(self.drift(&origin.path)),
            Err(error) => Err(self.noted(&origin.path, error)),
        }
    }

    /// Opens the base file that a lookup has just found as `seen`, or finds it open. An open file
    /// must match `seen`, because the path may have another file by now, or the file other content.
    ///
    /// # Errors
    /// EACCES for a hidden file; those of the host.
    pub fn open(&self, path: &TreePath, seen: &BaseStat) -> FsResult<Arc<File>> {
        self.check_not_hidden(path)?;
        let (files, asked, seen) = (self.files.clone(), path.clone(), *seen);
        answers::answer(Question::Opened(path.clone()), move || files.open_seen(&asked, &seen))
            .map_err(|error| self.noted(path, error))
    }

    /// As [`Lower::open`], for a file that is perhaps read next. An error is not recorded yet. None
    /// for a node that is hidden or not a file.
    pub(in crate::fs) fn open_ahead(
        &self,
        path: &TreePath,
        seen: &BaseStat,
    ) -> Option<FsResult<Arc<File>>> {
        let is_readable = seen.kind == FileKind::File && !self.hides(path);
        is_readable.then(|| self.files.open_seen(path, seen))
    }
}

/// The record of a pre-image, and where its bytes are. If the apply left the bytes in the base,
/// they are found again through the path, and the origin has the fingerprint of the file as it is
/// there.
fn record_of_pre_image(path: &TreePath, pre: &PreNode) -> (Node, Extents) {
    let mut record = pre.node.clone();
    let mut extents = pre.extents.clone();
    if let Body::File { size, origin } = &mut record.body
        && let Some(print) = origin.as_ref().map(|origin| origin.print)
    {
        *origin = Some(Arc::new(Origin { path: path.clone(), print }));
        if *size > 0 {
            extents = vec![(ByteRange::at(0, *size), Source::Base { offset: 0 })];
        }
    }
    (record, extents)
}
