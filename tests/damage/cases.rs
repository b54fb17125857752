//! The damages of a store's file, as texts: `FILE DAMAGE`.
//!
//! | damage | what it does |
//! |---|---|
//! | `cut AT` | the file ends here |
//! | `zero AT LEN` | so many bytes are zeros |
//! | `flip AT BIT` | one bit is another |
//! | `older AGE` | the file is the copy of this age; the oldest has age 0 |
//! | `block AGE AT LEN` | so many bytes are those of that copy |
//! | `remove` | the file is gone |
//!
//! `AT` is a number; `-N` from the end; `N/M` of the length; or `frame:N`, where the frame with
//! this number begins, and `frame:-N` from the last one.

use std::fmt;
use std::path::Path;

use crate::world::{World, files, write_with_holes};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Damage {
    Cut(usize),
    Zero(usize, usize),
    Flip(usize, u8),
    Older(usize),
    Block(usize, usize, usize),
    Remove,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Case {
    pub file: String,
    pub damage: Damage,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.file)?;
        match self.damage {
            Damage::Cut(at) => write!(f, "cut {at}"),
            Damage::Zero(at, len) => write!(f, "zero {at} {len}"),
            Damage::Flip(at, bit) => write!(f, "flip {at} {bit}"),
            Damage::Older(age) => write!(f, "older {age}"),
            Damage::Block(age, at, len) => write!(f, "block {age} {at} {len}"),
            Damage::Remove => write!(f, "remove"),
        }
    }
}

impl Case {
    /// Parses a line. The file may be a pattern: `*` stands for any text, and the first match
    /// counts, or with `last:` before it the last one.
    pub fn parse(line: &str, world: &World) -> Result<Case, String> {
        let mut words = line.split_whitespace();
        let mut word = || words.next().ok_or_else(|| format!("too few words in '{line}'"));
        let pattern = word()?;
        let (pattern, from_end) = match pattern.strip_prefix("last:") {
            Some(pattern) => (pattern, true),
            None => (pattern, false),
        };
        let mut fitting = world.files.keys().filter(|file| fits(pattern, file));
        let file = if from_end { fitting.next_back() } else { fitting.next() };
        let file = file.ok_or_else(|| format!("no file is like '{pattern}'"))?.clone();
        let bytes = &world.files[&file];
        let number = |word: &str| word.parse::<usize>().map_err(|e| format!("'{word}': {e}"));
        let damage = match word()? {
            "cut" => Damage::Cut(place(word()?, bytes)?),
            "zero" => Damage::Zero(place(word()?, bytes)?, number(word()?)?),
            "flip" => Damage::Flip(place(word()?, bytes)?, number(word()?)? as u8),
            "older" => Damage::Older(number(word()?)?),
            "block" => Damage::Block(number(word()?)?, place(word()?, bytes)?, number(word()?)?),
            "remove" => Damage::Remove,
            other => return Err(format!("'{other}' is no damage")),
        };
        Ok(Case { file, damage })
    }

    /// Damages the file in a copy of the store. Returns false if that changes nothing.
    pub fn do_to(&self, world: &World, store: &Path) -> bool {
        let path = store.join(&self.file);
        let whole = &world.files[&self.file];
        let older = |age: usize| std::fs::read(world.ages[age].join(&self.file)).ok();
        let mut bytes = whole.clone();
        match &self.damage {
            Damage::Cut(at) => bytes.truncate(*at),
            Damage::Zero(at, len) => {
                let end = bytes.len().min(at + len);
                bytes[*at..end].fill(0);
            }
            Damage::Flip(at, bit) => bytes[*at] ^= 1 << bit,
            Damage::Older(age) => match older(*age) {
                Some(older) => bytes = older,
                None => return false,
            },
            Damage::Block(age, at, len) => {
                let Some(older) = older(*age) else { return false };
                let end = older.len().min(bytes.len()).min(at + len);
                if *at < end {
                    bytes[*at..end].copy_from_slice(&older[*at..end]);
                }
            }
            Damage::Remove => {
                std::fs::remove_file(&path).unwrap();
                return true;
            }
        }
        if bytes == *whole {
            return false;
        }
        write_with_holes(&path, &bytes);
        true
    }
}

