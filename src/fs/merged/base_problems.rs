//! Records which base paths could not be read or changed behind the sandbox, for `status`.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::error::FsError;
use crate::types::TreePath;

/// The most paths that are recorded.
const MAX_PROBLEMS: usize = 100;

/// The latest problem at each base path.
#[derive(Default)]
pub(in crate::fs) struct BaseProblems {
    by_path: Mutex<BTreeMap<TreePath, String>>,
}

impl BaseProblems {
    /// Records a problem. Once the record is full, nothing is added to it.
    pub(in crate::fs) fn note(&self, path: &TreePath, problem: &str) {
        let mut by_path = self.by_path.lock();
        if by_path.len() < MAX_PROBLEMS {
            by_path.insert(path.clone(), problem.to_owned());
        }
    }

    /// Records an error.
    pub(super) fn note_error(&self, path: &TreePath, error: &FsError) {
        self.note(path, &error.to_string());
    }

    /// Records drift, and returns the error that reports it.
    pub(super) fn drift(&self, path: &TreePath) -> FsError {
        let error = FsError::Drift(path.clone());
        self.note_error(path, &error);
        error
    }

    /// All recorded problems, sorted by path.
    pub(super) fn list(&self) -> Vec<(TreePath, String)> {
        self.by_path.lock().iter().map(|(path, problem)| (path.clone(), problem.clone())).collect()
    }
}
