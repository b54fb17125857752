//! What is answered of a link while the kernel may still see the directory above it where it was.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::blocked::{Blocked, Opening, waits_in_the_kernel};
use crate::harness::Live;

/// By its former place the link would lead out. That the kernel is through with the move is seen by the lock of the directory into
/// which it went; somebody who lists that directory has it, too.
#[test]
fn a_link_is_answered_when_the_directory_into_which_it_moved_is_free() {
    let live = Live::new("echo inside > f; mkdir -p a/b x/y; ln -s ../../f a/l; ls x x/y");
    let mut inside = live.puppet("a/b");
    live.sh("mv a x/a");
    let dir = File::options().read(true).open(live.mnt.join("x")).unwrap();
    let blocked = Blocked::new();
    let answered = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let opening = Opening(&blocked);
        let lister = scope.spawn(|| blocked.list(&dir));
        blocked.wait();
        let reader = scope.spawn(|| {
            let read = std::fs::read_to_string(live.mnt.join("x/a/l"));
            answered.store(true, Ordering::SeqCst);
            read
        });
        let end = Instant::now() + Duration::from_secs(60);
        while !waits_in_the_kernel(live.pid()) {
            assert!(!answered.load(Ordering::SeqCst), "answered while the directory was locked");
            assert!(Instant::now() < end, "nobody waits for the lock");
        }
        assert!(!answered.load(Ordering::SeqCst), "answered while the directory was locked");
        drop(opening);
        assert!(lister.join().unwrap() > 0);
        assert_eq!(reader.join().unwrap().unwrap(), "inside\n");
    });
    // Who stands in what was moved goes on there: the kernel was not told to let go of it.
    inside.gives("os.getcwd().endswith('/x/a/b')", "True");
    inside.gives("read('../../../f')", "b'inside\\n'");
}
