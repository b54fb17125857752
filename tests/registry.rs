//! The client for registries against a real one: Debian's docker-registry on the loopback, with and
//! without logins and TLS, and behind a proxy that cuts connections.

#![cfg(feature = "registry")]
#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a test fails by panicking"
)]

#[expect(dead_code, reason = "each test file uses another part of this")]
#[path = "registry/cutter.rs"]
mod cutter;
#[path = "registry/partner.rs"]
mod partner;
#[path = "registry/tunnel.rs"]
mod tunnel;

use std::io::Cursor;
use std::path::Path;
use std::time::Duration;

use jailfs::internals::registry::{
    Descriptor, Digest, Environment, Limits, Meter, Options, PlainHttp, Pushed, Reference,
    Repository, Version,
};
use jailfs::types::ByteRange;

use cutter::{Cut, Cutter};
use partner::{Partner, Tls};
use tunnel::Tunnel;

const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

fn limits(attempts: u32) -> Limits {
    Limits {
        attempts,
        first_pause: Duration::from_millis(2),
        longest_pause: Duration::from_millis(50),
        connect: Duration::from_secs(5),
        silence: Duration::from_secs(20),
        chunk: 100_000,
        ..Limits::default()
    }
}

fn open(address: &str, name: &str, options: &Options) -> Repository {
    Repository::open(&Reference::parse(&format!("{address}/{name}")).unwrap(), options).unwrap()
}

fn plain(attempts: u32) -> Options {
    let plain_http = PlainHttp::Loopback;
    Options { plain_http, limits: limits(attempts), environment: Environment::default() }
}

fn tls(attempts: u32, variables: &[(&str, &Path)]) -> Options {
    let variables = variables.iter().map(|(name, value)| (name.into(), value.into()));
    Options {
        environment: Environment::new(variables),
        limits: limits(attempts),
        ..Options::default()
    }
}

