//! Maps errors of the operating system to causes.

use crate::{Cause, Kind, TierError};
use rustix::io::Errno;
use std::io;

/// Cause of a system call's error.
pub fn cause(error: &io::Error) -> Cause {
    match Errno::from_io_error(error) {
        // A file size limit of the process is handled like a full disk.
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Cause::Full,
        Some(Errno::ROFS) => Cause::ReadOnly,
        Some(Errno::NOENT | Errno::STALE | Errno::NOTDIR | Errno::NODEV) => Cause::Gone,
        Some(Errno::ACCESS | Errno::PERM) => Cause::Denied,
        // The folder itself is in order.
        Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Cause::Busy,
        _ => Cause::Io,
    }
}

/// The error of a system call: the step, and the file it concerns.
pub fn failed(step: &str, what: &str, error: impl Into<io::Error>) -> TierError {
    let error = error.into();
    let cause = cause(&error);
    let advice = match cause {
        Cause::Full => "; free space on its file system, or reduce the tier's capacity",
        Cause::ReadOnly => "; mount it read-write",
        Cause::Gone => "; the folder must exist as long as the sidecar runs",
        Cause::Denied => "; the sidecar's user must own the folder",
        Cause::Busy => "; raise the limits of open files and memory",
        _ => "; check the device and the kernel log",
    };
    TierError::new(
        Kind::Disk,
        cause,
        format!("cannot {step} {what}: {error}{advice}"),
    )
}

/// The result of an operation after the tier was closed.
pub fn closed() -> TierError {
    TierError::new(Kind::Disk, Cause::Gone, "the tier was closed")
}

/// Whether a cause concerns the whole folder, and not only one operation.
pub fn of_the_folder(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::Io | Cause::ReadOnly | Cause::Gone | Cause::Denied
    )
}
