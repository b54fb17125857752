//! Returns freed memory to the system.
//!
//! glibc keeps freed memory that lies between used blocks, for later allocations of the same arena.
//! A daemon that loads the trees of old states on short-lived threads would keep several times the
//! memory that it uses.

/// The most arenas of this process. By default glibc creates one per thread, up to eight per CPU.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;
/// Larger blocks get mappings of their own, in bytes. The buffer of a FUSE session has 16 MiB, of
/// which most is never touched. By default glibc raises this limit when such a block is freed. It
/// then takes the next ones from an arena, and writes zeros into them.
#[cfg(target_env = "gnu")]
const LARGE: i32 = 8 << 20;
/// Freed bytes that are kept for later allocations.
const SPARE: u32 = 16 << 20;

/// Makes all threads share few arenas (mallopt(3)), so that memory freed by one serves the others,
/// and gives large blocks mappings of their own. To be called when a process starts. Does nothing
/// with a C library other than glibc.
pub fn share_arenas() {
    // SAFETY: mallopt(3) takes two numbers and sets one of the allocator's own.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        // Setting the one limit fixes the other, which would be small.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 2 * LARGE);
    }
}

/// Returns freed memory to the system (malloc_trim(3)) if there is much of it: more than 16 MiB,
/// and more than a quarter of the used memory. Other threads that allocate wait some milliseconds
/// meanwhile. Does nothing with a C library other than glibc. Returns whether there was any.
pub fn trim() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // mallinfo2(3) needs glibc 2.33. mallinfo(3) wraps at 4 GiB, which only affects the moment
        // of the trim. SAFETY: mallinfo(3) takes nothing, returns numbers, and may be called from
        // any thread.
        let about = unsafe { libc::mallinfo() };
        let (free, used) = (about.fordblks.cast_unsigned(), about.uordblks.cast_unsigned());
        if free <= SPARE.max(used / 4) {
            return false;
        }
        // SAFETY: malloc_trim(3) touches only freed memory and may be called from any thread.
        unsafe { libc::malloc_trim(0) == 1 }
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_between_used_blocks_returns_to_the_system() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.trim_end_matches("kB").trim().parse::<usize>().unwrap() << 10
        };
        // Small blocks: large ones have their own mappings.
        let mut pieces: Vec<Option<Vec<u8>>> = (0..32_768).map(|_| Some(vec![1; 4000])).collect();
        let before = resident();
        pieces
            .iter_mut()
            .enumerate()
            .filter(|(at, _)| at % 64 != 0)
            .for_each(|(_, piece)| *piece = None);
        assert!(trim());
        let after = resident();
        assert!(after + (64 << 20) < before, "{before} bytes before, {after} after");
        assert_eq!(pieces.iter().flatten().count(), 512);
    }
}
