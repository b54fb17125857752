//! Reads `auth.json` of podman and `config.json` of docker.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read};
use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine};
use serde::Deserialize;

use super::Login;
use crate::error::{Attempt, Error, Kind, Result};

/// The largest file, in bytes.
const LONGEST: u64 = 4 << 20;

/// Where a file says that the login is.
pub(super) enum Source {
    /// In the file.
    Login(Login),
    /// Behind the credential helper with this name.
    Helper(String),
}

/// The part of the file that is used. Other fields are ignored.
#[derive(Deserialize)]
struct AuthFile {
    auths: Option<BTreeMap<String, Entry>>,
    #[serde(rename = "credHelpers")]
    helpers: Option<BTreeMap<String, String>>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
}

#[derive(Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    identitytoken: Option<String>,
    registrytoken: Option<String>,
}

/// Searches a file for the login of a repository.
///
/// # Errors
/// The file cannot be read, or is malformed.
pub(super) fn search(
    path: &Path,
    must_exist: bool,
    registry: &str,
    name: &str,
) -> Result<Option<Source>> {
    let attempt = || format!("read the logins in {}", path.display());
    let Some(text) = read(path, must_exist).attempt(attempt)? else { return Ok(None) };
    // The error of the parser can quote the file, so only its place is shown.
    let file: AuthFile = serde_json::from_slice(&text).map_err(|error| {
        let reason = format!("malformed JSON in line {}", error.line());
        Error::new(Kind::Failed, attempt(), reason)
    })?;
    let helpers = file.helpers.unwrap_or_default();
    let hosts = hosts(registry);
    if let Some(helper) = hosts.iter().find_map(|host| helpers.get(*host)) {
        return Ok(Some(Source::Helper(helper.clone())));
    }
    let auths = file.auths.unwrap_or_default();
    if let Some(entry) = entry_of(&auths, &hosts, name)
        && let Some(login) = login_of(entry).map_err(|bad| {
            Error::new(Kind::Failed, attempt(), format!("the login for {registry} {bad}"))
        })?
    {
        return Ok(Some(Source::Login(login)));
    }
    Ok(file.store.filter(|store| !store.is_empty()).map(Source::Helper))
}

fn read(path: &Path, must_exist: bool) -> std::io::Result<Option<Vec<u8>>> {
    let file = match std::fs::OpenOptions::new().read(true).open(path) {
        Err(error) if !must_exist && is_missing(error.kind()) => return Ok(None),
        other => other?,
    };
    let mut text = Vec::new();
    file.take(LONGEST + 1).read_to_end(&mut text)?;
    if text.len() as u64 > LONGEST {
        return Err(std::io::Error::other("it is larger than 4 MiB"));
    }
    Ok(Some(text))
}

fn is_missing(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// The names of a registry in the files.
fn hosts(registry: &str) -> Vec<&str> {
    if registry == "docker.io" {
        vec!["docker.io", "index.docker.io", "registry-1.docker.io"]
    } else {
        vec![registry]
    }
}

/// The most specific entry: of the repository, of what is above it, or of the host. Docker wrote
/// hosts as `https://HOST/v1/`.
fn entry_of<'a>(
    auths: &'a BTreeMap<String, Entry>,
    hosts: &[&str],
    name: &str,
) -> Option<&'a Entry> {
    let mut scope = Some(name);
    while let Some(part) = scope {
        if let Some(entry) = hosts.iter().find_map(|host| auths.get(&format!("{host}/{part}"))) {
            return Some(entry);
        }
        scope = part.rsplit_once('/').map(|(above, _)| above);
    }
    let exact = hosts.iter().find_map(|host| auths.get(*host));
    exact.or_else(|| {
        let mut keys = auths.iter();
        keys.find(|(key, _)| old_host(key).is_some_and(|host| hosts.contains(&host)))
            .map(|(_, entry)| entry)
    })
}

/// The host of a key such as `https://HOST/v1/`.
fn old_host(key: &str) -> Option<&str> {
    let rest = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://"))?;
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    matches!(path.trim_end_matches('/'), "" | "v1" | "v2").then_some(host)
}

