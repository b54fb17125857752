//! Decides the reply to READLINK. The kernel follows the text of the reply by itself, so the reply
//! is where the jail is enforced. The logic is pure: it reads the tree through [`Walk`], and never
//! asks the host.
//!
//! Always true of a text that [`Jail::resolve`] serves under `deny`, `show` and `rewrite`:
//!
//! 1. A relative text consists of leading `..`, then names. `.` and doubled slashes may stand
//!    between. It has at most as many `..` as the link's directory is deep, and no `..` after a
//!    name.
//! 2. An absolute text has no `..` at all, and begins with the mount point or an allowed prefix.
//!
//! **Why that is enough.** Between the reply and the kernel's path walk, another process may
//! replace any name by a link. A name leads down, or to a link; and for that link the kernel sends
//! READLINK again. Only `..` leads up. The kernel walks the leading ones from the link's directory,
//! whose depth is known. That depth shrinks only if the directory, or one above it, is moved up.
//! Such renames are refused while a path walk may be under way ([`ClimbGuard`]). A `..` after a
//! name would be walked from wherever the name leads by then, so it is never served. The resolution
//! below decides *which* of the safe texts to serve and what to refuse; safety rests on the shape
//! alone.
//!
//! **Which text.** The stored text is resolved physically, component by component and through other
//! links, as the kernel would do in the bare directory:
//!
//! * It stays inside and has the shape: serve the stored text, byte for byte.
//! * It stays inside but has a `..` after a name, or is an absolute path of the base, or the policy
//!   is `rewrite`: serve the *canonical form*. The part up to the last `..` is replaced by the
//!   shortest path from the link's directory to the directory reached there. The names after it
//!   stay, links among them too: the kernel sends READLINK for each, and a copy of the link keeps
//!   its meaning. If the stored text demands a directory by a trailing `/` or `/.`, a slash is
//!   kept.
//! * A `..` follows a name that is missing, is no directory, or is part of a loop: the rest cannot
//!   exist. Serve the canonical form of the names before that `..`, then `.`. So
//!   `gone/x/../../../y` becomes `gone/x/.`, and the kernel fails with ENOENT, ENOTDIR or ELOOP, as
//!   in the bare directory. O_CREAT cannot create anything there, and the text has no way up
//!   whatever is created meanwhile. So such a text never counts as leading out, however many `..`
//!   it has.
//! * It leads out, by itself or through another link: refuse ([`Answer::Escapes`]). If another link
//!   is the cause, this one would be safe to serve, but the user sees the refusal at the link that
//!   was followed.
//! * It follows more than 40 links: serve the stored text if it has the shape. The kernel then
//!   fails with ELOOP.
//!
//! **Absolute texts** are first walked on the host by name only. The first arrival at the mount
//! point or at the base's own path is the root of the tree; the rest is physical again. (If the
//! mount point lies below the base, a path to the mount point continues to it.) A `..` before that
//! arrival makes the host part untrustworthy, because a name in it may be a link of the host. The
//! arrival still counts; the reply is then canonical and leaves the untrusted part out. The
//! canonical form of an absolute text is relative too: in another mount namespace the absolute path
//! may be something else. For an allowed prefix no such form exists, so a `..` there is refused.

use crate::error::{FsError, FsResult};
use crate::types::Name;

mod climb_guard;
#[cfg(test)]
mod memory_tree;
#[cfg(test)]
mod resolve_tests;
#[cfg(test)]
mod walk_tests;

pub use climb_guard::ClimbGuard;

/// The longest text of a link, in bytes, that symlink(2) accepts and a READLINK reply can carry:
/// `PATH_MAX` less the NUL.
pub const TEXT_MAX: usize = 4095;

/// The most links that one resolution follows, the first included, before it counts as a loop
/// (path_resolution(7)).
pub const LINKS_MAX: usize = 40;

/// Deeper than any sane tree: the parents of a directory form a cycle.
const DEPTH_MAX: usize = 1 << 20;

/// The resolver's view of the tree.
pub trait Walk {
    /// Stands for a directory; equal for the same directory.
    type Dir: Copy + Eq;

    /// The root of the mount.
    fn root(&self) -> Self::Dir;

    /// The directory that holds `dir`; `None` for the root and for a removed directory.
    fn parent(&self, dir: Self::Dir) -> Option<Self::Dir>;

