//! A small HTTP server on the loopback. A handler answers each request.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// A request without its body.
#[derive(Clone, Debug)]
pub(super) struct Head {
    /// `GET`.
    pub(super) method: String,
    /// The path with the query.
    pub(super) path: String,
    /// The fields, by their names in lower case.
    fields: Vec<(String, String)>,
}

impl Head {
    pub(super) fn field(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    fn length(&self) -> u64 {
        self.field("content-length").map_or(0, |text| text.parse().unwrap())
    }
}

/// A connection whose next request has been read up to its body.
pub(super) struct Exchange {
    reader: BufReader<TcpStream>,
    left: u64,
}

impl Exchange {
    /// Reads some of the body. Zero: its end, or a cut.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let most = self.left.min(buffer.len() as u64) as usize;
        if most == 0 {
            // A BufReader waits for input even if it is asked for no byte.
            return 0;
        }
        let read = self.reader.read(&mut buffer[..most]).unwrap_or(0);
        self.left -= read as u64;
        read
    }

    /// Reads the rest of the body.
    pub(super) fn body(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            match self.read(&mut buffer) {
                0 => return body,
                read => body.extend(&buffer[..read]),
            }
        }
    }

    /// Writes raw bytes. False: the client is gone.
    pub(super) fn write(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        self.reader.get_mut().write_all(bytes.as_ref()).is_ok()
    }

    /// Answers with a status, fields and a body.
    pub(super) fn answer(&mut self, status: u16, fields: &[(&str, &str)], body: impl AsRef<[u8]>) {
        self.body();
        let body = body.as_ref();
        let mut head = format!("HTTP/1.1 {status} x\r\n");
        for (name, value) in fields {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !fields.iter().any(|(name, _)| *name == "content-length") && status != 204 {
            head.push_str(&format!("content-length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        self.write([head.as_bytes(), body].concat());
    }

    /// Ends the connection at once.
    pub(super) fn cut(&mut self) {
        drop(self.reader.get_mut().shutdown(Shutdown::Both));
    }
}

type Handler = dyn Fn(&Head, &mut Exchange) + Send + Sync;

/// The server. It stops when it is dropped.
pub(super) struct Server {
    address: SocketAddr,
    heads: Arc<Mutex<Vec<Head>>>,
    is_over: Arc<AtomicBool>,
}

impl Server {
    pub(super) fn new(handler: impl Fn(&Head, &mut Exchange) + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (heads, is_over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (seen, over) = (heads.clone(), is_over.clone());
        let handler: Arc<Handler> = Arc::new(handler);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let (handler, seen) = (handler.clone(), seen.clone());
                std::thread::spawn(move || serve(stream.unwrap(), &*handler, &seen));
            }
        });
        Server { address, heads, is_over }
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The requests until now.
    pub(super) fn heads(&self) -> Vec<Head> {
        self.heads.lock().unwrap().clone()
    }

    /// The requests until now, as `METHOD PATH`, without queries.
    pub(super) fn requests(&self) -> Vec<String> {
        let path = |head: &Head| head.path.split('?').next().unwrap().to_owned();
        self.heads().iter().map(|head| format!("{} {}", head.method, path(head))).collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(self.address));
    }
}

fn serve(stream: TcpStream, handler: &Handler, seen: &Mutex<Vec<Head>>) {
    stream.set_nodelay(true).unwrap();
    let mut exchange = Exchange { reader: BufReader::new(stream), left: 0 };
    while let Some(head) = read_head(&mut exchange.reader) {
        exchange.left = head.length();
        seen.lock().unwrap().push(head.clone());
        handler(&head, &mut exchange);
        if exchange.left > 0 {
            break;
        }
    }
}

fn read_head(reader: &mut BufReader<TcpStream>) -> Option<Head> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
    let mut words = line.split_whitespace();
    let (method, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut fields = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        match line.trim_end().split_once(": ") {
            Some((name, value)) => fields.push((name.to_ascii_lowercase(), value.to_owned())),
            None => return Some(Head { method, path, fields }),
        }
    }
}
