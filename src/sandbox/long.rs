//! How much a comparison may tell: less than a reply of the control socket and a value of the codec may hold. All of it is in
//! memory before it is sent, so it ends with the first change that is too much.

use crate::error::{Error, Kind, Result};
use crate::sandbox::verbs::Change;

/// Bytes of patches and paths in one comparison, at most.
const MOST: usize = 240 << 20;
/// What else is told of a change, in bytes, at most.
const ABOUT: usize = 128;

/// The changes, if they are not too long.
pub(super) fn within(
    changes: impl Iterator<Item = Result<Change>>,
    attempt: impl Fn() -> String,
) -> Result<Vec<Change>> {
    no_more_than(MOST, changes, attempt)
}

fn no_more_than(
    most: usize,
    changes: impl Iterator<Item = Result<Change>>,
    attempt: impl Fn() -> String,
) -> Result<Vec<Change>> {
    let (mut told, mut bytes) = (Vec::new(), 0_usize);
    for change in changes {
        let change = change?;
        let paths = [Some(&change.path), change.old_path.as_ref()].into_iter().flatten();
        bytes += ABOUT + paths.map(|path| path.as_bytes().len()).sum::<usize>();
        bytes += change.patch.as_ref().map_or(0, Vec::len);
        if bytes > most {
            return Err(
                Error::new(Kind::Failed, attempt(), "the answer is too long").hint("name fewer paths")
            );
        }
        told.push(change);
    }
    Ok(told)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::verbs::ChangeKind;
    use crate::types::{FileKind, Ino, TreePath};

    fn change(bytes: usize) -> Change {
        Change {
            path: TreePath::parse(b"a").unwrap(),
            kind: ChangeKind::Added,
            old_path: None,
            file: FileKind::File,
            target: None,
            ino: Ino(9),
            old_size: None,
            new_size: Some(1),
            binary: true,
            lines: None,
            patch: Some(vec![b'x'; bytes]),
        }
    }

    #[test]
    fn what_comes_behind_the_change_that_is_too_long_is_not_even_looked_at() {
        let mut asked = 0;
        let changes = [1000, 5000, 1000].into_iter().map(|bytes| {
            asked += 1;
            Ok(change(bytes))
        });
        let error = no_more_than(5000, changes, || "compare".to_owned()).unwrap_err();
        assert_eq!(
            (error.reason.as_str(), error.hint.as_deref()),
            ("the answer is too long", Some("name fewer paths"))
        );
        assert_eq!(asked, 2);
        let fits = no_more_than(5000, [1000, 1000].into_iter().map(|bytes| Ok(change(bytes))), String::new);
        assert_eq!(fits.unwrap().len(), 2);
    }
}