    /// The target of `name` in `dir`; a link is not followed. `None` if there is no such name.
    ///
    /// # Errors
    /// Not found, not a directory, access denied and name too long count as a missing name: the
    /// kernel will meet the same error at the same name. Every other error ends the resolution.
    fn lookup(&self, dir: Self::Dir, name: &Name) -> FsResult<Option<NameTarget<Self::Dir>>>;
}

/// The target of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NameTarget<D> {
    /// A directory.
    Dir(D),
    /// A symbolic link, with its stored text.
    Symlink(Vec<u8>),
    /// Any other node, through which no path continues.
    Other,
}

/// How READLINK is answered (`-o links=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// The stored text where that is safe; links that lead out are refused.
    Deny,
    /// The relative canonical form of every link that stays inside.
    Rewrite,
    /// The stored text, unchecked: for views that are themselves the jail.
    Literal,
    /// As [`Policy::Deny`]; a caller of readlink(2) gets the stored text without asking here.
    Show,
}

/// The location of the mount, and what may lead out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jail {
    /// How READLINK is answered.
    pub policy: Policy,
    /// The host path of the mount point: absolute and canonical. A relative path matches nothing.
    pub mount_point: Vec<u8>,
    /// The host path of the base: absolute and canonical. Links to it are re-rooted into the mount.
    pub base_path: Vec<u8>,
    /// Absolute prefixes, by component, that links may lead to (`-o allow-target=`).
    pub allowed_targets: Vec<Vec<u8>>,
}

/// The reply to READLINK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This text.
    Text(Vec<u8>),
    /// Refused with EXDEV.
    Escapes {
        /// Where the link leads on the host, as far as its text alone can tell; for the log.
        resolved: Vec<u8>,
    },
}

impl Jail {
    /// The text to serve for a link in `dir` whose stored text is `target`.
    ///
    /// # Errors
    /// * [`FsError::NotFound`]: `dir` was removed, or `target` is empty. The kernel would resolve
    ///   an empty text to the link's own directory.
    /// * [`FsError::Invalid`]: `target` contains NUL, where the kernel would cut it.
    /// * [`FsError::NameTooLong`]: `target` or the text to serve is longer than [`TEXT_MAX`].
    /// * Any error of [`Walk::lookup`].
    pub fn resolve<W: Walk>(
        &self,
        tree: &W,
        dir_of_link: W::Dir,
        target: &[u8],
    ) -> FsResult<Answer> {
        check_text(target)?;
        if self.policy == Policy::Literal {
            return Ok(Answer::Text(target.to_vec()));
        }
        let ancestors = ancestors_of(tree, dir_of_link)?;
        let answer = Resolver { jail: self, tree, ancestors, links: 1 }.answer(target)?;
        match answer {
            Answer::Text(text) if text.len() > TEXT_MAX => Err(FsError::NameTooLong),
            other => Ok(other),
        }
    }

    /// How many levels a served text climbs before it descends: its leading `..`. 0 for an absolute
    /// text.
    pub fn climb(served: &[u8]) -> usize {
        let text = Text::parse(served);
        if text.absolute { 0 } else { text.parts.iter().take_while(|part| is_up(part)).count() }
    }

    /// Whether a served text would climb above the root from a directory at this depth.
    pub fn escapes_from_depth(served: &[u8], depth: usize) -> bool {
        Jail::climb(served) > depth
    }

    /// Whether a path of the host is at or below an allowed prefix.
    fn allows(&self, path: &[Vec<u8>]) -> bool {
        self.allowed_targets
            .iter()
            .filter_map(|prefix| host_parts(prefix))
            .any(|prefix| begins(path, &prefix))
    }

    /// Whether an absolute text that has reached `path` is at the root of the tree; `rest` follows.
    fn is_root(&self, path: &[Vec<u8>], rest: &[&[u8]]) -> bool {
        let mount = host_parts(&self.mount_point);
        if mount.as_deref() == Some(path) {
            return true;
        }
        // The mount point may lie below the base. If the text leads there, that is the root.
        let goes_on = mount
            .is_some_and(|mount| mount.strip_prefix(path).is_some_and(|way| begins(rest, way)));
        !goes_on && host_parts(&self.base_path).as_deref() == Some(path)
    }

    /// Whether an absolute text without `..` leads to the mount point or below it.
    fn is_in_mount(&self, parts: &[&[u8]]) -> bool {
        host_parts(&self.mount_point).is_some_and(|mount| begins(parts, &mount))
    }

