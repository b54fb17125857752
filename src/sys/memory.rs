//! Memory that this process has freed, and still has.
//!
//! glibc keeps what is freed between what is still used, for the next one who asks its thread's arena for some. A daemon that reads
//! the trees of old states one after another, on threads that come and go, would keep several times what it uses.

/// Parts of the memory of this process, at most; by itself glibc makes one for each thread, up to eight for each CPU.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 2;
/// Freed bytes that are kept for the next one who asks.
const SPARE: u32 = 16 << 20;

/// From now on all threads share few arenas (mallopt(3)), so that what one of them frees serves the others. For the beginning of a
/// process. Nothing is done with another C library than glibc.
pub fn share_arenas() {
    // SAFETY: mallopt(3) takes two numbers and sets one of the allocator's own.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Gives freed memory back to the system (malloc_trim(3)) where there is much of it: more than 16 MiB, and more than a quarter of what
/// is used. Others who allocate wait meanwhile, for some milliseconds. Nothing is done with another C library than glibc. Gives whether
/// there was anything to give.
pub fn give_back() -> bool {
    #[cfg(target_env = "gnu")]
    {
        // mallinfo2(3) came with glibc 2.33. This one counts to 4 GiB and begins anew, and only when it is given back depends on it.
        // SAFETY: mallinfo(3) takes nothing, gives numbers, and may be called from any thread.
        let about = unsafe { libc::mallinfo() };
        let (free, used) = (about.fordblks.cast_unsigned(), about.uordblks.cast_unsigned());
        if free <= SPARE.max(used / 4) {
            return false;
        }
        // SAFETY: malloc_trim(3) touches only memory that nobody uses, and may be called from any thread.
        unsafe { libc::malloc_trim(0) == 1 }
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

#[cfg(all(test, target_env = "gnu"))]
mod tests {
    use super::*;

    #[test]
    fn freed_memory_goes_back_also_from_between_what_is_used() {
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
            line.trim_end_matches("kB").trim().parse::<usize>().unwrap() << 10
        };
        // Small pieces: the large ones have mappings of their own.
        let mut pieces: Vec<Option<Vec<u8>>> = (0..32_768).map(|_| Some(vec![1; 4000])).collect();
        let before = resident();
        pieces.iter_mut().enumerate().filter(|(at, _)| at % 64 != 0).for_each(|(_, piece)| *piece = None);
        assert!(give_back());
        let after = resident();
        assert!(after + (64 << 20) < before, "{before} bytes before, {after} after");
        assert_eq!(pieces.iter().flatten().count(), 512);
    }
}
