//! An HTTP proxy on the loopback, which tunnels every CONNECT to one target.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// The proxy. It stops when it is dropped.
pub struct Tunnel {
    pub address: String,
    heads: Arc<Mutex<Vec<String>>>,
    is_over: Arc<AtomicBool>,
}

impl Tunnel {
    pub fn start(target: &str) -> Tunnel {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (heads, is_over) =
            (Arc::<Mutex<Vec<String>>>::default(), Arc::new(AtomicBool::new(false)));
        let (seen, over, target) = (heads.clone(), is_over.clone(), target.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                serve(client.unwrap(), &target, &seen);
            }
        });
        Tunnel { address, heads, is_over }
    }

    /// The heads of the requests until now.
    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(&self.address));
    }
}

/// Reads the head of a request, and moves bytes in both directions.
fn serve(client: TcpStream, target: &str, seen: &Mutex<Vec<String>>) {
    let mut reader = BufReader::new(client.try_clone().unwrap());
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).is_ok_and(|read| read > 0) {}
    seen.lock().unwrap().push(head);
    let server = TcpStream::connect(target).unwrap();
    let mut answer = client.try_clone().unwrap();
    answer.write_all(b"HTTP/1.1 200 Connection established\r\n\r\n").unwrap();
    let (mut up, mut down) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    std::thread::spawn(move || {
        drop(std::io::copy(&mut reader, &mut up));
        drop(up.shutdown(Shutdown::Both));
    });
    let mut server = server;
    std::thread::spawn(move || {
        drop(std::io::copy(&mut server, &mut down));
        drop(down.shutdown(Shutdown::Both));
    });
}
