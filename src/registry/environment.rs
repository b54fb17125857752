//! The environment variables that say where logins, certificates and proxies are.
//!
//! The library does not read the environment of its process; the caller passes it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

/// Environment variables by their name.
#[derive(Clone, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl Environment {
    /// The given variables, such as `std::env::vars_os()`.
    pub fn new(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Environment {
        Environment(variables.into_iter().collect())
    }

    /// The value of a variable. An empty variable counts as missing.
    pub(super) fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// The value of a variable that holds text.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(OsStr::to_str)
    }

    /// The value of a variable that holds a path.
    pub(super) fn path(&self, name: &str) -> Option<PathBuf> {
        self.get(name).map(PathBuf::from)
    }

    /// The directory of the user's configuration.
    pub(super) fn config_home(&self) -> Option<PathBuf> {
        self.path("XDG_CONFIG_HOME").or_else(|| Some(self.path("HOME")?.join(".config")))
    }

    /// All variables, for a child process.
    pub(super) fn all(&self) -> impl Iterator<Item = (&OsStr, &OsStr)> {
        self.0.iter().map(|(name, value)| (name.as_os_str(), value.as_os_str()))
    }
}
