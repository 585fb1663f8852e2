//! The end of the engine's process.
#![allow(unsafe_code)]

/// Ends the process as it is. Threads may be inside a long system call, or inside a driver whose own end would wait for them or fail over
/// them: nothing of theirs needs an orderly end, and everything that others must have was written before.
pub fn now(code: i32) -> ! {
    // SAFETY: it ends the process, and runs nothing of it before.
    unsafe { libc::_exit(code) }
}