/// Bytes without a pattern that repeats soon.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// A manifest over blobs; the first is its configuration.
fn manifest(blobs: &[&[u8]]) -> Vec<u8> {
    let describe = |blob: &&[u8]| {
        let (digest, size) = (Digest::of(blob), blob.len());
        format!(r#"{{"mediaType":"application/octet-stream","digest":"{digest}","size":{size}}}"#)
    };
    let blobs: Vec<String> = blobs.iter().map(describe).collect();
    let text = format!(
        r#"{{"schemaVersion":2,"mediaType":"{MANIFEST_TYPE}","config":{},"layers":[{}]}}"#,
        blobs[0],
        blobs[1..].join(",")
    );
    text.into_bytes()
}

fn push(repository: &Repository, blob: &[u8]) -> jailfs::error::Result<Pushed> {
    let mut source = Cursor::new(blob);
    repository.push_blob(&Descriptor::of(blob), &mut source, None, &Meter::silent())
}

fn push_all(repository: &Repository, blobs: &[&[u8]], tag: &str) -> jailfs::error::Result<Digest> {
    for blob in blobs {
        push(repository, blob)?;
    }
    repository.push_manifest(&Version::Tag(tag.to_owned()), MANIFEST_TYPE, &manifest(blobs))
}

fn fetch(repository: &Repository, blob: &[u8]) -> jailfs::error::Result<Vec<u8>> {
    let mut sink = Vec::new();
    repository.fetch_blob(&Descriptor::of(blob), &mut sink, &Meter::silent())?;
    Ok(sink)
}

#[test]
fn blobs_manifests_and_tags_go_there_and_back() {
    let partner = Partner::start(None, None);
    let repository = open(&partner.address, "team/app", &plain(3));
    repository.ping().unwrap();
    assert_eq!(repository.tags().unwrap(), Vec::<String>::new());
    let (small, large) = (noise(1, 10), noise(2, 1_050_000));
    let blobs = [small.as_slice(), &large, b"x"];
    assert_eq!(repository.blob_size(&Digest::of(&large)).unwrap(), None);
    let digest = push_all(&repository, &blobs, "one").unwrap();
    for blob in blobs {
        assert_eq!(repository.blob_size(&Digest::of(blob)).unwrap(), Some(blob.len() as u64));
        assert_eq!(push(&repository, blob).unwrap(), Pushed::Existed);
        assert!(fetch(&repository, blob).unwrap() == blob);
    }
    let (mut sink, range) = (Vec::new(), ByteRange { start: 500_000, end: 500_100 });
    let blob = Descriptor::of(&large);
    repository.fetch_range(&blob, range, &mut sink, &Meter::silent()).unwrap();
    assert!(sink == large[500_000..500_100]);

    for version in [Version::Tag("one".into()), Version::Digest(digest)] {
        let found = repository.manifest(&version).unwrap().unwrap();
        assert_eq!((found.digest, found.media_type.as_str()), (digest, MANIFEST_TYPE));
        assert_eq!(found.bytes, manifest(&blobs));
        let described = repository.find_manifest(&version).unwrap().unwrap();
        assert_eq!(described, Descriptor::of(&found.bytes));
    }
    let missing = Version::Tag("missing".into());
    assert_eq!(repository.manifest(&missing).unwrap(), None);
    assert_eq!(repository.find_manifest(&missing).unwrap(), None);
    let bytes = manifest(&blobs);
    repository.push_manifest(&Version::Tag("two".into()), MANIFEST_TYPE, &bytes).unwrap();
    repository.push_manifest(&Version::Digest(digest), MANIFEST_TYPE, &bytes).unwrap();
    assert_eq!(repository.tags().unwrap(), ["one", "two"]);

    let other = open(&partner.address, "team/other", &plain(3));
    let mut source = Cursor::new(&large);
    let meter = Meter::silent();
    let pushed = other.push_blob(&blob, &mut source, Some("team/app"), &meter).unwrap();
    assert_eq!(pushed, Pushed::Mounted);
    assert!(fetch(&other, &large).unwrap() == large);
}

#[test]
fn a_manifest_whose_blob_is_missing_is_refused_with_the_registrys_reason() {
    let partner = Partner::start(None, None);
    let repository = open(&partner.address, "a", &plain(3));
    let tag = Version::Tag("t".into());
    let bytes = manifest(&[b"missing"]);
    let error = repository.push_manifest(&tag, MANIFEST_TYPE, &bytes).unwrap_err();
    assert!(error.attempt.starts_with("PUT http://127.0.0.1:"), "{error}");
    assert!(error.attempt.ends_with("/v2/a/manifests/t"), "{error}");
    assert!(error.reason.contains("BLOB_UNKNOWN"), "{error}");
    assert_eq!(repository.manifest(&tag).unwrap(), None);
}

#[test]
fn a_login_over_tls_with_a_private_authority() {
    let dir = tempfile::tempdir().unwrap();
    let tls_files = Tls::make(dir.path());
    let partner = Partner::start(Some(("user", "secret word")), Some(&tls_files));
    let (none, ca) = (dir.path().join("none.json"), tls_files.authority.clone());
    std::fs::write(&none, "{}").unwrap();

    let strange = tls(2, &[("REGISTRY_AUTH_FILE", &none)]);
    let error = open(&partner.address, "a", &strange).ping().unwrap_err();
    let hint = error.hint.as_ref().unwrap();
    assert!(hint.contains(&format!("certs.d/{}/ca.crt", partner.address)), "{error:?}");

    let anonymous = tls(2, &[("SSL_CERT_FILE", &ca), ("REGISTRY_AUTH_FILE", &none)]);
    let error = open(&partner.address, "a", &anonymous).ping().unwrap_err();
    assert!(error.hint.as_ref().unwrap().contains("no login was found"), "{error:?}");

    let login = dir.path().join("containers/auth.json");
    let write_login = |password: &str| {
        let entry = format!(r#"{{"username": "user", "password": "{password}"}}"#);
        let text = format!(r#"{{"auths": {{"{}": {entry}}}}}"#, partner.address);
        std::fs::create_dir_all(login.parent().unwrap()).unwrap();
        std::fs::write(&login, text).unwrap();
    };
    write_login("wrong");
    let named = tls(2, &[("SSL_CERT_FILE", &ca), ("REGISTRY_AUTH_FILE", &login)]);
    let error = open(&partner.address, "a", &named).ping().unwrap_err();
    assert!(error.hint.as_ref().unwrap().contains("not accepted"), "{error:?}");
    assert!(!format!("{error:?}").contains("wrong"), "{error:?}");

    write_login("secret word");
    let blob = noise(3, 250_000);
    open(&partner.address, "a", &named).ping().unwrap();
    push_all(&open(&partner.address, "a", &named), &[&blob], "t").unwrap();

    // The authority and the login where podman keeps them.
    let certs = dir.path().join("containers/certs.d").join(&partner.address);
    std::fs::create_dir_all(&certs).unwrap();
    std::fs::copy(&ca, certs.join("ca.crt")).unwrap();
    let usual = tls(2, &[("XDG_CONFIG_HOME", dir.path())]);
    let repository = open(&partner.address, "a", &usual);
    assert_eq!(repository.tags().unwrap(), ["t"]);
    assert!(fetch(&repository, &blob).unwrap() == blob);

    let error = open(&partner.address, "a", &plain(2)).ping().unwrap_err();
    assert!(error.reason.contains("400"), "plain http to a TLS port: {error}");
}

#[test]
fn a_proxy_of_the_environment_is_used_and_told_its_own_password() {
    let dir = tempfile::tempdir().unwrap();
    let tls_files = Tls::make(dir.path());
    let partner = Partner::start(None, Some(&tls_files));
    let tunnel = Tunnel::start(&partner.address);
    let proxy = format!("http://user:secret@{}", tunnel.address);
    let with = |exceptions: &str| {
        let ca = ("SSL_CERT_FILE", tls_files.authority.as_path());
        let proxy = ("HTTPS_PROXY", Path::new(&proxy));
        tls(1, &[ca, proxy, ("NO_PROXY", Path::new(exceptions))])
    };
    let blob = noise(4, 150_000);
    let repository = open("registry.example", "a", &with("other.example"));
    push_all(&repository, &[&blob], "t").unwrap();
    assert!(fetch(&repository, &blob).unwrap() == blob);
    let heads = tunnel.heads();
    assert!(heads[0].starts_with("CONNECT registry.example:443 HTTP/1.1\r\n"), "{heads:?}");
    assert!(heads[0].contains("Basic dXNlcjpzZWNyZXQ="), "{heads:?}");

    let direct = open("registry.example", "a", &with(".example")).ping().unwrap_err();
    assert_eq!(tunnel.heads().len(), heads.len(), "the proxy is not asked");
    assert!(!direct.to_string().contains("secret"), "{direct}");
}

#[test]
fn tls_to_a_plain_port_names_the_option() {
    let partner = Partner::start(None, None);
    let error = open(&partner.address, "a", &tls(2, &[])).ping().unwrap_err();
    assert!(error.hint.as_ref().unwrap().contains("--plain-http"), "{error:?}");
}

/// One push: five requests for a blob of three chunks, three for a small one, one for the manifest.
fn small_push(number: u64) -> (Vec<u8>, Vec<u8>) {
    (noise(100 + number, 260_000), noise(200 + number, 100))
}

#[test]
fn a_push_is_cut_at_each_request_in_turn() {
    let partner = Partner::start(None, None);
    let mut requests = 0;
    for cut in [Cut::Before, Cut::During, Cut::After] {
        for at in 1.. {
            let cutter = Cutter::start(&partner.address);
            let name = format!("{cut:?}{at}").to_lowercase();
            let old = push_all(&open(&partner.address, &name, &plain(1)), &[b"old"], "t").unwrap();
            let (one, two) = small_push(at);
            let blobs = [one.as_slice(), &two];
            let new = Digest::of(&manifest(&blobs));
            let tag_now = || {
                let direct = open(&partner.address, &name, &plain(1));
                direct.manifest(&Version::Tag("t".into())).unwrap().unwrap().digest
            };
            cutter.cut_request(at, cut);
            let impatient = open(&cutter.address, &name, &plain(1));
            let result = push_all(&impatient, &blobs, "t");
            assert!([old, new].contains(&tag_now()), "{name}");
            let was_cut = result.is_err();
            if let Err(error) = result {
                assert!(error.attempt.contains(&format!("/v2/{name}/")), "{error}");
                // The same push again, and then one that goes on by itself.
                push_all(&open(&cutter.address, &name, &plain(1)), &blobs, "t").unwrap();
            }
            assert_eq!(tag_now(), new, "{name}");

            let name = format!("{name}/patient");
            cutter.cut_request(at, cut);
            push_all(&open(&cutter.address, &name, &plain(6)), &blobs, "t").unwrap();
            let direct = open(&partner.address, &name, &plain(1));
            assert!(fetch(&direct, &one).unwrap() == one);
            let found = direct.manifest(&Version::Tag("t".into())).unwrap().unwrap();
            assert_eq!(found.digest, new, "{name}");
            if !was_cut {
                break;
            }
            requests += 1;
        }
    }
    assert_eq!(requests, 3 * 9, "each of the requests of a push was cut");
}

#[test]
fn transfers_are_cut_at_any_byte() {
    let partner = Partner::start(None, None);
    let mut cuts = 0;
    for seed in 0..12 {
        let cutter = Cutter::start(&partner.address);
        let name = format!("r{seed}");
        let (one, two) = small_push(1000 + seed);
        let blobs = [one.as_slice(), &two];
        cutter.cut_bytes(seed, 5);
        let repository = open(&cutter.address, &name, &plain(12));
        push_all(&repository, &blobs, "t").unwrap();
        cutter.cut_bytes(seed + 100, 5);
        let repository = open(&cutter.address, &name, &plain(12));
        for blob in blobs {
            assert!(fetch(&repository, blob).unwrap() == blob);
        }
        let found = repository.manifest(&Version::Tag("t".into())).unwrap().unwrap();
        assert_eq!(found.bytes, manifest(&blobs));
        cuts += cutter.cuts();
    }
    assert!(cuts >= 40, "{cuts} cuts of 120");
}
