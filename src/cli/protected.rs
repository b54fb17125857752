//! Reads the user's list of protected paths.

use std::path::PathBuf;

use crate::error::{Error, Kind, Result};
use crate::sandbox::Protected;

/// The file that changes the list of protected paths.
const PROTECTED: &str = "jailfs/protected";

/// The protected paths: the built-in ones, changed by `$XDG_CONFIG_HOME/jailfs/protected` or
/// `~/.config/jailfs/protected` if such a file exists.
///
/// # Errors
/// `Usage`: the file cannot be read, or has an invalid line.
pub(super) fn protected() -> Result<Protected> {
    let absolute =
        |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let config =
        absolute("XDG_CONFIG_HOME").or_else(|| absolute("HOME").map(|home| home.join(".config")));
    let Some(file) = config.map(|config| config.join(PROTECTED)) else {
        return Ok(Protected::default());
    };
    let wrong = |why: String| {
        Error::new(Kind::Usage, format!("read the protected paths in '{}'", file.display()), why)
    };
    match std::fs::read(&file) {
        Ok(text) => Protected::parse(&text).map_err(wrong),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Protected::default()),
        Err(error) => Err(wrong(error.to_string())),
    }
}
