//! Finds the login for a repository where podman and docker keep it.
//!
//! * `$REGISTRY_AUTH_FILE` is the only file if it is set. Otherwise these are searched in turn, and
//!   the first login counts: `$XDG_RUNTIME_DIR/containers/auth.json`,
//!   `~/.config/containers/auth.json`, and `$DOCKER_CONFIG/config.json` or `~/.docker/config.json`.
//! * In one file, the helper of the registry (`credHelpers`) comes first, then an entry of `auths`,
//!   then the store of all logins (`credsStore`).
//! * A login is never part of a message, and has no `Debug`.

mod file;
mod helper;

use std::path::PathBuf;
use std::time::Duration;

use self::file::Source;
use super::environment::Environment;
use crate::error::Result;

/// A proof of identity that registries accept.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Login {
    /// A user and a password.
    Password(String, String),
    /// A token that a token server exchanges for another one.
    Identity(String),
    /// A token for the registry itself.
    Bearer(String),
}

/// The login for a repository, if there is one.
///
/// # Errors
/// A file is malformed, or a credential helper fails.
pub(super) fn find(
    registry: &str,
    name: &str,
    environment: &Environment,
    limit: Duration,
) -> Result<Option<Login>> {
    for (path, must_exist) in files(environment) {
        let found = match file::search(&path, must_exist, registry, name)? {
            Some(Source::Login(login)) => Some(login),
            Some(Source::Helper(program)) => {
                helper::ask(&program, server_name(registry), environment, limit)?
            }
            None => None,
        };
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(None)
}

/// The files to search, and whether each must exist.
fn files(environment: &Environment) -> Vec<(PathBuf, bool)> {
    if let Some(file) = environment.path("REGISTRY_AUTH_FILE") {
        return vec![(file, true)];
    }
    let runtime = environment.path("XDG_RUNTIME_DIR").map(|dir| dir.join("containers/auth.json"));
    let config = environment.config_home().map(|dir| dir.join("containers/auth.json"));
    let docker = environment
        .path("DOCKER_CONFIG")
        .or_else(|| Some(environment.path("HOME")?.join(".docker")))
        .map(|dir| dir.join("config.json"));
    [runtime, config, docker].into_iter().flatten().map(|file| (file, false)).collect()
}

/// The name under which a credential helper keeps the login of a registry.
fn server_name(registry: &str) -> &str {
    if registry == "docker.io" { "https://index.docker.io/v1/" } else { registry }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn environment(dir: &Path, more: &[(&str, &Path)]) -> Environment {
        let path = std::env::join_paths(
            [dir.to_owned(), "/usr/bin".into(), "/bin".into()].iter().cloned(),
        );
        let fixed = [("HOME".into(), dir.into()), ("PATH".into(), path.unwrap())];
        let more = more.iter().map(|(name, value)| (name.into(), value.into()));
        Environment::new(fixed.into_iter().chain(more))
    }

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn program(path: &Path, script: &str) {
        write(path, &format!("#!/bin/sh\n{script}\n"));
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn password(user: &str, password: &str) -> Option<Login> {
        Some(Login::Password(user.to_owned(), password.to_owned()))
    }

    /// Searches for a login. A test that forks at the wrong moment holds a script open for writing,
    /// which cannot be executed then.
    fn find(host: &str, environment: &Environment, limit: Duration) -> Result<Option<Login>> {
        loop {
            let found = super::find(host, "a", environment, limit);
            match &found {
                Err(error) if error.reason.contains("Text file busy") => {}
                _ => return found,
            }
        }
    }

    fn check(found: Result<Option<Login>>, expected: Option<Login>) {
        assert!(found.unwrap() == expected);
    }

    /// A file with one login: user `u`, and this password.
    fn one(registry: &str, password: &str) -> String {
        use base64::prelude::{BASE64_STANDARD, Engine};
        let auth = BASE64_STANDARD.encode(format!("u:{password}"));
        format!(r#"{{"auths": {{"{registry}": {{"auth": "{auth}"}}}}}}"#)
    }

    #[test]
    fn files_are_searched_in_the_order_of_podman() {
        let dir = tempfile::tempdir().unwrap();
        let (home, runtime) = (dir.path(), dir.path().join("run"));
        let environment = environment(home, &[("XDG_RUNTIME_DIR", &runtime)]);
        check(find("h:1", &environment, LIMIT), None);
        write(&home.join(".docker/config.json"), &one("h:1", "docker"));
        check(find("h:1", &environment, LIMIT), password("u", "docker"));
        write(&home.join(".config/containers/auth.json"), &one("h:1", "config"));
        check(find("h:1", &environment, LIMIT), password("u", "config"));
        write(&runtime.join("containers/auth.json"), &one("h:1", "runtime"));
        check(find("h:1", &environment, LIMIT), password("u", "runtime"));
        check(find("h:2", &environment, LIMIT), None);
    }

    #[test]
    fn a_file_that_is_named_must_exist_and_is_the_only_one() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join(".docker/config.json"), &one("h", "docker"));
        let named = dir.path().join("named.json");
        let environment = environment(dir.path(), &[("REGISTRY_AUTH_FILE", &named)]);
        let error = find("h", &environment, LIMIT).err().unwrap();
        assert!(error.to_string().contains("named.json"), "{error}");
        write(&named, "{}");
        check(find("h", &environment, LIMIT), None);
    }

    #[test]
    fn a_helper_of_the_registry_comes_before_the_entries_and_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let login = r#"read server; echo "{\"Username\":\"$0\",\"Secret\":\"$server\"}""#;
        program(&dir.path().join("docker-credential-one"), login);
        program(&dir.path().join("docker-credential-two"), login);
        let entry = one("h:1", "entry");
        let entry = entry.strip_suffix('}').unwrap();
        let file = format!(r#"{entry}, "credsStore": "two", "credHelpers": {{"h:2": "one"}}}}"#);
        write(&dir.path().join(".docker/config.json"), &file);
        let environment = environment(dir.path(), &[]);
        check(find("h:1", &environment, LIMIT), password("u", "entry"));
        let path = |name: &str| format!("{}/docker-credential-{name}", dir.path().display());
        check(find("h:2", &environment, LIMIT), password(&path("one"), "h:2"));
        check(find("h:3", &environment, LIMIT), password(&path("two"), "h:3"));
        let hub = "https://index.docker.io/v1/";
        check(find("docker.io", &environment, LIMIT), password(&path("two"), hub));
    }

    #[test]
    fn a_helper_can_know_no_login_fail_or_hang() {
        let dir = tempfile::tempdir().unwrap();
        let helper = dir.path().join("docker-credential-x");
        write(&dir.path().join(".docker/config.json"), r#"{"credsStore": "x"}"#);
        let environment = environment(dir.path(), &[]);
        let run = |script: &str, limit: Duration| {
            program(&helper, script);
            find("h", &environment, limit)
        };
        check(run("echo credentials not found in native keychain; exit 1", LIMIT), None);
        let token = r#"echo '{"Username":"<token>","Secret":"t"}'"#;
        check(run(token, LIMIT), Some(Login::Identity("t".to_owned())));
        let failed = run("echo 'no \u{1b}[2J bus'; exit 3", LIMIT).err().unwrap();
        assert!(failed.reason.contains("no \\u{1b}[2J bus"), "{failed}");
        let garbage = run("echo '{\"Username\": 1}'", LIMIT).err().unwrap();
        assert!(garbage.attempt.contains("docker-credential-x"), "{garbage}");
        let endless = run("exec yes", LIMIT).err().unwrap();
        assert!(endless.reason.contains("64 KiB"), "{endless}");
        let begin = std::time::Instant::now();
        let hung = run("sleep 60 & sleep 60", Duration::from_millis(300)).err().unwrap();
        assert!(hung.reason.contains("does not answer"), "{hung}");
        assert!(begin.elapsed() < Duration::from_secs(5));
        fs::remove_file(&helper).unwrap();
        let missing = find("h", &environment, LIMIT).err().unwrap();
        assert!(missing.attempt.contains("docker-credential-x"), "{missing}");
    }

    #[test]
    fn a_helper_is_named_without_a_path() {
        let dir = tempfile::tempdir().unwrap();
        write(&dir.path().join(".docker/config.json"), r#"{"credsStore": "../x"}"#);
        let error = find("h", &environment(dir.path(), &[]), LIMIT).err().unwrap();
        assert!(error.reason.contains("no name of a credential helper"), "{error}");
    }
}
