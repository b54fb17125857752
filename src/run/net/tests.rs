//! Tests the proxy against origins on the loopback, with names that a test resolver knows.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::allow::AllowList;
use super::outward::Resolver;
use super::proxy::{Limits, Proxy};

const PATIENCE: Duration = Duration::from_secs(10);

/// Resolves a few names, and `slow.test` late.
#[derive(Clone, Default)]
struct Names {
    known: Arc<HashMap<&'static str, &'static str>>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Resolver for Names {
    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        self.asked.lock().push(name.to_owned());
        if name == "slow.test" {
            std::thread::sleep(Duration::from_secs(4));
        }
        let addresses = self.known.get(name).ok_or(io::ErrorKind::NotFound)?;
        Ok(addresses.split(' ').map(|address| address.parse().unwrap()).collect())
    }

    fn is_own(&self, address: IpAddr) -> bool {
        address.is_loopback()
    }
}

/// A server that records the bytes it gets, answers each read once, and never closes.
struct Origin {
    port: u16,
    received: Arc<Mutex<Vec<u8>>>,
    connections: Arc<Mutex<usize>>,
}

const ANSWER: &str = "HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes";

impl Origin {
    fn start() -> Origin {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (received, connections): (Arc<Mutex<Vec<u8>>>, Arc<Mutex<usize>>) = Default::default();
        let origin = Origin {
            port: listener.local_addr().unwrap().port(),
            received: Arc::clone(&received),
            connections: Arc::clone(&connections),
        };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                *connections.lock() += 1;
                let (mut stream, received) = (stream.unwrap(), Arc::clone(&received));
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(len @ 1..) = stream.read(&mut bytes) {
                        received.lock().extend(&bytes[..len]);
                        if stream.write_all(ANSWER.as_bytes()).is_err() {
                            break;
                        }
                    }
                });
            }
        });
        origin
    }

    fn received(&self) -> String {
        String::from_utf8_lossy(&self.received.lock()).into_owned()
    }
}

struct Bench {
    proxy: Proxy,
    address: SocketAddr,
    names: Names,
    printed: Arc<Mutex<Vec<String>>>,
}

