//! Starts and stops docker-registry, on a port and a directory of its own.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// The longest life of a partner, in seconds.
const LIMIT: &str = "120";

/// A running registry. It stops when it is dropped, and after two minutes at the latest.
pub struct Partner {
    child: Child,
    /// `127.0.0.1:PORT`.
    pub address: String,
    _dir: TempDir,
}

/// A private authority, and a certificate of it for 127.0.0.1 and registry.example.
pub struct Tls {
    pub authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

/// Runs a program to its end. A missing program fails the test with the name of its package.
fn run(program: &str, package: &str, arguments: &[&str]) -> Vec<u8> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.unwrap_or_else(|error| {
        panic!("cannot run '{program}' ({error}): install the package {package}")
    });
    let errors = output.stderr.escape_ascii();
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    output.stdout
}

impl Partner {
    /// Starts a registry, with a user and a password, and with TLS.
    pub fn start(login: Option<(&str, &str)>, tls: Option<&Tls>) -> Partner {
        // Another process can take the port before the registry does.
        (0..5).find_map(|_| Partner::try_start(login, tls)).expect("docker-registry does not start")
    }

    fn try_start(login: Option<(&str, &str)>, tls: Option<&Tls>) -> Option<Partner> {
        let dir = tempfile::tempdir().unwrap();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let address = format!("127.0.0.1:{port}");
        let data = dir.path().join("data");
        let mut config = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage:\n  filesystem: {{rootdirectory: {}}}\n\
             http:\n  addr: {address}\n  secret: test\n",
            data.display()
        );
        if let Some(tls) = tls {
            let (certificate, key) = (tls.certificate.display(), tls.key.display());
            config += &format!("  tls: {{certificate: {certificate}, key: {key}}}\n");
        }
        if let Some((user, password)) = login {
            let file = dir.path().join("htpasswd");
            let cheapest = ["-Bbn", "-C", "4", user, password];
            std::fs::write(&file, run("htpasswd", "apache2-utils", &cheapest)).unwrap();
            config += &format!("auth:\n  htpasswd: {{realm: test, path: {}}}\n", file.display());
        }
        let file = dir.path().join("config.yml");
        std::fs::write(&file, config).unwrap();
        run("docker-registry", "docker-registry", &["--version"]);
        let child = Command::new("timeout")
            .args(["--kill-after=5", LIMIT, "docker-registry", "serve"])
            .arg(&file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(
                std::fs::OpenOptions::new()
                    .append(true)
                    .create(true)
                    .open(dir.path().join("log"))
                    .unwrap(),
            )
            .spawn()
            .unwrap();
        let mut partner = Partner { child, address, _dir: dir };
        partner.is_ready().then_some(partner)
    }

    /// Waits until it accepts connections. False: it ended.
    fn is_ready(&mut self) -> bool {
        let end = Instant::now() + Duration::from_secs(30);
        while Instant::now() < end {
            if self.child.try_wait().unwrap().is_some() {
                return false;
            }
            if let Ok(mut stream) = TcpStream::connect(&self.address) {
                drop(stream.write_all(b"\r\n"));
                return true;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        false
    }
}

impl Drop for Partner {
    fn drop(&mut self) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        // `timeout` passes the signal on to the registry.
        kill(pid, Signal::SIGTERM).ok();
        drop(self.child.wait());
    }
}

impl Tls {
    /// Makes an authority and a certificate in a directory.
    pub fn make(dir: &Path) -> Tls {
        let path = |name: &str| dir.join(name);
        let text = |name: &str| path(name).into_os_string().into_string().unwrap();
        let (ca, ca_key) = (text("ca.pem"), text("ca.key"));
        let (request, key) = (text("server.csr"), text("server.key"));
        let (certificate, extensions) = (text("server.pem"), text("server.ext"));
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"];
        let openssl = |first: &[&str], rest: &[&str]| {
            run("openssl", "openssl", &[first, rest].concat());
        };
        let authority = ["-x509", "-subj", "/CN=test authority", "-days", "2"];
        let out = ["-keyout", &ca_key, "-out", &ca];
        openssl(&["req"], &[&curve[..], &authority, &out].concat());
        let out = ["-subj", "/CN=registry", "-keyout", &key, "-out", &request];
        openssl(&["req"], &[&curve[..], &out].concat());
        std::fs::write(&extensions, "subjectAltName=IP:127.0.0.1,DNS:registry.example\n").unwrap();
        let signer = ["-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial", "-days", "2"];
        let out = ["-in", &request, "-extfile", &extensions, "-out", &certificate];
        openssl(&["x509", "-req"], &[&signer[..], &out].concat());
        Tls { authority: path("ca.pem"), certificate: path("server.pem"), key: path("server.key") }
    }
}
