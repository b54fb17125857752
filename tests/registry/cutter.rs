//! A TCP proxy on the loopback that cuts connections.
//!
//! The client sends one request after the other. So a request begins where a piece of bytes from
//! the client begins with the name of a method.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Where a request is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The registry does not see it.
    Before,
    /// The registry sees its first bytes, which may be all of it.
    During,
    /// The client does not see the answer.
    After,
}

#[derive(Default)]
struct Plan {
    /// The requests until now.
    requests: u64,
    /// The request that is cut, and where.
    request: Option<(u64, Cut)>,
    /// From this request on, all are dropped, or their answers if the second is true.
    wall: Option<(u64, bool)>,
    /// The bytes that were passed on in both directions.
    bytes: u64,
    /// So many connections are still cut after some bytes.
    connections: u32,
    random: u64,
    cuts: u32,
}

/// The proxy. It stops when it is dropped.
pub struct Cutter {
    pub address: String,
    plan: Arc<Mutex<Plan>>,
    is_over: Arc<AtomicBool>,
}

impl Cutter {
    /// A proxy to `target`, which cuts nothing yet.
    pub fn start(target: &str) -> Cutter {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (plan, is_over) = (Arc::<Mutex<Plan>>::default(), Arc::new(AtomicBool::new(false)));
        let (shared, over, target) = (plan.clone(), is_over.clone(), target.to_owned());
        std::thread::spawn(move || {
            for client in listener.incoming() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(server) = TcpStream::connect(&target) else { continue };
                connect(client.unwrap(), server, &shared);
            }
        });
        Cutter { address, plan, is_over }
    }

    /// Cuts the request with this number, counted from here, from 1.
    pub fn cut_request(&self, number: u64, cut: Cut) {
        let mut plan = self.plan.lock().unwrap();
        plan.requests = 0;
        plan.request = Some((number, cut));
    }

    /// Cuts this request and all that follow: before the registry sees the first of them, or before
    /// the client sees its answer.
    pub fn wall_at(&self, number: u64, is_answer: bool) {
        let mut plan = self.plan.lock().unwrap();
        plan.requests = 0;
        plan.wall = Some((number, is_answer));
    }

    /// Removes the wall. Returns whether a request has met it.
    pub fn remove_wall(&self) -> bool {
        let mut plan = self.plan.lock().unwrap();
        plan.wall.take().is_some_and(|(number, _)| plan.requests >= number)
    }

    /// Whether a request has met the wall.
    pub fn is_at_wall(&self) -> bool {
        let plan = self.plan.lock().unwrap();
        plan.wall.is_some_and(|(number, _)| plan.requests >= number)
    }

    /// The requests since the last call.
    pub fn take_requests(&self) -> u64 {
        std::mem::take(&mut self.plan.lock().unwrap().requests)
    }

    /// The bytes that were passed on since the last call.
    pub fn take_bytes(&self) -> u64 {
        std::mem::take(&mut self.plan.lock().unwrap().bytes)
    }

    /// Cuts so many of the next connections after a random number of bytes.
    pub fn cut_bytes(&self, seed: u64, connections: u32) {
        let mut plan = self.plan.lock().unwrap();
        plan.random = seed;
        plan.connections = connections;
    }

    /// The number of connections that were cut after some bytes.
    pub fn cuts(&self) -> u32 {
        self.plan.lock().unwrap().cuts
    }
}

impl Drop for Cutter {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        drop(TcpStream::connect(&self.address));
    }
}

impl Plan {
    /// The bytes after which the next connection is cut.
    fn next_budget(&mut self) -> Option<u64> {
        if self.connections == 0 {
            return None;
        }
        self.connections -= 1;
        for _ in 0..3 {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        }
        // Small numbers are as likely as large ones.
        let most = 1u64 << (8 + (self.random >> 60) % 11);
        Some((self.random >> 20) % most)
    }
}

/// The two directions of a connection share a budget of bytes.
type Budget = Arc<Mutex<Option<u64>>>;

fn connect(client: TcpStream, server: TcpStream, plan: &Arc<Mutex<Plan>>) {
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let budget: Budget = Arc::new(Mutex::new(plan.lock().unwrap().next_budget()));
    let drops_answer = Arc::new(AtomicBool::new(false));
    let both = [client.try_clone().unwrap(), server.try_clone().unwrap()];
    let (shared, answers, left) = (plan.clone(), drops_answer.clone(), budget.clone());
    let (from, to) = (client.try_clone().unwrap(), server.try_clone().unwrap());
    std::thread::spawn(move || requests(from, to, &shared, &answers, &left));
    let plan = plan.clone();
    std::thread::spawn(move || {
        pump(server, client, &plan, &budget, |_| {
            if drops_answer.load(Ordering::SeqCst) { Piece::Drop } else { Piece::Pass }
        });
        both.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    });
}

/// The fate of some bytes.
enum Piece {
    Pass,
    PassAndCut,
    Drop,
}

fn requests(
    client: TcpStream,
    server: TcpStream,
    plan: &Mutex<Plan>,
    drops_answer: &AtomicBool,
    budget: &Budget,
) {
    let both = [client.try_clone().unwrap(), server.try_clone().unwrap()];
    pump(client, server, plan, budget, |bytes| {
        let methods: [&[u8]; 6] = [b"GET ", b"HEAD ", b"POST ", b"PUT ", b"PATCH ", b"DELETE "];
        if !methods.iter().any(|method| bytes.starts_with(method)) {
            return Piece::Pass;
        }
        let mut plan = plan.lock().unwrap();
        plan.requests += 1;
        if let Some((number, is_answer)) = plan.wall
            && plan.requests >= number
        {
            if is_answer && plan.requests == number {
                drops_answer.store(true, Ordering::SeqCst);
                return Piece::Pass;
            }
            return Piece::Drop;
        }
        match plan.request {
            Some((number, cut)) if number == plan.requests => {
                plan.request = None;
                match cut {
                    Cut::Before => Piece::Drop,
                    Cut::During => {
                        drops_answer.store(true, Ordering::SeqCst);
                        Piece::PassAndCut
                    }
                    Cut::After => {
                        drops_answer.store(true, Ordering::SeqCst);
                        Piece::Pass
                    }
                }
            }
            _ => Piece::Pass,
        }
    });
    both.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
}

/// Moves bytes until an end, an error or a cut.
fn pump(
    mut from: TcpStream,
    mut to: TcpStream,
    plan: &Mutex<Plan>,
    budget: &Budget,
    mut decide: impl FnMut(&[u8]) -> Piece,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let read = match from.read(&mut buffer) {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        let piece = decide(&buffer[..read]);
        if matches!(piece, Piece::Drop) {
            return;
        }
        let allowed = {
            let mut budget = budget.lock().unwrap();
            match &mut *budget {
                Some(left) => {
                    let allowed = (*left).min(read as u64);
                    *left -= allowed;
                    allowed as usize
                }
                None => read,
            }
        };
        let is_sent = to.write_all(&buffer[..allowed]).is_ok();
        plan.lock().unwrap().bytes += allowed as u64;
        if allowed < read {
            plan.lock().unwrap().cuts += 1;
            return;
        }
        if !is_sent || matches!(piece, Piece::PassAndCut) {
            return;
        }
    }
}