fn login_of(entry: &Entry) -> std::result::Result<Option<Login>, &'static str> {
    let text = |field: &Option<String>| field.clone().filter(|text| !text.is_empty());
    if let Some(token) = text(&entry.registrytoken) {
        return Ok(Some(Login::Bearer(token)));
    }
    if let Some(token) = text(&entry.identitytoken) {
        return Ok(Some(Login::Identity(token)));
    }
    if let Some(auth) = text(&entry.auth) {
        let bytes = BASE64_STANDARD.decode(auth.trim()).map_err(|_| "is no base64")?;
        let pair = String::from_utf8(bytes).map_err(|_| "is no UTF-8")?;
        let (user, password) = pair.split_once(':').ok_or("has no colon")?;
        // Docker pads the password with NUL bytes.
        let password = password.trim_end_matches('\0');
        return Ok(Some(Login::Password(user.to_owned(), password.to_owned())));
    }
    match (text(&entry.username), text(&entry.password)) {
        (Some(user), Some(password)) => Ok(Some(Login::Password(user, password))),
        _ => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn searched(text: &str, registry: &str, name: &str) -> Result<Option<Login>> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let found = search(file.path(), true, registry, name)?;
        Ok(found.and_then(|found| match found {
            Source::Login(login) => Some(login),
            Source::Helper(_) => None,
        }))
    }

    fn user_of(text: &str, registry: &str, name: &str) -> Option<String> {
        match searched(text, registry, name).unwrap() {
            Some(Login::Password(user, _)) => Some(user),
            _ => None,
        }
    }

    #[test]
    fn the_most_specific_entry_counts() {
        let text = r#"{"auths": {
            "h": {"username": "host", "password": "p"},
            "h/team": {"username": "team", "password": "p"},
            "h/team/app": {"username": "app", "password": "p"},
            "https://old:5000/v1/": {"username": "old", "password": "p"},
            "https://index.docker.io/v1/": {"username": "hub", "password": "p"}
        }}"#;
        let user = |registry, name| user_of(text, registry, name);
        assert_eq!(user("h", "other").as_deref(), Some("host"));
        assert_eq!(user("h", "team/x").as_deref(), Some("team"));
        assert_eq!(user("h", "team/app").as_deref(), Some("app"));
        assert_eq!(user("h", "team/application").as_deref(), Some("team"));
        assert_eq!(user("old:5000", "x").as_deref(), Some("old"));
        assert_eq!(user("docker.io", "library/x").as_deref(), Some("hub"));
        assert_eq!(user("h.evil", "x"), None);
    }

    #[test]
    fn every_form_of_a_login_is_read() {
        let one = |entry: &str| searched(&format!(r#"{{"auths": {{"h": {entry}}}}}"#), "h", "a");
        let password = Login::Password("u".into(), "p:w".into());
        assert!(one(r#"{"auth": "dTpwOnc="}"#).unwrap() == Some(password.clone()));
        assert!(one(r#"{"auth": "dTpwOncAAA=="}"#).unwrap() == Some(password));
        let token = Login::Identity("t".into());
        assert!(one(r#"{"auth": "dTpw", "identitytoken": "t"}"#).unwrap() == Some(token));
        assert!(one(r#"{"registrytoken": "t"}"#).unwrap() == Some(Login::Bearer("t".into())));
        assert!(one("{}").unwrap().is_none());
        assert!(searched(r#"{"auths": null}"#, "h", "a").unwrap().is_none());
    }

    #[test]
    fn an_error_does_not_quote_the_login() {
        for entry in [r#"{"auth": "%secret%"}"#, r#"{"auth": "c2VjcmV0"}"#] {
            let text = format!(r#"{{"auths": {{"h": {entry}}}}}"#);
            let error = searched(&text, "h", "a").err().unwrap().to_string();
            assert!(!error.contains("secret") && !error.contains("c2Vj"), "{error}");
        }
        let error = searched(r#"{"auths": {"h": "secret"}}"#, "h", "a").err().unwrap();
        assert!(!error.to_string().contains("secret"), "{error}");
    }
}
