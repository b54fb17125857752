//! POSIX ACLs (acl(5)), as far as the server must know them. The kernel checks them.
//!
//! * A new node inherits the default ACL of its directory.
//! * chmod changes the mask of an ACL.
//! * Setting an access ACL changes the permission bits.
//!
//! ```text
//! value = version u32 (2) | entry*        entry = tag u16 | perm u16 | id u32        little-endian
//! ```

use crate::error::{FsError, FsResult};
use crate::tree::Xattrs;

/// The attribute of the access ACL.
pub(in crate::fs) const ACCESS: &[u8] = b"system.posix_acl_access";
/// The attribute of the default ACL.
pub(in crate::fs) const DEFAULT: &[u8] = b"system.posix_acl_default";

/// Whether an attribute is an ACL.
pub(in crate::fs) fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

const VERSION: u32 = 2;
const USER_OBJ: u16 = 0x01;
const GROUP_OBJ: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AclEntry {
    tag: u16,
    perm: u16,
    id: u32,
}

fn parse(value: &[u8]) -> FsResult<Vec<AclEntry>> {
    let Some((version, mut rest)) = value.split_first_chunk::<4>() else {
        return Err(FsError::Invalid);
    };
    if u32::from_le_bytes(*version) != VERSION {
        return Err(FsError::Unsupported);
    }
    let mut entries = Vec::new();
    while let Some(([t0, t1, p0, p1, i0, i1, i2, i3], behind)) = rest.split_first_chunk::<8>() {
        entries.push(AclEntry {
            tag: u16::from_le_bytes([*t0, *t1]),
            perm: u16::from_le_bytes([*p0, *p1]) & 7,
            id: u32::from_le_bytes([*i0, *i1, *i2, *i3]),
        });
        rest = behind;
    }
    if rest.is_empty() { Ok(entries) } else { Err(FsError::Invalid) }
}

fn write(entries: &[AclEntry]) -> Vec<u8> {
    let mut value = VERSION.to_le_bytes().to_vec();
    for entry in entries {
        value.extend_from_slice(&entry.tag.to_le_bytes());
        value.extend_from_slice(&entry.perm.to_le_bytes());
        value.extend_from_slice(&entry.id.to_le_bytes());
    }
    value
}

/// The permission bits that an ACL stands for, and whether it says no more than they do.
fn equivalent_mode(entries: &[AclEntry]) -> (u32, bool) {
    let perm = |tag: u16| entries.iter().find(|e| e.tag == tag).map(|e| u32::from(e.perm));
    let group = perm(MASK).or(perm(GROUP_OBJ)).unwrap_or(0);
    let bits = perm(USER_OBJ).unwrap_or(0) << 6 | group << 3 | perm(OTHER).unwrap_or(0);
    (bits, entries.iter().all(|e| matches!(e.tag, USER_OBJ | GROUP_OBJ | OTHER)))
}

/// Changes each entry that a class of the permission bits stands for, given that class of `bits`.
fn for_each_class(entries: &mut [AclEntry], bits: u32, change: impl Fn(&mut u16, u16)) {
    let has_mask = entries.iter().any(|e| e.tag == MASK);
    for entry in entries.iter_mut() {
        let shift = match entry.tag {
            USER_OBJ => 6,
            GROUP_OBJ if !has_mask => 3,
            MASK => 3,
            OTHER => 0,
            _ => continue,
        };
        change(&mut entry.perm, u16::try_from(bits >> shift & 7).unwrap_or(0));
    }
}