    /// The host path of the directory that holds the mount point. `/` is its own parent.
    fn above_mount(&self) -> Vec<Vec<u8>> {
        let mut path = host_parts(&self.mount_point).unwrap_or_default();
        path.pop();
        path
    }
}

/// A parsed link text, without empty components and `.`.
struct Text<'a> {
    absolute: bool,
    parts: Vec<&'a [u8]>,
    /// The last component is a name that must be a directory: `/` or `/.` follows it.
    wants_dir: bool,
}

impl<'a> Text<'a> {
    fn parse(bytes: &'a [u8]) -> Text<'a> {
        let parts: Vec<&[u8]> = components(bytes).collect();
        let ends_in_name = parts.last().is_some_and(|part| !is_up(part));
        let wants_dir = ends_in_name && (bytes.ends_with(b"/") || bytes.ends_with(b"/."));
        Text { absolute: bytes.starts_with(b"/"), parts, wants_dir }
    }

    fn has_up(&self) -> bool {
        self.parts.iter().any(|part| is_up(part))
    }

    /// Whether a `..` stands after a name.
    fn has_up_after_name(&self) -> bool {
        self.parts.iter().skip_while(|part| is_up(part)).any(|part| is_up(part))
    }
}

/// A directory of the tree, relative to the directory of the resolved link: `up` levels up, then
/// `down`.
#[derive(Clone)]
struct Position<D> {
    up: usize,
    down: Vec<(Name, D)>,
}

/// The point that a resolution has reached.
enum Reached<D> {
    /// A directory of the tree.
    Tree(Position<D>),
    /// A path on the host, in an absolute text that may still arrive at the root.
    Host(Vec<Vec<u8>>),
    /// A name that is missing or no directory. The rest of the text can only fail.
    Nowhere,
    /// More links than the kernel follows.
    Loop,
    /// A path on the host, at or below an allowed prefix.
    Allowed(Vec<Vec<u8>>),
    /// A path outside the jail. The rest of the text is appended for the log.
    Out(Vec<Vec<u8>>),
}

/// The result of resolving one name.
enum Passed<D> {
    /// A directory, entered.
    Entered(Position<D>),
    /// No path continues at this name. The position is still the directory that holds it.
    Blocked(Position<D>),
    /// A link, with what it leads to. The position is the directory that holds the link.
    Link(Position<D>, Reached<D>),
}

/// One resolution.
struct Resolver<'j, W: Walk> {
    jail: &'j Jail,
    tree: &'j W,
    /// The directory of the resolved link, then its ancestors, the root last.
    ancestors: Vec<W::Dir>,
    /// How many links were met so far, the resolved one included.
    links: usize,
}

