//! Decides what READLINK answers. The kernel follows the text of the answer itself, so the answer is where the jail
//! is. Pure logic: the tree is asked through [`Walk`], and nothing is ever asked of the host.
//!
//! What is always true of a text that [`Jail::resolve`] serves under `deny`, `show` and `rewrite`:
//!
//! 1. A relative text is some leading `..` (mixed with `.` and doubled slashes if stored so), at most as many as the
//!    directory of the link is deep, and then names. No `..` stands after a name.
//! 2. An absolute text has no `..` at all, and begins with the mount point or with an allowed prefix.
//!
//! **Why that is enough.** Between our answer and the kernel's walk anybody may exchange any name for a link. A name
//! leads down, or to a link; and for that link the kernel asks us again, where it is judged at its own directory.
//! Only `..` leads up, and the leading ones are walked from the directory of the link, whose depth is known. That
//! depth shrinks only if the directory, or one above it, moves up; such renames are refused while a walk may be under
//! way ([`Walks`]). After a name a `..` would be walked from wherever that name leads by then, so
//! there it is never served. The resolution below decides *which* of the safe texts is given and what is refused;
//! safety rests on the shape alone.
//!
//! **Which text.** The stored text is resolved physically, component by component, through other links, as the
//! kernel would resolve it in the bare directory:
//!
//! * It stays inside and has the shape: the text as stored, byte for byte.
//! * It stays inside and has a `..` after a name, or is an absolute path of the base, or the policy is `rewrite`: the
//!   *canonical form*. What stands before the last `..` becomes the shortest way from the directory of the link to
//!   the directory reached there; the names after it are kept as they are, links among them too (the kernel asks for
//!   each, and a copy of the link goes on meaning what it meant). A stored text that demands a directory by a
//!   trailing `/` or `/.` keeps a trailing slash.
//! * A `..` stands after a name that is missing, is no directory, or is caught in a loop: what follows cannot exist.
//!   The answer is canonical up to the last name before that `..`, which `.` replaces: `gone/x/../../../y` is served
//!   as `gone/x/.`, and the kernel finds ENOENT, ENOTDIR or ELOOP, as it does in the bare directory. No O_CREAT can
//!   make anything there, and whatever is created meanwhile, the text has no way up. So such a text never counts as
//!   leading out, however often it says `..`.
//! * It leads out, by itself or through another link: refused ([`Answer::Escapes`]). Where another link is to blame
//!   this one would be safe to serve, but the user sees the refusal at the link that was followed.
//! * It meets more than 40 links: the text as stored, if it has the shape; the kernel says ELOOP.
//!
//! **Absolute texts** are walked through the host by name only. The first arrival at the mount point or at the base's
//! own path is the root of the tree, and what follows is physical again. (Where the mount point lies below the base,
//! a path to it goes on to it.) A `..` before that arrival makes the host part untrustworthy, because a name in it
//! may be a link of the host. Arriving counts all the same: the answer is then canonical, and the untrusted part is
//! not in it. The canonical form is relative for absolute texts too: in another mount namespace something else may
//! stand at an absolute path. For an allowed prefix there is no such form, so there a `..` is refused.

use crate::error::{FsError, FsResult};
use crate::types::Name;

#[cfg(test)]
mod kernel_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod toy;
mod walks;

pub use walks::Walks;

/// The longest text of a link, in bytes, that symlink(2) takes and a READLINK reply can carry: `PATH_MAX` less the
/// NUL.
pub const TEXT_MAX: usize = 4095;

/// The links that one resolution follows, the first included, before it counts as a loop (path_resolution(7)).
pub const LINKS_MAX: usize = 40;

/// More levels than a sane tree has: the parents of a directory run in a circle.
const DEPTH_MAX: usize = 1 << 20;

/// What the resolver asks of the tree.
pub trait Walk {
    /// Stands for a directory; equal for the same directory.
    type Dir: Copy + Eq;

    /// The root of the mount.
    fn root(&self) -> Self::Dir;

    /// The directory that holds `dir`; `None` for the root and for a directory that is gone.
    fn parent(&self, dir: Self::Dir) -> Option<Self::Dir>;

    /// What `name` in `dir` is, itself: a link is not followed. `None` if there is no such name.
    ///
    /// # Errors
    /// Not found, not a directory, access denied and name too long count as a missing name, because the kernel will
    /// meet the same at the same name. Every other error ends the resolution.
    fn lookup(&self, dir: Self::Dir, name: &Name) -> FsResult<Option<Step<Self::Dir>>>;
}