/// A proxy with a list, in which `PORT` stands for the port of the origin.
fn bench_with(list: &str, origin: &Origin, limits: Limits) -> Bench {
    let names = Names {
        known: Arc::new(HashMap::from([
            ("listed.test", "127.0.0.1"),
            ("other.test", "127.0.0.1"),
            ("both.test", "203.0.113.1 127.0.0.1"),
            ("metadata.test", "169.254.169.254"),
            ("localhost", "127.0.0.1 ::1"),
        ])),
        ..Names::default()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let printed: Arc<Mutex<Vec<String>>> = Arc::default();
    let report = Arc::clone(&printed);
    let list = AllowList::parse(&list.replace("PORT", &origin.port.to_string())).unwrap();
    let report = Arc::new(move |text: &str| report.lock().push(text.to_owned()));
    let proxy = Proxy::with(listener, list, report, Box::new(names.clone()), limits).unwrap();
    Bench { proxy, address, names, printed }
}

fn bench(list: &str, origin: &Origin) -> Bench {
    bench_with(list, origin, Limits::default())
}

impl Bench {
    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Sends a request, and reads until the end of the connection or for half a second.
    fn send(&self, bytes: impl AsRef<[u8]>) -> String {
        let mut stream = self.connect();
        stream.write_all(bytes.as_ref()).unwrap();
        until_quiet(&mut stream)
    }

    fn get(&self, authority: &str) -> String {
        self.send(format!("GET http://{authority}/path HTTP/1.1\r\nHost: {authority}\r\n\r\n"))
    }

    fn printed(self) -> (Vec<String>, String) {
        drop(self.proxy);
        let mut printed = std::mem::take(&mut *self.printed.lock());
        let last = printed.pop().unwrap_or_default();
        (printed, last)
    }
}

fn until_quiet(stream: &mut TcpStream) -> String {
    stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let (mut all, mut bytes) = (Vec::new(), [0; 4096]);
    while let Ok(len @ 1..) = stream.read(&mut bytes) {
        all.extend(&bytes[..len]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

/// Listed targets, written as clients write them.
#[test]
fn listed_hosts_are_reached_by_each_protocol() {
    let origin = Origin::start();
    let bench = bench("listed.test:PORT,127.0.0.1:PORT,localhost:PORT", &origin);
    let port = origin.port;
    for host in ["listed.test", "LISTED.test.", "127.0.0.1", "localhost"] {
        let answer = bench.get(&format!("{host}:{port}"));
        assert!(answer.ends_with("\r\n\r\nyes"), "{host}: {answer}");
        let connect = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\nEARLY");
        let answer = bench.send(connect);
        assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("yes"), "{host}: {answer}");
    }
    assert!(
        origin.received().contains("GET /path HTTP/1.1\r\n") && origin.received().contains("EARLY")
    );
    let (refusals, last) = bench.printed();
    assert_eq!((refusals.len(), last.as_str()), (0, ""));
}

/// Targets that are not listed, each with the reason, while the list has the same origin under
/// another name or port.
#[test]
fn unlisted_hosts_are_refused_and_never_connected_to() {
    let origin = Origin::start();
    let port = origin.port;
    for (list, host, says) in [
        ("example.org", format!("listed.test:{port}"), "is not in the list"),
        ("listed.test:PORT", format!("other.test:{port}"), "is not in the list"),
        ("listed.test:PORT", format!("sub.listed.test:{port}"), "is not in the list"),
        ("*.listed.test:PORT", format!("listed.test:{port}"), "is not in the list"),
        // An address, though a listed name resolves to it.
        ("listed.test:PORT", format!("127.0.0.1:{port}"), "is not in the list"),
        ("listed.test:PORT", format!("[::ffff:127.0.0.1]:{port}"), "is not in the list"),
        ("localhost:PORT", format!("127.0.0.1:{port}"), "is not in the list"),
        ("127.0.0.1:PORT", format!("localhost:{port}"), "is not in the list"),
        // Another port.
        ("listed.test,127.0.0.1", format!("listed.test:{port}"), "has no port"),
        ("localhost:1", format!("localhost:{port}"), "has no port"),
        // A listed name that resolves to the host or to the metadata service (DNS rebinding).
        ("listed.test:PORT", format!("listed.test:{port}"), "leads to 127.0.0.1"),
        ("listed.test:PORT,localhost:PORT", format!("listed.test:{port}"), "leads to 127.0.0.1"),
        ("listed.test:PORT,127.0.0.1:1", format!("listed.test:{port}"), "leads to 127.0.0.1"),
        ("*.test:PORT", format!("listed.test:{port}"), "leads to 127.0.0.1"),
        ("metadata.test", "metadata.test:80".to_owned(), "leads to 169.254.169.254"),
        ("both.test:PORT", format!("both.test:{port}"), "leads to 203.0.113.1"),
    ] {
        let bench = bench(list, &origin);
        let plain = bench.get(&host);
        let tunnel = bench.send(format!("CONNECT {host} HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n"));
        for answer in [plain, tunnel] {
            assert!(answer.starts_with("HTTP/1.1 403 Forbidden\r\n"), "{list}, {host}: {answer}");
            assert!(answer.contains(says), "{list}, {host}: {answer}");
        }
        if says.contains("is not in") {
            assert!(
                bench.names.asked.lock().is_empty(),
                "{host}: an unlisted name is not resolved"
            );
        }
        let (refusals, last) = bench.printed();
        let [printed] = refusals.as_slice() else {
            panic!("{refusals:?}: a name is reported once")
        };
        let name =
            if host.starts_with("[::ffff") { format!("127.0.0.1:{port}") } else { host.clone() };
        assert!(printed.contains(&name) && printed.contains(says), "{printed}");
        assert!(last.contains("refused in all 2 connections to 1 different"), "{last}");
    }
    assert_eq!(*origin.connections.lock(), 0);
}

#[test]
fn malformed_requests_are_refused_and_never_connected_to() {
    let origin = Origin::start();
    let port = origin.port;
    let bench = bench("localhost:PORT", &origin);
    let requests = [
        format!("CONNECT user@localhost:{port} HTTP/1.1\r\n\r\n"),
        format!("CONNECT localhost:{port}@evil.test:1 HTTP/1.1\r\n\r\n"),
        format!("CONNECT http://localhost:{port}/ HTTP/1.1\r\n\r\n"),
        format!("CONNECT localhost:0{port}0 HTTP/1.1\r\n\r\n"),
        "CONNECT localhost HTTP/1.1\r\n\r\n".to_owned(),
        format!("CONNECT  localhost:{port} HTTP/1.1\r\n\r\n"),
        format!("CONNECT 2130706433:{port} HTTP/1.1\r\n\r\n"),
        format!("CONNECT 127.1:{port} HTTP/1.1\r\n\r\n"),
        format!("CONNECT 0x7f.1:{port} HTTP/1.1\r\n\r\n"),
        format!("GET http://localhost:{port}/ HTTP/1.1\r\nHost: evil.test\r\n\r\n"),
        format!(
            "GET http://localhost:{port}/ HTTP/1.1\r\nHost: localhost:{port}\r\nHost: \
             evil.test\r\n\
             \r\n"
        ),
        format!(
            "GET http://user:word@localhost:{port}/ HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"
        ),
        format!("GET / HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"),
        format!("GET https://localhost:{port}/ HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"),
        "\r\n\r\n".to_owned(),
        "\x04\x01\0\x50\x7f\0\0\x01\0\r\n\r\n".to_owned(),
    ];
    for request in &requests {
        let answer = bench.send(request);
        assert!(answer.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{request:?}: {answer}");
    }
    assert_eq!(*origin.connections.lock(), 0);
    assert!(bench.names.asked.lock().is_empty());
}

/// The origin would answer a second request. It gets none, whatever follows the first.
#[test]
fn a_second_request_on_a_connection_never_reaches_the_origin() {
    let origin = Origin::start();
    let authority = format!("localhost:{}", origin.port);
    let bench = bench("localhost:PORT", &origin);
    let second = format!("GET http://{authority}/SECOND HTTP/1.1\r\nHost: evil.test\r\n\r\n");
    let first = |fields: &str, body: &str| {
        format!("POST http://{authority}/first HTTP/1.1\r\nHost: {authority}\r\n{fields}\r\n{body}")
    };
    for request in [
        first("", ""),
        first("Content-Length: 4\r\n", "BODY"),
        first("Transfer-Encoding: chunked\r\n", "4\r\nBODY\r\n0\r\n\r\n"),
    ] {
        // In one piece, and after the first answer.
        let answer = bench.send(format!("{request}{second}"));
        assert_eq!(answer.matches("yes").count(), 1, "{request:?}: {answer}");
        let mut stream = bench.connect();
        stream.write_all(request.as_bytes()).unwrap();
        assert!(until_quiet(&mut stream).ends_with("yes"));
        stream.write_all(second.as_bytes()).unwrap();
        assert_eq!(until_quiet(&mut stream), "");
    }
    // Ambiguous lengths, and malformed chunks.
    for request in [
        first("Content-Length: 4\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        first("Content-Length: 4\r\nContent-Length: 0\r\n", "BODY"),
        first("Transfer-Encoding: chunked\r\n", "0;x\r\n\r\n"),
        first("Transfer-Encoding: chunked\r\n", "0\nX\r\n\r\n"),
    ] {
        let answer = bench.send(format!("{request}{second}"));
        assert!(!answer.contains("yes"), "{request:?}: {answer}");
    }
    assert!(origin.received().contains("POST /first HTTP/1.1\r\n"));
    assert!(
        !origin.received().contains("SECOND") && !origin.received().contains("evil"),
        "{}",
        origin.received()
    );
}

fn socks(kind: u8, host: &[u8], port: u16) -> Vec<u8> {
    [&[5, 1, 0, 5, 1, 0, kind], host, &port.to_be_bytes(), b"DATA"].concat()
}

fn socks_name(name: &[u8], port: u16) -> Vec<u8> {
    socks(3, &[&[u8::try_from(name.len()).unwrap()], name].concat(), port)
}

#[test]
fn socks_is_judged_by_the_same_list() {
    let origin = Origin::start();
    let port = origin.port;
    let mut mapped = [0; 16];
    mapped[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]);
    let mut loopback = [0; 16];
    loopback[15] = 1;
    for (list, request, reply) in [
        ("localhost:PORT", socks_name(b"localhost", port), 0),
        ("127.0.0.1:PORT", socks_name(b"127.0.0.1", port), 0),
        ("127.0.0.1:PORT", socks(1, &[127, 0, 0, 1], port), 0),
        ("127.0.0.1:PORT", socks(4, &mapped, port), 0),
        ("localhost:PORT", socks_name(b"other.test", port), 2),
        ("localhost:PORT", socks_name(b"127.0.0.1", port), 2),
        ("localhost:PORT", socks(1, &[127, 0, 0, 1], port), 2),
        ("localhost:PORT", socks(4, &mapped, port), 2),
        ("localhost:PORT", socks(4, &loopback, port), 2),
        ("localhost:1", socks_name(b"localhost", port), 2),
        ("listed.test:PORT", socks_name(b"listed.test", port), 2),
        ("localhost:PORT", socks_name(b"2130706433", port), 2),
        ("localhost:PORT", socks_name(b"localhost\0.evil.test", port), 2),
        ("localhost:PORT", socks_name(b"\x1b[2Jlocalhost", port), 2),
        ("localhost:PORT", socks_name(b"", port), 2),
        ("localhost:PORT", socks_name(b"localhost", 0), 2),
        ("localhost:1", socks_name(b"localhost", 1), 5),
        ("nowhere.test:1", socks_name(b"nowhere.test", 1), 4),
        // BIND, UDP, and an unknown address type.
        (
            "localhost:PORT",
            [&[5, 1, 0, 5, 2, 0, 1, 127, 0, 0, 1], port.to_be_bytes().as_slice()].concat(),
            7,
        ),
        (
            "localhost:PORT",
            [&[5, 1, 0, 5, 3, 0, 1, 127, 0, 0, 1], port.to_be_bytes().as_slice()].concat(),
            7,
        ),
        ("localhost:PORT", vec![5, 1, 0, 5, 1, 0, 9], 8),
    ] {
        let before = *origin.connections.lock();
        let bench = bench(list, &origin);
        let answer = bench.send(&request);
        let bytes = answer.as_bytes();
        assert_eq!(
            bytes.get(..4),
            Some([5, 0, 5, reply].as_slice()),
            "{list}, {request:?}: {answer:?}"
        );
        assert_eq!(answer.ends_with("yes"), reply == 0, "{answer:?}");
        assert_eq!(
            *origin.connections.lock() - before,
            usize::from(reply == 0),
            "{list}, {request:?}"
        );
        let (refusals, _) = bench.printed();
        assert!(
            refusals.iter().all(|printed| printed.is_ascii() && !printed.contains(['\x1b', '\0'])),
            "{refusals:?}"
        );
    }
}

#[test]
fn a_socks_client_that_offers_only_a_password_is_refused() {
    let origin = Origin::start();
    let answer = bench("localhost:PORT", &origin).send([5, 1, 2]);
    assert!(
        answer.starts_with('\u{5}') && answer.len() > 1 && !answer.contains('\0'),
        "{answer:?}"
    );
}

#[test]
fn the_resources_of_a_command_are_bounded() {
    let origin = Origin::start();
    let limits = Limits {
        connections: 3,
        request: Duration::from_millis(700),
        printed: 2,
        ..Limits::default()
    };
    let bench = bench_with("localhost:PORT", &origin, limits);
    // A head without an end.
    let long =
        format!("GET http://localhost:{}/ HTTP/1.1\r\nA: {}", origin.port, "x".repeat(64 << 10));
    let answer = bench.send(long);
    assert!(answer.starts_with("HTTP/1.1 431 "), "{answer}");
    // A request that arrives byte by byte ends at its deadline, not at its last byte.
    let start = Instant::now();
    let mut slow = bench.connect();
    let mut sent = 0;
    while start.elapsed() < PATIENCE && slow.write_all(b"G").is_ok() {
        sent += 1;
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{sent} bytes");
    // Three silent clients, and a fourth.
    std::thread::sleep(Duration::from_millis(1200));
    let idle: Vec<TcpStream> = (0..3).map(|_| bench.connect()).collect();
    std::thread::sleep(Duration::from_millis(200));
    let answer = until_quiet(&mut bench.connect());
    assert!(answer.starts_with("HTTP/1.1 503 "), "{answer}");
    drop(idle);
    // The proxy notices a closed connection in its own time.
    let answer = |host: String| {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let answer = bench.get(&host);
            if !answer.starts_with("HTTP/1.1 503 ") || Instant::now() > until {
                return answer;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    for name in ["a", "b", "c", "c", "d"] {
        let answer = answer(format!("{name}.test:1"));
        assert!(answer.starts_with("HTTP/1.1 403 "), "{answer}");
    }
    let (refusals, last) = bench.printed();
    let named = refusals.iter().filter(|printed| printed.contains(".test:1: ")).count();
    assert_eq!((named, refusals.len()), (2, 4), "{refusals:?}");
    assert!(last.contains("refused in all 5 connections to 2 or more different"), "{last}");
}

/// The command cannot delay the end of a run: not by tunnels, silence, or a resolver that does not
/// answer.
#[test]
fn the_proxy_ends_with_the_command() {
    let origin = Origin::start();
    let bench = bench("localhost:PORT,slow.test", &origin);
    let mut tunnel = bench.connect();
    tunnel
        .write_all(format!("CONNECT localhost:{} HTTP/1.1\r\n\r\n", origin.port).as_bytes())
        .unwrap();
    assert!(until_quiet(&mut tunnel).starts_with("HTTP/1.1 200 "));
    let silent = bench.connect();
    let mut unresolved = bench.connect();
    unresolved.write_all(b"CONNECT slow.test:80 HTTP/1.1\r\n\r\n").unwrap();
    while !bench.names.asked.lock().iter().any(|name| name == "slow.test") {
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    drop(bench.proxy);
    assert!(start.elapsed() < Duration::from_millis(1900), "{:?}", start.elapsed());
    tunnel.set_read_timeout(Some(PATIENCE)).unwrap();
    assert!(matches!(tunnel.read(&mut [0]), Ok(0) | Err(_)), "the tunnel is closed");
    assert!(TcpStream::connect(bench.address).is_err(), "the proxy no longer accepts");
    drop(silent);
}

#[test]
fn a_tunnel_carries_all_bytes_and_both_ends() {
    const LEN: usize = 8 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let echo = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let copied = io::copy(&mut &stream, &mut &stream).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        copied
    });
    let origin = Origin { port, received: Arc::default(), connections: Arc::default() };
    let bench = bench("localhost:PORT", &origin);
    let stream = bench.connect();
    (&stream).write_all(format!("CONNECT localhost:{port} HTTP/1.1\r\n\r\n").as_bytes()).unwrap();
    let mut head = [0; 39];
    (&stream).read_exact(&mut head).unwrap();
    assert!(head.ends_with(b"\r\n\r\n"));
    let sent: Vec<u8> = (0..LEN).map(|at| u8::try_from(at * 31 % 251).unwrap()).collect();
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (&stream).write_all(&sent).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
        });
        (&stream).read_to_end(&mut got).unwrap();
    });
    assert!(got == sent, "{} bytes of {LEN}", got.len());
    assert_eq!(echo.join().unwrap(), LEN as u64);
}