/// The mode and attributes of a new node in a directory with these attributes.
pub(in crate::fs) fn inherit(
    above: &Xattrs,
    mode: u32,
    umask: u32,
    is_dir: bool,
) -> FsResult<(u32, Xattrs)> {
    let Some(default) = above.as_ref().and_then(|x| x.get(DEFAULT)) else {
        return Ok((mode & !(umask & 0o777), None));
    };
    let mut entries = parse(default)?;
    for_each_class(&mut entries, mode, |perm, class| *perm &= class);
    let bits = equivalent_mode(&entries).0;
    let mut xattrs = None;
    if !equivalent_mode(&entries).1 {
        crate::tree::set_xattr(&mut xattrs, ACCESS, Some(&write(&entries)));
    }
    if is_dir {
        crate::tree::set_xattr(&mut xattrs, DEFAULT, Some(default));
    }
    Ok((mode & !0o777 | bits, xattrs))
}

/// The access ACL after chmod, if there is one.
pub(in crate::fs) fn after_chmod(xattrs: &Xattrs, mode: u32) -> FsResult<Option<Vec<u8>>> {
    let Some(value) = xattrs.as_ref().and_then(|x| x.get(ACCESS)) else { return Ok(None) };
    let mut entries = parse(value)?;
    for_each_class(&mut entries, mode, |perm, class| *perm = class);
    Ok(Some(write(&entries)))
}

/// The mode after an access ACL is set, and what is to be stored: nothing, if the bits say it all.
pub(in crate::fs) fn on_set(value: &[u8], mode: u32) -> FsResult<(u32, Option<Vec<u8>>)> {
    let entries = parse(value)?;
    if entries.is_empty() {
        return Ok((mode, None));
    }
    let (bits, equivalent) = equivalent_mode(&entries);
    Ok((mode & !0o777 | bits, (!equivalent).then(|| value.to_vec())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(tag: u16, perm: u16) -> AclEntry {
        AclEntry { tag, perm, id: u32::MAX }
    }

    fn default_acl() -> Xattrs {
        let mut xattrs = None;
        let acl = [
            entry(USER_OBJ, 7),
            AclEntry { tag: 2, perm: 7, id: 1000 },
            entry(GROUP_OBJ, 5),
            entry(MASK, 7),
            entry(OTHER, 0),
        ];
        crate::tree::set_xattr(&mut xattrs, DEFAULT, Some(&write(&acl)));
        xattrs
    }

    #[test]
    fn a_default_acl_takes_the_place_of_the_umask() {
        let (mode, xattrs) = inherit(&default_acl(), 0o100_666, 0o077, false).unwrap();
        assert_eq!(mode, 0o100_660);
        let acl = parse(xattrs.unwrap().get(ACCESS).unwrap()).unwrap();
        assert!(
            acl.contains(&entry(MASK, 6)) && acl.contains(&AclEntry { tag: 2, perm: 7, id: 1000 })
        );
        let (mode, xattrs) = inherit(&None, 0o100_666, 0o027, false).unwrap();
        assert_eq!((mode, xattrs), (0o100_640, None));
    }

    #[test]
    fn a_directory_hands_its_default_acl_on() {
        let (_, xattrs) = inherit(&default_acl(), 0o040_777, 0o022, true).unwrap();
        assert!(xattrs.unwrap().contains_key(DEFAULT));
    }

    #[test]
    fn chmod_sets_the_mask_and_not_the_group() {
        let mut xattrs = None;
        let acl = [entry(USER_OBJ, 6), entry(GROUP_OBJ, 4), entry(MASK, 6), entry(OTHER, 0)];
        crate::tree::set_xattr(&mut xattrs, ACCESS, Some(&write(&acl)));
        let after = parse(&after_chmod(&xattrs, 0o100_701).unwrap().unwrap()).unwrap();
        assert_eq!(
            after,
            [entry(USER_OBJ, 7), entry(GROUP_OBJ, 4), entry(MASK, 0), entry(OTHER, 1)]
        );
    }

    #[test]
    fn an_acl_that_the_bits_can_say_is_not_stored() {
        let acl = [entry(USER_OBJ, 6), entry(GROUP_OBJ, 4), entry(OTHER, 4)];
        assert_eq!(on_set(&write(&acl), 0o100_600).unwrap(), (0o100_644, None));
        assert!(on_set(b"junk", 0o100_600).is_err());
    }
}