/// What a name leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step<D> {
    /// A directory.
    Dir(D),
    /// A symbolic link with its text as stored.
    Symlink(Vec<u8>),
    /// Anything else: no path goes on from there.
    Other,
}

/// How links are answered (`-o links=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// As stored where that is safe, refused where it leads out.
    Deny,
    /// Every link that stays inside in relative canonical form.
    Rewrite,
    /// As stored, nothing is judged: for views that are themselves the jail.
    Literal,
    /// As [`Policy::Deny`]; whoever only reads a text is told what is stored without asking here.
    Show,
}

/// Where the mount is and what may lead out of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Jail {
    /// How links are answered.
    pub policy: Policy,
    /// The host path of the mount point: absolute and canonical. A path that is not absolute matches nothing.
    pub mount_point: Vec<u8>,
    /// The host path of the base: absolute and canonical. Links to it are re-rooted into the mount.
    pub base_path: Vec<u8>,
    /// Absolute prefixes, by component, that links may lead to (`-o allow-target=`).
    pub allowed_targets: Vec<Vec<u8>>,
}

/// What READLINK answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// This text.
    Text(Vec<u8>),
    /// EXDEV.
    Escapes {
        /// Where the link leads on the host, as far as text alone can tell; for the log.
        resolved: Vec<u8>,
    },
}

impl Jail {
    /// The text to serve for a link in `dir` whose stored text is `target`.
    ///
    /// # Errors
    /// * [`FsError::NotFound`]: `dir` is gone, or `target` is empty (the kernel would take an empty text for the
    ///   directory of the link).
    /// * [`FsError::Invalid`]: `target` contains NUL, where the kernel would cut it.
    /// * [`FsError::NameTooLong`]: `target` or the text to serve is longer than [`TEXT_MAX`].
    /// * What [`Walk::lookup`] fails with.
    pub fn resolve<W: Walk>(&self, tree: &W, dir_of_link: W::Dir, target: &[u8]) -> FsResult<Answer> {
        check_text(target)?;
        if self.policy == Policy::Literal {
            return Ok(Answer::Text(target.to_vec()));
        }
        let line = line_to_root(tree, dir_of_link)?;
        let answer = Resolver { jail: self, tree, line, links: 1 }.answer(target)?;
        match answer {
            Answer::Text(text) if text.len() > TEXT_MAX => Err(FsError::NameTooLong),
            other => Ok(other),
        }
    }

    /// How many levels a served text climbs before it goes down: its leading `..`; 0 for an absolute text.
    pub fn climb(served: &[u8]) -> usize {
        let text = Text::parse(served);
        if text.absolute { 0 } else { text.parts.iter().take_while(|part| is_up(part)).count() }
    }

    /// Whether a served text would climb above the root from a directory `depth` levels below it.
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

