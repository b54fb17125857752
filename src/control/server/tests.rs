use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use super::super::{Message, Mounts, connect};
use super::*;
use crate::sandbox::{Reply, Request};
use crate::types::TreePath;

fn echo(call: Call, peer: Peer) -> Result<Answered> {
    assert!(!peer.is_inside && peer.pid == std::process::id());
    let reply = match call.message {
        Message::Mounts => {
            let meant = call.head.unwrap_or_default();
            return Ok(Answer::Mounts(Mounts { meant, heads: Vec::new(), can_race: true }).into());
        }
        Message::Request(Request::Discard { .. }) => Reply::Done,
        Message::Request(Request::Log) => Reply::Log(Vec::new()),
        other => return Err(Error::new(Kind::Conflict, "test", format!("{other:?}")).hint("none")),
    };
    Ok(Answer::Reply(Box::new(reply)).into())
}

fn serve(store: &Path) -> Server {
    Listener::bind(store).unwrap().serve(Greeting::of_this_process(), || Box::new(echo)).unwrap()
}

fn raw(store: &Path) -> UnixStream {
    let stream = UnixStream::connect(store.join(SOCKET)).unwrap();
    frame::read(&mut &stream, MAX_GREETING).unwrap();
    stream
}

#[test]
fn replies_and_errors_reach_the_client() {
    let store = tempfile::tempdir().unwrap();
    let server = serve(store.path());
    let mut client = connect(store.path()).unwrap().unwrap();
    assert_eq!(client.greeting().pid, std::process::id());
    assert_eq!(client.mounts().unwrap().meant, "");
    client.set_head(Some("try".to_owned()));
    assert_eq!(client.mounts().unwrap().meant, "try");
    assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
    let paths = vec![TreePath::parse(b"a\xff").unwrap()];
    let error = client
        .call(&Request::Apply { paths, dry_run: true, undo: false, consent: Default::default() })
        .unwrap_err();
    assert_eq!((error.kind, error.hint.as_deref()), (Kind::Conflict, Some("none")));
    assert_eq!(client.call(&Request::Discard { detach_mounts: false }), Ok(Reply::Done));
    server.stop();
    assert!(connect(store.path()).unwrap().is_none());
}

#[test]
fn the_socket_is_private_and_a_dead_one_is_replaced() {
    let store = tempfile::tempdir().unwrap();
    assert!(connect(store.path()).unwrap().is_none());
    assert!(connect(&store.path().join("missing")).unwrap().is_none());
    // The socket of a process that died without unlinking it.
    drop(UnixListener::bind(store.path().join(SOCKET)).unwrap());
    assert!(connect(store.path()).unwrap().is_none());
    let server = serve(store.path());
    let meta = std::fs::symlink_metadata(store.path().join(SOCKET)).unwrap();
    assert_eq!(meta.permissions().mode() & 0o7777, 0o600);
    assert_eq!(meta.uid(), geteuid().as_raw());
    assert!(connect(store.path()).unwrap().is_some());
    drop(server);
    assert!(!store.path().join(SOCKET).exists());
}

#[test]
fn a_store_path_may_exceed_the_length_of_a_socket_address() {
    let top = tempfile::tempdir().unwrap();
    let store = top.path().join("d".repeat(200)).join("e".repeat(200));
    std::fs::create_dir_all(&store).unwrap();
    let server = serve(&store);
    let mut client = connect(&store).unwrap().unwrap();
    assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
    server.stop();
}

#[test]
fn a_malformed_message_ends_its_own_connection_only() {
    let store = tempfile::tempdir().unwrap();
    let _server = serve(store.path());
    let junk: [&[u8]; 4] = [
        &[0xff; 64],                     // a length above the limit
        &[3, 0, 0, 0, 0xff, 0xff, 0xff], // no request
        &[2, 0, 0, 0, 1, 0],             // a request, and bytes left over
        &[0, 0, 0, 0],                   // an empty payload
    ];
    for bytes in junk {
        let mut stream = raw(store.path());
        stream.write_all(bytes).unwrap();
        let reply = frame::read(&mut stream, MAX_REPLY).unwrap();
        assert!(codec::decode::<Result<Answer>>(&reply).unwrap().is_err(), "{bytes:?}");
        // With unread junk in its queue the socket ends with ECONNRESET, otherwise with a
        // normal end.
        assert!(matches!(stream.read(&mut [0; 9]), Ok(0) | Err(_)), "{bytes:?}");
    }
    assert!(connect(store.path()).unwrap().unwrap().call(&Request::Log).is_ok());
}

