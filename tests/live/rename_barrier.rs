//! READLINK while the kernel may still resolve the link through the former place of its directory.

use std::fs::File;
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
    std::thread::scope(|scope| {
        let opening = Opening(&blocked);
        let lister = scope.spawn(|| blocked.list(&dir));
        blocked.wait();
        let reader = scope.spawn(|| std::fs::read_to_string(live.mnt.join("x/a/l")));
        let end = Instant::now() + Duration::from_secs(60);
        while !waits_in_the_kernel(live.pid()) && !reader.is_finished() {
            assert!(Instant::now() < end, "no thread waits for the lock");
        }
        if reader.is_finished() {
            let listed = lister.is_finished();
            panic!("the listing has ended: {listed}, the link was read: {:?}", reader.join());
        }
        drop(opening);
        assert!(lister.join().unwrap() > 0);
        assert_eq!(reader.join().unwrap().unwrap(), "inside\n");
    });
    // A process in the moved directory goes on there: the dentry was not invalidated.
    inside.gives("os.getcwd().endswith('/x/a/b')", "True");
    inside.gives("read('../../../f')", "b'inside\\n'");
}