    /// Whether an absolute text that has come to `path` and goes on with `rest` is at the root of the tree.
    fn is_root(&self, path: &[Vec<u8>], rest: &[&[u8]]) -> bool {
        let mount = host_parts(&self.mount_point);
        if mount.as_deref() == Some(path) {
            return true;
        }
        // Below the base the mount point may come yet; it is nearer than the directory of the base that it covers.
        let goes_on =
            mount.is_some_and(|mount| mount.strip_prefix(path).is_some_and(|way| begins(rest, way)));
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

/// The text of a link, parsed. Empty components and `.` are dropped: they lead nowhere.
struct Text<'a> {
    absolute: bool,
    parts: Vec<&'a [u8]>,
    /// It ends in a name that must be a directory: `/` or `/.` follows.
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

/// A directory of the tree, as seen from the directory of the link that is asked for: so many levels up, then down.
#[derive(Clone)]
struct Place<D> {
    up: usize,
    down: Vec<(Name, D)>,
}

/// Where a resolution stands.
enum Spot<D> {
    /// In a directory of the tree.
    Dir(Place<D>),
    /// On the host, in an absolute text that may yet arrive at the root.
    Host(Vec<Vec<u8>>),
    /// At a name that is missing or no directory. Only an error can come of what follows.
    Nowhere,
    /// At more links than the kernel follows.
    Loop,
    /// On the host, at or below an allowed prefix.
    Allowed(Vec<Vec<u8>>),
    /// Out of the jail. The path is followed on by text, for the log.
    Out(Vec<Vec<u8>>),
}

/// How a name was passed.
enum Pass<D> {
    /// It is a directory, entered.
    Into(Place<D>),
    /// Nothing can be passed there; this is still the directory that holds the name.
    Blocked(Place<D>),
    /// It is a link, and leads to the spot; the place is the directory that holds it.
    Link(Place<D>, Spot<D>),
}

/// One resolution.
struct Resolver<'j, W: Walk> {
    jail: &'j Jail,
    tree: &'j W,
    /// The directory of the link that is asked for, then those above it, the root last.
    line: Vec<W::Dir>,
    /// The links met so far, the one that is asked for included.
    links: usize,
}

impl<W: Walk> Resolver<'_, W> {
    fn answer(&mut self, target: &[u8]) -> FsResult<Answer> {
        let text = Text::parse(target);
        let last_up = text.parts.iter().rposition(|part| is_up(part)).map_or(0, |last| last + 1);
        let mut rest = &text.parts[..];
        let mut spot = self.start(&text, Place { up: 0, down: Vec::new() });

        // Up to the last `..`, and into the tree, the way is made physical.
        while let Some((&part, later)) = rest.split_first() {
            spot = match spot {
                Spot::Dir(place) if text.parts.len() - rest.len() >= last_up => {
                    spot = Spot::Dir(place);
                    break;
                }
                Spot::Dir(place) if !is_up(part) => match self.pass(place, part)? {
                    Pass::Into(place) => Spot::Dir(place),
                    Pass::Blocked(place) | Pass::Link(place, Spot::Nowhere | Spot::Loop) => {
                        return Ok(Answer::Text(dead_end(&place, rest)));
                    }
                    Pass::Link(_, spot) => spot,
                },
                spot => self.step(spot, part, later, &text)?,
            };
            rest = later;
        }
        match self.settle(spot, &text) {
            Spot::Dir(place) => self.answer_names(target, &text, place, rest),
            Spot::Out(path) => Ok(Answer::Escapes { resolved: host_path(&path) }),
            // An absolute text without `..`: after a link, or with a `..`, it would be `Out`.
            Spot::Allowed(_) => Ok(Answer::Text(target.to_vec())),
            Spot::Nowhere | Spot::Loop | Spot::Host(_) => Err(FsError::Damage("a link was left half judged")),
        }
    }

