//! READLINK while the kernel may still resolve the link through the former place of its directory.

use std::fs::File;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::blocked::{Blocked, Opening, waits_in_the_kernel};
use crate::harness::Live;

/// From the former place the link would lead out. The lock of the new parent directory shows when
/// the kernel has finished the rename; a process that lists that directory holds the same lock.
#[test]
fn a_link_is_answered_when_the_new_parent_directory_is_unlocked() {
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
            assert!(Instant::now() < end, "no thread waits for the lock");
        }
        assert!(!answered.load(Ordering::SeqCst), "answered while the directory was locked");
        drop(opening);
        assert!(lister.join().unwrap() > 0);
        assert_eq!(reader.join().unwrap().unwrap(), "inside\n");
    });
    // A process in the moved directory goes on there: the dentry was not invalidated.
    inside.gives("os.getcwd().endswith('/x/a/b')", "True");
    inside.gives("read('../../../f')", "b'inside\\n'");
}
