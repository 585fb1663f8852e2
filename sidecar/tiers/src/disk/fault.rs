//! What the operating system said, as causes.

use crate::{Cause, Kind, TierError};
use rustix::io::Errno;
use std::io;

/// Whose fault an error of a system call is.
pub fn cause(error: &io::Error) -> Cause {
    match Errno::from_io_error(error) {
        // A file size limit of the process is full like a disk is.
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Cause::Full,
        Some(Errno::ROFS) => Cause::ReadOnly,
        Some(Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::NODEV) => Cause::Gone,
        Some(Errno::ACCESS | Errno::PERM) => Cause::Denied,
        // Nothing is wrong with the folder.
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Cause::Busy,
        _ => Cause::Io,
    }
}

/// An error of a system call: what was being done, and to what.
pub fn failed(step: &str, what: &str, error: impl Into<io::Error>) -> TierError {
    let error = error.into();
    let cause = cause(&error);
    let advice = match cause {
        Cause::Full => "; make room on its file system, or give the tier less capacity",
        Cause::ReadOnly => "; mount it writable",
        Cause::Gone => "; the folder must be there, and stay there",
        Cause::Denied => "; the folder must belong to the sidecar's user",
        Cause::Busy => "; raise the limits of open files and memory",
        _ => "; look at the device and the kernel's log",
    };
    TierError::new(Kind::Disk, cause, format!("{step} {what}: {error}{advice}"))
}

/// What is said of an operation that came, or ended, after the tier did.
pub fn closed() -> TierError {
    TierError::new(Kind::Disk, Cause::Gone, "the tier was closed")
}

/// Does it say that the folder cannot be used, not only one operation?
pub fn of_the_folder(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::Io | Cause::ReadOnly | Cause::Gone | Cause::Denied
    )
}