#[test]
fn a_request_must_arrive_in_time_even_byte_by_byte() {
    let store = tempfile::tempdir().unwrap();
    let mut listener = Listener::bind(store.path()).unwrap();
    listener.request_limit = Duration::from_millis(200);
    let _server = listener.serve(Greeting::of_this_process(), || Box::new(echo)).unwrap();
    let mut stream = raw(store.path());
    let writer = stream.try_clone().unwrap();
    let dribble = thread::spawn(move || {
        for byte in [100u8, 0, 0, 0].into_iter().chain([0; 96]) {
            if (&writer).write_all(&[byte]).is_err() {
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    });
    let reply = frame::read(&mut stream, MAX_REPLY).unwrap();
    let error = codec::decode::<Result<Answer>>(&reply).unwrap().unwrap_err();
    assert_eq!(error.reason, "timed out");
    dribble.join().unwrap();
}

#[test]
fn a_client_may_pause_between_requests() {
    let store = tempfile::tempdir().unwrap();
    let mut listener = Listener::bind(store.path()).unwrap();
    listener.request_limit = Duration::from_millis(50);
    let _server = listener.serve(Greeting::of_this_process(), || Box::new(echo)).unwrap();
    let mut client = connect(store.path()).unwrap().unwrap();
    for _ in 0..3 {
        assert_eq!(client.call(&Request::Log), Ok(Reply::Log(Vec::new())));
        thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn only_its_user_and_root_may_talk_to_a_daemon() {
    assert!(is_served(1000, 1000) && is_served(0, 1000) && is_served(0, 0));
    assert!(!is_served(1001, 1000) && !is_served(1000, 0) && !is_served(65534, 1000));
}

#[test]
fn the_number_of_connections_is_limited() {
    let store = tempfile::tempdir().unwrap();
    let _server = serve(store.path());
    let held: Vec<_> =
        (0..MAX_CONNECTIONS).map(|_| connect(store.path()).unwrap().unwrap()).collect();
    assert!(connect(store.path()).is_err());
    drop(held);
    let again = (0..100).any(|_| {
        thread::sleep(Duration::from_millis(20));
        connect(store.path()).is_ok()
    });
    assert!(again);
}

#[test]
fn the_client_of_an_unmount_waits_for_the_end_of_the_mount() {
    let store = tempfile::tempdir().unwrap();
    let mounts = [Arc::new(Waiting::default()), Arc::new(Waiting::default())];
    let of_handler = mounts.clone();
    let begin = move || {
        let of_handler = of_handler.clone();
        let answer = move |call: Call, _: Peer| {
            let at = usize::from(call.head.as_deref() == Some("try"));
            let closes_at = Some(of_handler[at].clone());
            Ok(Answered { answer: Answer::Reply(Box::new(Reply::Done)), closes_at })
        };
        Box::new(answer) as Box<dyn Conversation>
    };
    let listener = Listener::bind(store.path()).unwrap();
    let server = listener.serve(Greeting::of_this_process(), begin).unwrap();
    let unmount = |head: &str| {
        let mut client = connect(store.path()).unwrap().unwrap();
        client.set_head(Some(head.to_owned()));
        assert_eq!(client.call(&Request::Unmount), Ok(Reply::Done));
        thread::spawn(move || client.wait_for_end(Duration::from_secs(20)))
    };
    let (main, other) = (unmount("main"), unmount("try"));
    thread::sleep(Duration::from_millis(50));
    assert!(!main.is_finished() && !other.is_finished());
    // The end of one head tells its own clients only.
    mounts[1].end();
    assert!(other.join().unwrap());
    assert!(unmount("try").join().unwrap(), "a client that comes too late need not wait");
    assert!(!main.is_finished());
    server.stop();
    mounts[0].end();
    assert!(main.join().unwrap());
}

#[test]
fn a_client_waits_no_longer_than_it_wants() {
    let store = tempfile::tempdir().unwrap();
    let server = serve(store.path());
    let client = connect(store.path()).unwrap().unwrap();
    assert!(!client.wait_for_end(Duration::from_millis(50)));
    drop(server);
}