impl<W: Walk> Resolver<'_, W> {
    fn answer(&mut self, target: &[u8]) -> FsResult<Answer> {
        let text = Text::parse(target);
        let last_up = text.parts.iter().rposition(|part| is_up(part)).map_or(0, |last| last + 1);
        let mut rest = &text.parts[..];
        let mut reached = self.start(&text, Position { up: 0, down: Vec::new() });

        // Resolve physically up to the last `..`, and into the tree.
        while let Some((&part, later)) = rest.split_first() {
            reached = match reached {
                Reached::Tree(position) if text.parts.len() - rest.len() >= last_up => {
                    reached = Reached::Tree(position);
                    break;
                }
                Reached::Tree(position) if !is_up(part) => match self.pass(position, part)? {
                    Passed::Entered(position) => Reached::Tree(position),
                    Passed::Blocked(position)
                    | Passed::Link(position, Reached::Nowhere | Reached::Loop) => {
                        return Ok(Answer::Text(dead_end(&position, rest)));
                    }
                    Passed::Link(_, reached) => reached,
                },
                reached => self.step(reached, part, later, &text)?,
            };
            rest = later;
        }
        match self.finish(reached, &text) {
            Reached::Tree(position) => self.answer_names(target, &text, position, rest),
            Reached::Out(path) => Ok(Answer::Escapes { resolved: host_path(&path) }),
            // Only an absolute text without `..` gets here; all others would be `Out`.
            Reached::Allowed(_) => Ok(Answer::Text(target.to_vec())),
            Reached::Nowhere | Reached::Loop | Reached::Host(_) => {
                Err(FsError::Damage("the resolution of a link ended early"))
            }
        }
    }

    /// Resolves the names that remain after `position`, and gives the text to serve.
    fn answer_names(
        &mut self,
        target: &[u8],
        text: &Text,
        mut position: Position<W::Dir>,
        names: &[&[u8]],
    ) -> FsResult<Answer> {
        let mut kept = names;
        // Entering a directory can shorten the text: `../here/x` becomes `x`.
        while let Some((&part, later)) = kept.split_first() {
            match self.pass(position, part)? {
                Passed::Entered(deeper) => position = deeper,
                Passed::Blocked(at) => {
                    position = at;
                    break;
                }
                Passed::Link(at, mut reached) => {
                    position = at;
                    for &part in later {
                        reached = self.step(reached, part, &[], text)?;
                    }
                    if let Reached::Out(path) = reached {
                        return Ok(Answer::Escapes { resolved: host_path(&path) });
                    }
                    break;
                }
            }
            kept = later;
        }
        let has_shape = if text.absolute {
            !text.has_up() && self.jail.is_in_mount(&text.parts)
        } else {
            !text.has_up_after_name()
        };
        if has_shape && self.jail.policy != Policy::Rewrite {
            return Ok(Answer::Text(target.to_vec()));
        }
        Ok(Answer::Text(canonical(&position, kept, text.wants_dir)))
    }

    /// Where the resolution of a text begins.
    fn start(&self, text: &Text, here: Position<W::Dir>) -> Reached<W::Dir> {
        if text.absolute { self.arrive(Vec::new(), &text.parts) } else { Reached::Tree(here) }
    }

    /// The root of the tree if `path` leads to it, else the host path.
    fn arrive(&self, path: Vec<Vec<u8>>, rest: &[&[u8]]) -> Reached<W::Dir> {
        if self.jail.is_root(&path, rest) {
            Reached::Tree(Position { up: self.ancestors.len().saturating_sub(1), down: Vec::new() })
        } else {
            Reached::Host(path)
        }
    }

    /// The result after a whole text: an absolute text that never arrived is allowed or out.
    fn finish(&self, reached: Reached<W::Dir>, text: &Text) -> Reached<W::Dir> {
        match reached {
            Reached::Host(path) if !text.has_up() && self.jail.allows(&path) => {
                Reached::Allowed(path)
            }
            Reached::Host(path) => Reached::Out(path),
            other => other,
        }
    }

    /// Resolves one component of `text`; `rest` of it follows.
    fn step(
        &mut self,
        reached: Reached<W::Dir>,
        part: &[u8],
        rest: &[&[u8]],
        text: &Text,
    ) -> FsResult<Reached<W::Dir>> {
        Ok(match reached {
            Reached::Tree(position) if is_up(part) => match self.climb(position) {
                Some(position) => Reached::Tree(position),
                None if text.absolute => self.arrive(self.jail.above_mount(), rest),
                None => Reached::Out(self.jail.above_mount()),
            },
            Reached::Tree(position) => match self.pass(position, part)? {
                Passed::Entered(position) => Reached::Tree(position),
                Passed::Blocked(_) => Reached::Nowhere,
                Passed::Link(_, reached) => reached,
            },
            Reached::Host(path) => self.arrive(host_step(path, part), rest),
            Reached::Out(path) => Reached::Out(host_step(path, part)),
            // The host may have a link there, so the target of a `..` is unknown.
            Reached::Allowed(path) if is_up(part) => Reached::Out(host_step(path, part)),
            Reached::Allowed(path) => Reached::Allowed(host_step(path, part)),
            Reached::Nowhere => Reached::Nowhere,
            Reached::Loop => Reached::Loop,
        })
    }

    /// The directory above `position`, or `None` at the root.
    fn climb(&self, mut position: Position<W::Dir>) -> Option<Position<W::Dir>> {
        if position.down.pop().is_none() {
            position.up += 1;
        }
        (position.up < self.ancestors.len()).then_some(position)
    }

    /// Resolves one name in `position`.
    fn pass(&mut self, mut position: Position<W::Dir>, part: &[u8]) -> FsResult<Passed<W::Dir>> {
        let Ok(name) = Name::new(part) else { return Ok(Passed::Blocked(position)) };
        let dir = position
            .down
            .last()
            .map(|(_, dir)| *dir)
            .or_else(|| self.ancestors.get(position.up).copied());
        let Some(dir) = dir else { return Err(FsError::Damage("a resolution is above the root")) };
        let found = match self.tree.lookup(dir, &name) {
            Err(
                FsError::NotFound
                | FsError::NotADirectory
                | FsError::AccessDenied
                | FsError::NameTooLong,
            ) => None,
            found => found?,
        };
        match found {
            Some(NameTarget::Dir(child)) => {
                // Descending along the ancestors of the link undoes one step up.
                if position.down.is_empty()
                    && position.up > 0
                    && self.ancestors.get(position.up - 1) == Some(&child)
                {
                    position.up -= 1;
                } else {
                    position.down.push((name, child));
                }
                Ok(Passed::Entered(position))
            }
            Some(NameTarget::Symlink(stored)) => {
                let reached = self.follow(position.clone(), &stored)?;
                Ok(Passed::Link(position, reached))
            }
            Some(NameTarget::Other) | None => Ok(Passed::Blocked(position)),
        }
    }

    /// Resolves the whole stored text of a link that was met in `position`.
    fn follow(&mut self, position: Position<W::Dir>, stored: &[u8]) -> FsResult<Reached<W::Dir>> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Ok(Reached::Loop);
        }
        if check_text(stored).is_err() {
            // READLINK of this link fails, so the kernel gets no further either.
            return Ok(Reached::Nowhere);
        }
        let text = Text::parse(stored);
        let mut reached = self.start(&text, position);
        let mut rest = &text.parts[..];
        while let Some((&part, later)) = rest.split_first() {
            reached = self.step(reached, part, later, &text)?;
            rest = later;
        }
        Ok(self.finish(reached, &text))
    }
}

