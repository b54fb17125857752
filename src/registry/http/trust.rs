//! Decides which certificates are trusted, as podman does.
//!
//! * `SSL_CERT_FILE` or `SSL_CERT_DIR` replace the certificates of the system. Without them, the
//!   first bundle of a list of usual places is read.
//! * A directory `HOST[:PORT]` in `~/.config/containers/certs.d`, `/etc/containers/certs.d` or
//!   `/etc/docker/certs.d` holds more for one registry: each `*.crt` is an authority that is
//!   trusted too, and `NAME.cert` with `NAME.key` is the certificate of the client. The first
//!   directory that exists counts.
//! * Verification cannot be switched off.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};

use super::super::environment::Environment;
use super::url::Origin;
use crate::error::{Attempt, Error, Kind, Result};

/// Where distributions keep the bundle of authorities.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/cacert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Where the certificates of single registries are.
const CERTS_D: &[&str] = &["/etc/containers/certs.d", "/etc/docker/certs.d"];

/// The settings of TLS for an origin.
///
/// # Errors
/// A named file cannot be read, or is malformed.
pub(in crate::registry) fn tls(environment: &Environment, origin: &Origin) -> Result<TlsConfig> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = system_roots(environment)?;
    let mut client = None;
    if let Some(dir) = registry_dir(environment, origin) {
        for file in files(&dir, "crt")? {
            roots.extend(certificates(&file)?);
        }
        for file in files(&dir, "cert")? {
            client = Some(client_certificate(&file, &provider)?);
        }
    }
    let config = TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(roots)))
        .client_cert(client)
        .unversioned_rustls_crypto_provider(provider);
    Ok(config.build())
}

fn system_roots(environment: &Environment) -> Result<Vec<Certificate<'static>>> {
    let mut roots = Vec::new();
    let file = environment.path("SSL_CERT_FILE");
    let dirs = environment.get("SSL_CERT_DIR");
    if let Some(file) = &file {
        roots.extend(certificates(file)?);
    }
    for dir in dirs.map(std::env::split_paths).into_iter().flatten() {
        for file in files(&dir, "")? {
            roots.extend(certificates(&file).unwrap_or_default());
        }
    }
    if file.is_none() && dirs.is_none() {
        let found = BUNDLES.iter().map(Path::new).find(|path| path.exists());
        roots.extend(found.map(certificates).transpose()?.unwrap_or_default());
    }
    Ok(roots)
}

/// The directory with the certificates of one registry.
fn registry_dir(environment: &Environment, origin: &Origin) -> Option<PathBuf> {
    let own = environment.config_home().map(|home| home.join("containers/certs.d"));
    let places = own.into_iter().chain(CERTS_D.iter().map(PathBuf::from));
    let with_port = format!("{}:{}", origin.host, origin.port);
    let names = [Some(with_port), (origin.port == 443).then(|| origin.host.clone())];
    let dirs = places
        .flat_map(|place| names.clone().into_iter().flatten().map(move |name| place.join(name)));
    dirs.into_iter().find(|dir| dir.is_dir())
}

/// The files of a directory with an ending, in the order of their names.
fn files(dir: &Path, ending: &str) -> Result<Vec<PathBuf>> {
    let listed = std::fs::read_dir(dir).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let listed = match listed {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.attempt(|| format!("list {}", dir.display()))?,
    };
    let paths = listed.into_iter().map(|entry| entry.path());
    let has_ending =
        |path: &PathBuf| ending.is_empty() || path.extension().is_some_and(|found| found == ending);
    let mut paths: Vec<PathBuf> = paths.filter(|path| has_ending(path) && path.is_file()).collect();
    paths.sort_unstable();
    Ok(paths)
}

/// The certificates of a PEM file.
fn certificates(file: &Path) -> Result<Vec<Certificate<'static>>> {
    let attempt = || format!("read the certificates in {}", file.display());
    let bytes = std::fs::read(file).attempt(attempt)?;
    let found: Vec<_> = parse_pem(&bytes)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        return Err(Error::new(Kind::Failed, attempt(), "it holds no certificate in PEM form"));
    }
    Ok(found)
}

/// The certificate of the client, checked against its key.
fn client_certificate(file: &Path, provider: &CryptoProvider) -> Result<ClientCert> {
    let key_file = file.with_extension("key");
    let attempt = || format!("read the key in {}", key_file.display());
    let bytes = std::fs::read(&key_file).attempt(attempt)?;
    let chain = certificates(file)?;
    let bad = |reason: String| Error::new(Kind::Failed, attempt(), reason);
    let key =
        PrivateKey::from_pem(&bytes).map_err(|_| bad("it holds no key in PEM form".into()))?;
    // The settings of ureq panic if the two do not fit, so they are tried here first.
    let ders = chain.iter().map(|one| CertificateDer::from(one.der()).into_owned()).collect();
    let parsed =
        PrivateKeyDer::try_from(key.der().to_vec()).map_err(|bad_key| bad(bad_key.into()))?;
    rustls::sign::CertifiedKey::from_der(ders, parsed, provider)
        .map_err(|error| bad(error.to_string()))?;
    Ok(ClientCert::new_with_certs(&chain, key))
}
