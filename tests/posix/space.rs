//! A full disk.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use nix::errno::Errno;

/// A small filesystem; unmounted at the end.
pub struct Small(tempfile::TempDir);

impl Small {
    pub fn new(size: &str) -> Small {
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size},mode=755");
        let none = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("small"), dir.path(), Some("tmpfs"), none, Some(&*options)).unwrap();
        Small(dir)
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _gone = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

/// A mount by the real binary, whose store is on a small disk.
struct OnSmall {
    dir: tempfile::TempDir,
    small: Small,
}

impl OnSmall {
    fn new(size: &str) -> OnSmall {
        let (dir, small) = (tempfile::tempdir().unwrap(), Small::new(size));
        fs::create_dir(dir.path().join("base")).unwrap();
        fs::write(dir.path().join("base/large"), vec![9; 4 << 20]).unwrap();
        fs::write(dir.path().join("base/other"), "other").unwrap();
        fs::create_dir(dir.path().join("mnt")).unwrap();
        let on = OnSmall { dir, small };
        on.mount();
        on
    }

    fn mnt(&self) -> std::path::PathBuf {
        self.dir.path().join("mnt")
    }

    fn jailfs(&self, words: &[&str]) -> std::process::Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_jailfs"));
        command.args(words).current_dir(self.dir.path()).output().unwrap()
    }

    fn mount(&self) {
        let store = self.small.path().join("store");
        let output = self.jailfs(&["mount", "base", "mnt", "--store", store.to_str().unwrap()]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    fn umount(&self) {
        let output = self.jailfs(&["umount", "mnt"]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for OnSmall {
    fn drop(&mut self) {
        drop(self.jailfs(&["umount", "--lazy", "mnt"]));
    }
}

#[test]
fn a_full_disk_gives_enospc_and_every_acknowledged_change_stays() {
    let on = OnSmall::new("3m");
    let mnt = on.mnt();
    fs::write(mnt.join("before"), "before").unwrap();
    // Writes of 4 KiB until the disk is full.
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(mnt.join("filling"))
        .unwrap();
    let mut written = 0_u64;
    let error = loop {
        match file.write_at(&[(written as u8).wrapping_add(1); 4096], written * 4096) {
            Ok(len) => assert_eq!(len, 4096),
            Err(error) => break error,
        }
        written += 1;
        assert!(written < 2000, "more than the disk has");
    };
    assert_eq!(error.raw_os_error(), Some(Errno::ENOSPC as i32));
    assert!(written > 100, "{written}");
    let check = |what: &str| {
        assert_eq!(fs::metadata(mnt.join("filling")).unwrap().len(), written * 4096, "{what}");
        let bytes = fs::read(mnt.join("filling")).unwrap();
        let right = bytes
            .chunks(4096)
            .zip(0_u64..)
            .all(|(block, n)| block.iter().all(|b| *b == (n as u8).wrapping_add(1)));
        assert!(right, "{what}: every answered write is there");
        assert_eq!(fs::read(mnt.join("before")).unwrap(), b"before", "{what}");
        assert_eq!(fs::read(mnt.join("large")).unwrap(), vec![9; 4 << 20], "{what}");
    };
    check("full");
    // Every change needs a record. It does not matter which changes still fit, but none may be half
    // done.
    let changed = OpenOptions::new()
        .write(true)
        .open(mnt.join("large"))
        .unwrap()
        .write_all_at(&[1; 65_536], 0);
    assert_eq!(changed.unwrap_err().raw_os_error(), Some(Errno::ENOSPC as i32));
    let mut made = 0;
    let errno = loop {
        match fs::File::create_new(mnt.join(format!("n{made}"))) {
            Ok(_) => made += 1,
            Err(error) => break error.raw_os_error(),
        }
        assert!(made < 100_000);
    };
    assert_eq!(errno, Some(Errno::ENOSPC as i32));
    check("full of records");
    let listed = || {
        fs::read_dir(&mnt)
            .unwrap()
            .filter(|e| e.as_ref().unwrap().path().to_str().unwrap().contains("/n"))
            .count()
    };
    assert_eq!(listed(), made);
    // The test frees space elsewhere: the waiting process goes on.
    let remount = format!("remount,size={}", 8 << 20);
    let status =
        Command::new("mount").args(["-o", &remount]).arg(on.small.path()).status().unwrap();
    assert!(status.success());
    OpenOptions::new()
        .append(true)
        .open(mnt.join("before"))
        .unwrap()
        .write_all(b" and after")
        .unwrap();
    assert_eq!(fs::read(mnt.join("before")).unwrap(), b"before and after");
    fs::write(mnt.join("before"), "before").unwrap();
    drop(file);
    check("with room again");
    on.umount();
    on.mount();
    check("after a remount");
    assert_eq!(listed(), made);
}
