//! Limits of time, of bytes and of attempts.
//!
//! Every wait for a registry is bounded, and so is everything that is kept in memory of what a
//! registry sends.

use std::time::Duration;

/// The size of the buffers, in bytes.
pub(super) const BUFFER: usize = 64 << 10;
/// The largest manifest, in bytes, as in containerd and docker-registry.
pub(super) const MANIFEST: usize = 4 << 20;
/// The largest answer about an error, in bytes.
pub(super) const ERROR_BODY: usize = 64 << 10;
/// The largest answer of a token server, in bytes.
pub(super) const TOKEN_BODY: usize = 1 << 20;
/// The largest page of tags, in bytes.
pub(super) const TAG_PAGE: usize = 4 << 20;
/// The most tags of a repository.
pub(super) const TAGS: usize = 100_000;
/// The most pages of tags.
pub(super) const TAG_PAGES: usize = 1000;
/// The largest head of an answer, in bytes.
pub(super) const HEAD: usize = 32 << 10;
/// The most redirects of one request.
pub(super) const REDIRECTS: usize = 5;

/// Limits that depend on the network.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The time for resolving a name, and for connecting.
    pub connect: Duration,
    /// The longest time in which a connection moves no byte.
    pub silence: Duration,
    /// The time for a whole answer that is no blob, and for the head of any answer.
    pub answer: Duration,
    /// The least bytes of a blob per second, measured over `silence`.
    pub slowest: u64,
    /// The most attempts in a row that fail without progress.
    pub attempts: u32,
    /// The pause after the first failed attempt; it doubles with each one.
    pub first_pause: Duration,
    /// The longest pause.
    pub longest_pause: Duration,
    /// The most time that one operation pauses without progress.
    pub pauses: Duration,
    /// The most bytes of a blob in one request of an upload.
    pub chunk: u64,
    /// The time for a credential helper.
    pub helper: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connect: Duration::from_secs(20),
            silence: Duration::from_secs(60),
            answer: Duration::from_secs(120),
            slowest: 1 << 10,
            attempts: 7,
            first_pause: Duration::from_millis(200),
            longest_pause: Duration::from_secs(20),
            pauses: Duration::from_secs(180),
            // A pack fits: each further request is a further wait for the registry's disk.
            chunk: 32 << 20,
            helper: Duration::from_secs(60),
        }
    }
}
