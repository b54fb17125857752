//! Counts the kernel's messages by operation. Messages are the unit of cost here, so tests and
//! `status` report them.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! operations {
    ($($variant:ident $name:literal,)*) => {
        /// An operation of the protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Op {
            $(#[doc = $name] $variant,)*
        }

        const NAMES: &[&str] = &[$($name,)*];

        impl Op {
            /// Its name in logs and counts.
            pub(super) fn name(self) -> &'static str {
                match self {
                    $(Op::$variant => $name,)*
                }
            }
        }
    };
}

operations! {
    Lookup "lookup",
    Forget "forget",
    Getattr "getattr",
    Setattr "setattr",
    Readlink "readlink",
    Mknod "mknod",
    Mkdir "mkdir",
    Unlink "unlink",
    Rmdir "rmdir",
    Symlink "symlink",
    Rename "rename",
    Link "link",
    Open "open",
    Read "read",
    Write "write",
    Flush "flush",
    Release "release",
    Fsync "fsync",
    Opendir "opendir",
    Readdir "readdir",
    Releasedir "releasedir",
    Fsyncdir "fsyncdir",
    Statfs "statfs",
    Setxattr "setxattr",
    Getxattr "getxattr",
    Listxattr "listxattr",
    Removexattr "removexattr",
    Access "access",
    Create "create",
    Locks "locks",
    Bmap "bmap",
    Ioctl "ioctl",
    Poll "poll",
    Fallocate "fallocate",
    Lseek "lseek",
    CopyFileRange "copy_file_range",
    Readdirplus "readdirplus",
    Tmpfile "tmpfile",
}

/// Messages from the kernel since the mount, by operation.
#[derive(Debug)]
pub struct Counters {
    counts: [AtomicU64; NAMES.len()],
}

impl Default for Counters {
    fn default() -> Counters {
        Counters { counts: [const { AtomicU64::new(0) }; NAMES.len()] }
    }
}

impl Counters {
    pub(super) fn count(&self, op: Op) {
        if let Some(count) = self.counts.get(op as usize) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The name of each operation and its count.
    pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
        NAMES
            .iter()
            .zip(&self.counts)
            .map(|(name, count)| (*name, count.load(Ordering::Relaxed)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_operation_is_counted_under_its_name() {
        let counters = Counters::default();
        counters.count(Op::Lookup);
        counters.count(Op::CopyFileRange);
        counters.count(Op::CopyFileRange);
        let counted: Vec<_> = counters.snapshot().into_iter().filter(|(_, n)| *n > 0).collect();
        assert_eq!(counted, [(Op::Lookup.name(), 1), ("copy_file_range", 2)]);
    }
}
