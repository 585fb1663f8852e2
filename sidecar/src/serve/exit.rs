//! Ending the engine process.
#![allow(unsafe_code)]

/// Ends the process without cleanup. Threads may be inside a long system call or a driver whose shutdown would block or fail. They
/// need no orderly end: everything that others need is already written.
pub fn now(code: i32) -> ! {
    // SAFETY: `_exit` ends the process and runs no code of it.
    unsafe { libc::_exit(code) }
}
