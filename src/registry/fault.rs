//! Describes a failed request, and says whether it may be repeated.
//!
//! A registry is a foreign party. Text from it is cut to a bounded length and escaped before it
//! enters a message, and a message names a request without its query, which can hold secrets.

use std::time::Duration;

use crate::error::{Error, Kind};
use crate::types::is_unprintable;

/// The largest number of characters of foreign text in a message.
const LONGEST: usize = 300;

/// How a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// The connection was cut, or a time limit passed. The request may be repeated.
    Cut,
    /// The registry is overloaded or restarts. The request may be repeated, after the given time.
    Busy(Option<Duration>),
    /// The registry refused with this status.
    Status(u16),
    /// Another attempt would fail as well.
    Final,
}

/// A failed request.
#[derive(Clone, Debug)]
pub(super) struct Fault {
    /// The request: `GET https://host/v2/name/blobs/sha256:..`.
    pub(super) request: String,
    /// Why it failed.
    pub(super) reason: String,
    /// A hint for the user.
    pub(super) hint: Option<String>,
    /// Whether it may be repeated.
    pub(super) class: Class,
}

impl Fault {
    /// A failure of `request`. `reason` may contain foreign text.
    pub(super) fn new(class: Class, request: &str, reason: impl AsRef<str>) -> Fault {
        let reason = shown(reason.as_ref());
        Fault { request: request.to_owned(), reason, hint: None, class }
    }

    /// A failure that another attempt would repeat.
    pub(super) fn last(request: &str, reason: impl AsRef<str>) -> Fault {
        Fault::new(Class::Final, request, reason)
    }

    /// A cut connection.
    pub(super) fn cut(request: &str, reason: impl AsRef<str>) -> Fault {
        Fault::new(Class::Cut, request, reason)
    }

    /// The same failure with a hint.
    pub(super) fn hint(mut self, hint: impl Into<String>) -> Fault {
        self.hint = Some(hint.into());
        self
    }

    /// Whether another attempt may succeed.
    pub(super) fn may_pass(&self) -> bool {
        matches!(self.class, Class::Cut | Class::Busy(_))
    }

    /// The status with which the registry refused.
    pub(super) fn status(&self) -> Option<u16> {
        if let Class::Status(status) = self.class { Some(status) } else { None }
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        let error = Error::new(Kind::Failed, fault.request, fault.reason);
        Error { hint: fault.hint, ..error }
    }
}

/// Foreign text for a message: escaped, and cut after 300 characters.
pub(super) fn shown(text: &str) -> String {
    let mut line = String::new();
    for (number, c) in text.chars().enumerate() {
        if number == LONGEST {
            line.push_str("...");
            break;
        }
        if is_unprintable(c) { line.extend(c.escape_default()) } else { line.push(c) }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_escaped_and_bounded() {
        let fault = Fault::last("GET x", format!("\u{1b}[2Ja\u{202e}{}", "b".repeat(10_000)));
        assert!(fault.reason.starts_with("\\u{1b}[2Ja\\u{202e}bbb"), "{}", fault.reason);
        assert!(fault.reason.len() < 400);
        assert_eq!(Error::from(fault).attempt, "GET x");
    }
}
