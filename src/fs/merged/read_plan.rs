//! A read that knows where its bytes are stored, so that it needs no lock.

use std::sync::Arc;

use crate::error::{FsError, FsResult};
use crate::fs::merged::extent_reader::HostExtent;
use crate::fs::merged::lower::Lower;
use crate::store::ReadGuard;

/// The extents that a read covers. As long as it lives, none of them is freed.
pub struct ReadPlan {
    extents: Vec<HostExtent>,
    lower: Arc<Lower>,
    _guard: ReadGuard,
    /// The bytes, if they were read already.
    ready: Option<Vec<u8>>,
}

impl ReadPlan {
    /// The plan to read `extents`; drift is recorded at `lower`. The caller must have taken `guard`
    /// before it looked for the extents, or they could be freed in between.
    pub(crate) fn new(extents: Vec<HostExtent>, lower: Arc<Lower>, guard: ReadGuard) -> ReadPlan {
        ReadPlan { extents, lower, _guard: guard, ready: None }
    }

    /// A plan whose bytes were read already.
    pub(in crate::fs) fn of_bytes(bytes: Vec<u8>, lower: Arc<Lower>) -> ReadPlan {
        let guard = lower.reading();
        ReadPlan { ready: Some(bytes), ..ReadPlan::new(Vec::new(), lower, guard) }
    }

    /// The base, as the plan reads it.
    pub(in crate::fs) fn lower(&self) -> &Arc<Lower> {
        &self.lower
    }

    /// The number of bytes that the read returns.
    pub fn len(&self) -> u64 {
        match &self.ready {
            Some(bytes) => bytes.len() as u64,
            None => self.extents.iter().map(|extent| extent.len).sum(),
        }
    }

    /// Whether the read is at the end of the file.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the bytes. With `nowait`, returns `None` if that would wait for a disk.
    ///
    /// # Errors
    /// Those of the host; [`FsError::Drift`] if a base file is not what it was.
    pub fn read(&self, nowait: bool) -> FsResult<Option<Vec<u8>>> {
        if let Some(bytes) = &self.ready {
            return Ok(Some(bytes.clone()));
        }
        let len = usize::try_from(self.len()).map_err(|_| FsError::Invalid)?;
        let mut bytes = vec![0; len];
        let mut rest: &mut [u8] = &mut bytes;
        for extent in &self.extents {
            let (part, behind) = rest
                .split_at_mut_checked(usize::try_from(extent.len).map_err(|_| FsError::Invalid)?)
                .ok_or(FsError::Damage("a read plan that is longer than itself"))?;
            rest = behind;
            if !extent.read(part, self.lower.problem_log(), nowait)? {
                return Ok(None);
            }
        }
        Ok(Some(bytes))
    }
}