fn fits(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((before, rest)) => text.strip_prefix(before).is_some_and(|text| {
            (0..=text.len()).any(|at| text.is_char_boundary(at) && fits(rest, &text[at..]))
        }),
    }
}

/// The offsets of the frames of a log; the last entry is their end. Zeros can follow them.
fn frames(bytes: &[u8]) -> Vec<usize> {
    let mut starts = vec![0];
    while let Some(head) = starts.last().and_then(|at| bytes.get(*at..at + 4)) {
        let len = u32::from_le_bytes(head.try_into().unwrap()) as usize;
        let next = starts[starts.len() - 1] + 16 + len;
        if len == 0 || next > bytes.len() {
            break;
        }
        starts.push(next);
    }
    starts
}

fn place(word: &str, bytes: &[u8]) -> Result<usize, String> {
    let number = |word: &str| word.parse::<usize>().map_err(|e| format!("'{word}': {e}"));
    let at = if let Some(frame) = word.strip_prefix("frame:") {
        let frames = frames(bytes);
        let at = match frame.strip_prefix('-') {
            Some(back) => (frames.len() - 1).checked_sub(number(back)?),
            None => Some(number(frame)?),
        };
        at.and_then(|at| frames.get(at)).copied().ok_or_else(|| format!("there is no '{word}'"))?
    } else if let Some(back) = word.strip_prefix('-') {
        bytes.len().saturating_sub(number(back)?)
    } else if let Some((part, of)) = word.split_once('/') {
        bytes.len() * number(part)? / number(of)?
    } else {
        number(word)?
    };
    if at < bytes.len() { Ok(at) } else { Err(format!("'{word}' is behind the end")) }
}

/// All cases of a store.
pub fn all(world: &World) -> Vec<Case> {
    let ages: Vec<_> = world.ages.iter().map(|store| files(store)).collect();
    let mut cases = std::collections::BTreeSet::new();
    for (file, bytes) in &world.files {
        let mut add = |damage: Damage| {
            cases.insert(Case { file: file.clone(), damage });
        };
        let len = bytes.len();
        add(Damage::Remove);
        let is_content = file.ends_with("pool") || file == "chunks";
        let step = if is_content { 1 + len / 40 } else { 1 + len / 400 };
        (0..len).step_by(step).for_each(|at| add(Damage::Cut(at)));
        if !is_content {
            let near = frames(bytes).into_iter().flat_map(|at| [at.saturating_sub(1), at, at + 1]);
            near.filter(|at| *at < len).for_each(|at| add(Damage::Cut(at)));
        }
        for block in [512, 4096] {
            if block == 512 || len > 512 {
                (0..len).step_by(block).for_each(|at| add(Damage::Zero(at, block)));
            }
        }
        let step = if is_content { 1 + len / 30 } else { 1 + len / 150 };
        (0..len).step_by(step).for_each(|at| add(Damage::Flip(at, (at % 8) as u8)));
        let mut seen: Vec<&Vec<u8>> = vec![bytes];
        for (age, files) in ages.iter().enumerate() {
            let Some(older) = files.get(file).filter(|older| !seen.contains(older)) else {
                continue;
            };
            seen.push(older);
            add(Damage::Older(age));
            for block in [512, 4096] {
                (0..len).step_by(block).for_each(|at| add(Damage::Block(age, at, block)));
            }
        }
    }
    cases.into_iter().collect()
}

/// One in so many, chosen by a seed; all of those for older and removed files.
pub fn sample(cases: Vec<Case>, every: u64, seed: u64) -> Vec<Case> {
    let hash = |case: &Case| {
        let mut hash = 0xcbf2_9ce4_8422_2325_u64 ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for byte in case.to_string().bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        hash ^ (hash >> 29)
    };
    let is_chosen = |case: &Case| {
        matches!(case.damage, Damage::Older(_) | Damage::Remove) || hash(case).is_multiple_of(every)
    };
    cases.into_iter().filter(is_chosen).collect()
}