    /// Answers when the way is made to `place` and only names follow: judges them, and gives the text.
    fn answer_names(
        &mut self,
        target: &[u8],
        text: &Text,
        mut place: Place<W::Dir>,
        names: &[&[u8]],
    ) -> FsResult<Answer> {
        let mut kept = names;
        // Directories on the way can still shorten it: `../here/x` is `x`.
        while let Some((&part, later)) = kept.split_first() {
            match self.pass(place, part)? {
                Pass::Into(deeper) => place = deeper,
                Pass::Blocked(at) => {
                    place = at;
                    break;
                }
                Pass::Link(at, mut spot) => {
                    place = at;
                    for &part in later {
                        spot = self.step(spot, part, &[], text)?;
                    }
                    if let Spot::Out(path) = spot {
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
        Ok(Answer::Text(canonical(&place, kept, text.wants_dir)))
    }

    /// Where the walk of a text begins.
    fn start(&self, text: &Text, here: Place<W::Dir>) -> Spot<W::Dir> {
        if text.absolute { self.arrive(Vec::new(), &text.parts) } else { Spot::Dir(here) }
    }

    /// The root of the tree, if that is where `path` is, else the host.
    fn arrive(&self, path: Vec<Vec<u8>>, rest: &[&[u8]]) -> Spot<W::Dir> {
        if self.jail.is_root(&path, rest) {
            Spot::Dir(Place { up: self.line.len().saturating_sub(1), down: Vec::new() })
        } else {
            Spot::Host(path)
        }
    }

    /// Judges what a whole text has come to.
    fn settle(&self, spot: Spot<W::Dir>, text: &Text) -> Spot<W::Dir> {
        match spot {
            Spot::Host(path) if !text.has_up() && self.jail.allows(&path) => Spot::Allowed(path),
            Spot::Host(path) => Spot::Out(path),
            other => other,
        }
    }

    /// Walks one component of `text`; `rest` of it follows.
    fn step(
        &mut self,
        spot: Spot<W::Dir>,
        part: &[u8],
        rest: &[&[u8]],
        text: &Text,
    ) -> FsResult<Spot<W::Dir>> {
        Ok(match spot {
            Spot::Dir(place) if is_up(part) => match self.climb(place) {
                Some(place) => Spot::Dir(place),
                None if text.absolute => self.arrive(self.jail.above_mount(), rest),
                None => Spot::Out(self.jail.above_mount()),
            },
            Spot::Dir(place) => match self.pass(place, part)? {
                Pass::Into(place) => Spot::Dir(place),
                Pass::Blocked(_) => Spot::Nowhere,
                Pass::Link(_, spot) => spot,
            },
            Spot::Host(path) => self.arrive(host_step(path, part), rest),
            Spot::Out(path) => Spot::Out(host_step(path, part)),
            // The host may have a link there, so nobody knows what a `..` leads to.
            Spot::Allowed(path) if is_up(part) => Spot::Out(host_step(path, part)),
            Spot::Allowed(path) => Spot::Allowed(host_step(path, part)),
            Spot::Nowhere => Spot::Nowhere,
            Spot::Loop => Spot::Loop,
        })
    }

    /// The directory above `place`, or `None` at the root.
    fn climb(&self, mut place: Place<W::Dir>) -> Option<Place<W::Dir>> {
        if place.down.pop().is_none() {
            place.up += 1;
        }
        (place.up < self.line.len()).then_some(place)
    }

    /// Walks one name in `place`.
    fn pass(&mut self, mut place: Place<W::Dir>, part: &[u8]) -> FsResult<Pass<W::Dir>> {
        let Ok(name) = Name::new(part) else { return Ok(Pass::Blocked(place)) };
        let dir = place.down.last().map(|(_, dir)| *dir).or_else(|| self.line.get(place.up).copied());
        let Some(dir) = dir else { return Err(FsError::Damage("a resolution stands above the root")) };
        let found = match self.tree.lookup(dir, &name) {
            Err(
                FsError::NotFound | FsError::NotADirectory | FsError::AccessDenied | FsError::NameTooLong,
            ) => None,
            found => found?,
        };
        match found {
            Some(Step::Dir(child)) => {
                // Coming down again on the line that leads to the link takes back a step up.
                if place.down.is_empty() && place.up > 0 && self.line.get(place.up - 1) == Some(&child) {
                    place.up -= 1;
                } else {
                    place.down.push((name, child));
                }
                Ok(Pass::Into(place))
            }
            Some(Step::Symlink(stored)) => {
                let spot = self.follow(place.clone(), &stored)?;
                Ok(Pass::Link(place, spot))
            }
            Some(Step::Other) | None => Ok(Pass::Blocked(place)),
        }
    }

    /// Walks the whole stored text of a link that was met in `place`.
    fn follow(&mut self, place: Place<W::Dir>, stored: &[u8]) -> FsResult<Spot<W::Dir>> {
        self.links += 1;
        if self.links > LINKS_MAX {
            return Ok(Spot::Loop);
        }
        if check_text(stored).is_err() {
            // We refuse to serve it, so the kernel does not pass it.
            return Ok(Spot::Nowhere);
        }
        let text = Text::parse(stored);
        let mut spot = self.start(&text, place);
        let mut rest = &text.parts[..];
        while let Some((&part, later)) = rest.split_first() {
            spot = self.step(spot, part, later, &text)?;
            rest = later;
        }
        Ok(self.settle(spot, &text))
    }
}

/// Refuses what the kernel would not take for the text that it is.
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

/// `dir`, then the directories above it, the root last.
fn line_to_root<W: Walk>(tree: &W, dir: W::Dir) -> FsResult<Vec<W::Dir>> {
    let root = tree.root();
    let mut line = vec![dir];
    let mut at = dir;
    while at != root {
        at = tree.parent(at).ok_or(FsError::NotFound)?;
        line.push(at);
        if line.len() > DEPTH_MAX {
            return Err(FsError::Damage("the parents of a directory run in a circle"));
        }
    }
    Ok(line)
}

/// The way to `place`, then `names`.
fn canonical<D>(place: &Place<D>, names: &[&[u8]], wants_dir: bool) -> Vec<u8> {
    let mut parts: Vec<&[u8]> = vec![b".."; place.up];
    parts.extend(place.down.iter().map(|(name, _)| name.as_bytes()));
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

/// The way to `place`, then the names of `rest` up to its first `..`, which `.` replaces: nothing can be there.
fn dead_end<D>(place: &Place<D>, rest: &[&[u8]]) -> Vec<u8> {
    let names = rest.iter().take_while(|part| !is_up(part)).count();
    let mut text = canonical(place, rest.get(..names).unwrap_or(rest), false);
    text.extend_from_slice(b"/.");
    text
}

fn is_up(part: &[u8]) -> bool {
    part == b".."
}

/// The components of a path that lead anywhere.
fn components(path: &[u8]) -> impl Iterator<Item = &[u8]> {
    path.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// The components of an absolute path; `None` if it is not absolute.
fn host_parts(path: &[u8]) -> Option<Vec<Vec<u8>>> {
    path.starts_with(b"/").then(|| components(path).map(<[u8]>::to_vec).collect())
}

/// One component further on the host, by text alone.
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
