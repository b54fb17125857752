//! `run --net`: a command reaches the hosts that its caller lists, and no other.
//!
//! The origins are servers on the loopback of the host. The command has another loopback, so each
//! request that arrives came through the proxy.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::confine::{ACCOUNTS, Account, at_srv, place};
use crate::place::{Place, until};

/// A server; ended with the test.
struct Origin {
    server: Child,
    port: String,
}

impl Origin {
    /// Serves the directory `web` of the place. With `cert`, a file of the place, it speaks TLS.
    fn start(place: &Place, cert: Option<&str>) -> Origin {
        std::fs::create_dir_all(place.at("web")).unwrap();
        for file in ["greeting", "stolen"] {
            place.write(format!("web/{file}"), "hello from the origin\n");
        }
        let server = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/origin.py");
        let mut command = Command::new("/usr/bin/python3");
        command.arg(server).args([place.at("web"), place.at("notes")]);
        command.args(cert.map(|cert| place.at(cert))).stderr(Stdio::null());
        let server = command.spawn().unwrap();
        until("the origin listens", || place.exists("web/port"));
        Origin { server, port: place.read("web/port") }
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.server.kill().unwrap();
        self.server.wait().unwrap();
    }
}

/// Each line tries to connect to an origin that is not listed. `$1` is the port of the origin.
const ATTACKS: &str = r#"
import ctypes, os, socket, subprocess, sys
port = int(sys.argv[1])

def direct(address):
    with socket.create_connection((address, port), 2) as stream:
        stream.sendall(b"GET /stolen HTTP/1.0\r\n\r\n")
        assert b"200" in stream.recv(100)

def proxied(request, wanted=b" 200 "):
    with socket.create_connection(("127.0.0.1", 61080), 2) as stream:
        stream.sendall(request)
        answer = b""
        while wanted not in answer:
            more = stream.recv(100)
            assert more
            answer += more

def host_namespace():
    # From the namespace of any process that can be seen.
    libc = ctypes.CDLL(None, use_errno=True)
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            fd = os.open(f"/proc/{name}/ns/net", os.O_RDONLY)
            assert libc.setns(fd, 0x40000000) == 0
    direct("127.0.0.1")

def new_interface():
    subprocess.run(["ip", "link", "add", "out", "type", "ipvlan", "link", "lo"], check=True)

def name(text):
    return f"GET http://{text}:{port}/stolen HTTP/1.1\r\nHost: {text}:{port}\r\n\r\n".encode()

def tunnel(text):
    return f"CONNECT {text}:{port} HTTP/1.1\r\n\r\nGET /stolen HTTP/1.0\r\n\r\n".encode()

def socks(address):
    return b"\x05\x01\x00\x05\x01\x00\x01" + socket.inet_aton(address) + port.to_bytes(2, "big")

own = socket.gethostname()
attacks = {
    "direct": lambda: direct("127.0.0.1"),
    "setns": host_namespace,
    "interface": new_interface,
    "address": lambda: proxied(name("127.0.0.1")),
    "number": lambda: proxied(name("2130706433")),
    "short": lambda: proxied(name("127.1")),
    "mapped": lambda: proxied(tunnel("[::ffff:127.0.0.1]")),
    "any": lambda: proxied(tunnel("0.0.0.0")),
    "own name": lambda: proxied(tunnel(own)),
    "user": lambda: proxied(tunnel(f"listed.example@127.0.0.1")),
    "socks": lambda: proxied(socks("127.0.0.1"), b"\x05\x00\x00"),
    "hosts file": lambda: (open("/etc/hosts", "a").write("127.0.0.1 listed.example\n"),
                           proxied(tunnel("listed.example"))),
}
for what, attack in attacks.items():
    try:
        attack()
    except (OSError, AssertionError, subprocess.CalledProcessError):
        continue
    print("it went well:", what)
"#;

