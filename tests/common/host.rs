//! Snapshots of a directory on the host.

use std::path::Path;
use std::process::Command;

/// Everything that the host shows of a directory, except inode numbers and change times, which no
/// apply can restore.
pub fn host(base: &Path) -> String {
    let script = "find . -printf '%p %y %m %U %G %T@ %s %l\\n' | grep -v '^\\. ' | sort
        find . -type f | sort | xargs -r md5sum; getfattr -RPhd . 2>/dev/null";
    let output = Command::new("sh").arg("-euc").arg(script).current_dir(base).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}