/// Refuses a text that the kernel would misread.
fn check_text(text: &[u8]) -> FsResult<()> {
    if text.is_empty() {
        return Err(FsError::NotFound);
    }
    if text.contains(&0) {
        return Err(FsError::Invalid);
    }
    if text.len() > TEXT_MAX {
        return Err(FsError::NameTooLong);
    }
    Ok(())
}

/// `dir`, then its ancestors, the root last.
fn ancestors_of<W: Walk>(tree: &W, dir: W::Dir) -> FsResult<Vec<W::Dir>> {
    let root = tree.root();
    let mut ancestors = vec![dir];
    let mut at = dir;
    while at != root {
        at = tree.parent(at).ok_or(FsError::NotFound)?;
        ancestors.push(at);
        if ancestors.len() > DEPTH_MAX {
            return Err(FsError::Damage("the parents of a directory form a cycle"));
        }
    }
    Ok(ancestors)
}

/// The path to `position`, then `names`.
fn canonical<D>(position: &Position<D>, names: &[&[u8]], wants_dir: bool) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = vec![b".."; position.up];
    parts.extend(position.down.iter().map(|(name, _)| name.as_bytes()));
    parts.extend(names);
    let ends_in_name = parts.last().is_some_and(|part| !is_up(part));
    let mut text = parts.join(&b'/');
    if text.is_empty() {
        text.push(b'.');
    } else if wants_dir && ends_in_name {
        text.push(b'/');
    }
    text
}

/// The path to `position`, then the names of `rest` before its first `..`, then `.`: nothing can
/// exist there.
fn dead_end<D>(position: &Position<D>, rest: &[&[u8]]) -> Vec<u8> {
    let names = rest.iter().take_while(|part| !is_up(part)).count();
    let mut text = canonical(position, rest.get(..names).unwrap_or(rest), false);
    text.extend_from_slice(b"/.");
    text
}

fn is_up(part: &[u8]) -> bool {
    part == b".."
}

/// The components of a path, without empty ones and `.`.
fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// The components of an absolute path; `None` if it is not absolute.
fn host_parts(path: &[u8]) -> Option<Vec<Vec<u8>>> {
    path.starts_with(b"/").then(|| components(path).map(<[u8]>::to_vec).collect())
}

/// Appends one component to a host path, by text alone.
fn host_step(mut path: Vec<Vec<u8>>, part: &[u8]) -> Vec<Vec<u8>> {
    if is_up(part) {
        path.pop();
    } else {
        path.push(part.to_vec());
    }
    path
}

fn host_path(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut path = vec![b'/'];
    path.extend(parts.join(&b'/'));
    path
}

/// Whether `path` is `prefix` or below it, by component.
fn begins<A: AsRef<[u8]>, B: AsRef<[u8]>>(path: &[A], prefix: &[B]) -> bool {
    path.len() >= prefix.len() && path.iter().zip(prefix).all(|(a, b)| a.as_ref() == b.as_ref())
}