#[test]
fn a_command_reaches_listed_hosts_and_no_others() {
    for account in ACCOUNTS {
        let place = place();
        let origin = Origin::start(&place, None);
        place.write("attacks.py", ATTACKS);
        let port = &origin.port;
        let run = format!("$JAILFS run --discard --net allow:localhost:{port},listed.example --");
        let script = format!(
            r#"
            out=$({run} curl -sS http://localhost:{port}/greeting)
            [ "$out" = 'hello from the origin' ]
            out=$({run} curl -sS --proxytunnel http://localhost:{port}/greeting)
            [ "$out" = 'hello from the origin' ]
            out=$({run} sh -c 'unset HTTP_PROXY http_proxy ALL_PROXY all_proxy
                curl -sS --socks5-hostname 127.0.0.1:61080 http://localhost:{port}/greeting')
            [ "$out" = 'hello from the origin' ]
            {run} python3 -c "$(cat ../attacks.py)" {port} > ../out/attacks 2> ../out/log
            "#
        );
        let said = at_srv(&place, account, &script);
        assert_eq!(said.code, 0, "{account:?}: {}\n{}", said.out, said.err);
        assert_eq!(place.read("out/attacks"), "", "{account:?}");
        // The caller gets each refusal with its name.
        let log = place.read("out/log");
        assert!(log.contains(&format!("refused 127.0.0.1:{port}: it is not in the list")), "{log}");
        assert!(log.contains("connections to"), "{log}");
        assert!(!place.read("notes").contains("stolen"), "{}", place.read("notes"));
    }
}

#[test]
fn without_a_list_the_same_attacks_succeed() {
    let place = place();
    let origin = Origin::start(&place, None);
    place.write("attacks.py", ATTACKS);
    // With the host's network the origin is reached, and with everything listed the proxy admits
    // the addresses. So the attacks work, and the list is what stops them above.
    let script = format!(
        r#"
        $JAILFS run --discard -- python3 -c "$(cat ../attacks.py)" {0} | grep -q direct
        $JAILFS run --discard --net allow:127.0.0.1:{0} -- \
            python3 -c "$(cat ../attacks.py)" {0} > ../out/attacks
        "#,
        origin.port
    );
    let said = at_srv(&place, Account::Root, &script);
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    let lines = place.read("out/attacks");
    for attack in ["address", "mapped", "socks"] {
        assert!(lines.contains(&format!("it went well: {attack}\n")), "{attack}: {lines}");
    }
    assert!(!lines.contains("direct"), "there is no route but the proxy: {lines}");
}

/// Makes a certificate, a git repository and a pip index.
fn make_origin(place: &Place) {
    let made = place.sh(
        "",
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost \
            -addext subjectAltName=DNS:localhost -keyout key -out crt 2>/dev/null
         cat key crt > cert.pem
         mkdir -p web/simple/pure web/index/pu/re web/crates
         git init -q work; cd work; git config user.name n; git config user.email e
         echo text > file
         git add .; git commit -qm one; cd ..; git clone -q --bare work web/repo.git
         git -C web/repo.git update-server-info
         mkdir wheel; cd wheel; mkdir pure-1.0.dist-info; echo 'def f(): return 7' > pure.py
         printf 'Metadata-Version: 2.1\\nName: pure\\nVersion: 1.0\\n' > pure-1.0.dist-info/METADATA
         printf '%s\\n' 'Wheel-Version: 1.0' 'Generator: test' 'Root-Is-Purelib: true' \
            'Tag: py3-none-any' > pure-1.0.dist-info/WHEEL
         printf '%s,,\\n' pure.py pure-1.0.dist-info/METADATA pure-1.0.dist-info/WHEEL \
            pure-1.0.dist-info/RECORD > pure-1.0.dist-info/RECORD
         python3 -c \"import shutil
shutil.make_archive('../web/simple/pure/pure-1.0-py3-none-any', 'zip', '.')\"; cd ..
         mv web/simple/pure/pure-1.0-py3-none-any.zip web/simple/pure/pure-1.0-py3-none-any.whl
         echo '<a href=\"pure-1.0-py3-none-any.whl\">pure</a>' > web/simple/pure/index.html",
    );
    assert_eq!(made.code, 0, "{made:?}");
}

/// Makes an npm and a cargo registry, as files.
fn make_registries(place: &Place, port: &str) {
    let made = place.sh(
        "",
        &format!(
            r#"
            mkdir -p pack/package
            echo '{{"name":"tiny","version":"1.0.0","main":"i.js"}}' > pack/package/package.json
            echo 'module.exports = 8' > pack/package/i.js
            tar -C pack -czf web/tiny-1.0.0.tgz package
            sum=$(sha1sum < web/tiny-1.0.0.tgz | cut -d' ' -f1)
            cat > web/tiny <<END
{{"name":"tiny","dist-tags":{{"latest":"1.0.0"}},"versions":{{"1.0.0":{{
"name":"tiny","version":"1.0.0",
"dist":{{"shasum":"$sum","tarball":"http://localhost:{port}/tiny-1.0.0.tgz"}}}}}}}}
END
            mkdir -p crate/pure-1.0.0/src
            echo 'pub fn nine() -> u8 {{ 9 }}' > crate/pure-1.0.0/src/lib.rs
            printf '[package]\nname = "pure"\nversion = "1.0.0"\nedition = "2021"\n' \
                > crate/pure-1.0.0/Cargo.toml
            tar -C crate -czf web/crates/pure.crate pure-1.0.0
            sum=$(sha256sum < web/crates/pure.crate | cut -d' ' -f1)
            echo '{{"dl":"http://localhost:{port}/crates/{{crate}}.crate"}}' > web/index/config.json
            printf '{{"name":"pure","vers":"1.0.0","deps":[],"features":{{}},"yanked":false,' \
                > web/index/pu/re/pure
            echo "\"cksum\":\"$sum\"}}" >> web/index/pu/re/pure
            mkdir -p base/app/src base/app/.cargo
            echo 'fn main() {{ println!("{{}}", pure::nine()) }}' > base/app/src/main.rs
            printf '[package]\nname = "app"\nversion = "1.0.0"\nedition = "2021"\n' \
                > base/app/Cargo.toml
            printf '[dependencies]\npure = {{ version = "1", registry = "here" }}\n' \
                >> base/app/Cargo.toml
            printf '[registries.here]\nindex = "sparse+http://localhost:{port}/index/"\n' \
                > base/app/.cargo/config.toml
            cp crt base/ca.pem
            "#
        ),
    );
    assert_eq!(made.code, 0, "{made:?}");
}

#[test]
fn programs_fetch_through_the_proxy() {
    let place = Place::new();
    let cert = "cert.pem";
    make_origin(&place);
    let tls = Origin::start(&place, Some(cert));
    std::fs::rename(place.at("web/port"), place.at("web/tls-port")).unwrap();
    let plain = Origin::start(&place, None);
    let port = &plain.port;
    make_registries(&place, port);
    let allow = format!("--net allow:localhost:{port},localhost:{}", tls.port);
    let secure = format!("https://localhost:{}", tls.port);
    let rustup = std::env::var("RUSTUP_HOME")
        .unwrap_or_else(|_| format!("{}/.rustup", std::env::var("HOME").unwrap()));
    for (program, script) in [
        ("curl", format!("curl -sS --cacert ca.pem {secure}/greeting | grep hello")),
        (
            "git",
            format!(
                "git clone -q http://localhost:{port}/repo.git got && cat got/file | grep text"
            ),
        ),
        (
            "git over TLS",
            format!(
                "export GIT_SSL_CAINFO=$PWD/ca.pem; git clone -q {secure}/repo.git got && \
                 grep text got/file"
            ),
        ),
        (
            "pip",
            format!(
                "python3 -m venv v && v/bin/pip install -q --retries 0 --index-url \
                 http://localhost:{port}/simple pure && v/bin/python -c 'import pure; \
                 assert pure.f() == 7'"
            ),
        ),
        (
            "npm",
            format!(
                "npm install --fetch-retries 0 --no-audit --no-fund --registry \
                 http://localhost:{port}/ tiny && node -e 'if (require(\"tiny\") != 8) \
                 process.exit(1)'"
            ),
        ),
        (
            "cargo",
            format!(
                "cd app && export RUSTUP_HOME={rustup} CARGO_HOME=$PWD/home && \
                 cargo run -q | grep 9"
            ),
        ),
        (
            "node",
            format!(
                "node -e 'const r = require(\"http\").request({{host: \"127.0.0.1\", port: 61080, \
                 path: \"http://localhost:{port}/greeting\", headers: \
                 {{Host: \"localhost:{port}\"}}}}, a => process.exit(a.statusCode == 200 ? 0 : \
                 1)); r.end()'"
            ),
        ),
    ] {
        let said = place.run(&format!("--discard {allow}"), &script);
        assert_eq!(said.code, 0, "{program}: {}\n{}", said.out, said.err);
        // The same without the proxy: there is no other way out.
        let said = place.run("--discard --net none", &script);
        assert_ne!(said.code, 0, "{program}: {}\n{}", said.out, said.err);
    }
    let notes = place.read("notes");
    for wanted in ["/repo.git/info/refs", "/simple/pure/", "/tiny", "/index/pu/re/pure"] {
        assert!(notes.contains(wanted), "{wanted}: {notes}");
    }
}

#[test]
fn a_list_needs_a_network_namespace_and_valid_entries() {
    let place = place();
    for (list, says) in [
        ("allow:", "'' is not HOST"),
        ("allow:bad host", "'bad host' is not HOST"),
        ("allow:a:0", "'a:0': a port is a number"),
        ("allow:127.1", "'127.1' is not HOST"),
        ("some", "host, none or allow"),
    ] {
        let said = place.call("base", ["run", "--net", list, "--", "true"]);
        assert_eq!(said.code, 2, "{list}: {said:?}");
        assert!(said.err.contains(says), "{list}: {}", said.err);
    }
    let said = crate::confine::without_namespaces(
        &place,
        Account::User,
        "code=0; $JAILFS run --walls landlock --net allow:localhost -- true || code=$?; \
         [ $code = 125 ]",
    );
    assert_eq!(said.code, 0, "{said:?}");
    assert!(said.err.contains("--net allow need namespaces"), "{}", said.err);
}
