//! Reading directories.
//!
//! A cookie is a number that a name of a listing keeps while the listing is in use: it is never an index and never
//! given to another name. So a reader that goes on after a cookie neither misses nor repeats names, whatever came and
//! went meanwhile. A listing is made when a directory is read from its beginning; names that are new then get new
//! cookies behind the others.

use std::collections::{BTreeMap, HashMap};

use crate::error::{FsError, FsResult};
use crate::fs::{Found, Fs};
use crate::types::{FileKind, Ino, Name, NodeId};

/// Cookies 1 and 2 are `.` and `..`.
const FIRST_COOKIE: u64 = 3;

/// The names of a directory in use, each with its cookie.
#[derive(Default)]
pub(super) struct Listing {
    by_cookie: BTreeMap<u64, Name>,
    cookies: HashMap<Name, u64>,
    next: u64,
}

/// A name of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirEntry {
    /// The number of the node.
    pub ino: Ino,
    /// Where a reader goes on after this name.
    pub cookie: u64,
    /// What kind of node it is.
    pub kind: FileKind,
    /// The name; `.` and `..` are given as such.
    pub name: Vec<u8>,
}

impl Listing {
    /// Takes in the names that there are now.
    fn refresh<'a>(&mut self, names: impl Iterator<Item = &'a Name>) {
        let mut old = std::mem::take(&mut self.cookies);
        self.by_cookie.clear();
        self.next = self.next.max(FIRST_COOKIE);
        for name in names {
            let cookie = old.remove(name).unwrap_or_else(|| {
                self.next += 1;
                self.next - 1
            });
            self.by_cookie.insert(cookie, name.clone());
            self.cookies.insert(name.clone(), cookie);
        }
    }
}

impl Fs {
    /// Gives names of a directory to `take`, from behind the cookie `after` on, until it says that it is full.
    ///
    /// # Errors
    /// ENOENT for a directory that is gone, ENOTDIR, or what the base answers.
    pub fn readdir(&self, id: NodeId, after: u64, mut take: impl FnMut(DirEntry) -> bool) -> FsResult<()> {
        let mut core = self.core();
        let (dir, lower) = core.live_dir(id)?;
        let mut known: BTreeMap<Name, (Ino, Option<FileKind>)> = BTreeMap::new();
        if after == 0 || !core.listings.contains_key(&id) {
            known = core.merged_names(dir, lower.as_ref())?;
            core.listings.entry(id).or_default().refresh(known.keys());
        }
        let up = core.parent_of(dir, lower.as_ref())?.map_or(dir, |(ino, _)| ino);
        for (cookie, name, ino) in [(1, &b"."[..], dir), (2, &b".."[..], up)] {
            let entry = DirEntry { ino, cookie, kind: FileKind::Dir, name: name.to_vec() };
            if cookie > after && !take(entry) {
                return Ok(());
            }
        }
        let listing = core.listings.get(&id).ok_or(FsError::NotFound)?;
        for (cookie, name) in listing.by_cookie.range(after.saturating_add(1).max(FIRST_COOKIE)..) {
            let (ino, kind) = match known.get(name) {
                Some((ino, Some(kind))) => (*ino, *kind),
                _ => match core.find(dir, lower.as_ref(), name)? {
                    Found::Covered(ino, _) => (ino, core.tree.node(ino).map_or(FileKind::File, |n| n.kind())),
                    Found::Base(ino, _, node) => (ino, super::lower_kind(&node)),
                    // Removed since the listing was made.
                    Found::Nothing(_) => continue,
                },
            };
            let entry = DirEntry { ino, cookie: *cookie, kind, name: name.as_bytes().to_vec() };
            if !take(entry) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// The names of a directory, sorted, for callers without a mount.
    ///
    /// # Errors
    /// As [`Fs::readdir`].
    pub fn names(&self, id: NodeId) -> FsResult<Vec<Name>> {
        let core = self.core();
        let (dir, lower) = core.live_dir(id)?;
        Ok(core.merged_names(dir, lower.as_ref())?.into_keys().collect())
    }
}
