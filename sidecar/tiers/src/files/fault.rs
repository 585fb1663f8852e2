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
        // Only file systems over a network have these.
        Some(
            Errno::TIMEDOUT
            | Errno::HOSTDOWN
            | Errno::HOSTUNREACH
            | Errno::NETUNREACH
            | Errno::CONNREFUSED
            | Errno::CONNRESET
            | Errno::NOTCONN,
        ) => Cause::Unreachable,
        _ => Cause::Io,
    }
}

/// The error of a system call: the step, and the file it concerns. `denied`: advice if the permission is missing.
pub fn failed(kind: Kind, step: &str, what: &str, error: &io::Error, denied: &str) -> TierError {
    let cause = cause(error);
    let advice = match cause {
        Cause::Full => "free space on its file system, or reduce the tier's capacity",
        Cause::ReadOnly => "mount it read-write",
        Cause::Gone => "the folder must exist as long as the sidecar runs",
        Cause::Denied => denied,
        Cause::Busy => "raise the limits of open files and memory",
        Cause::Unreachable => "check the network and the file server",
        _ => "check the device and the kernel log",
    };
    TierError::new(
        kind,
        cause,
        format!("cannot {step} {what}: {error}; {advice}"),
    )
}

pub fn missing(kind: Kind, path: &str) -> TierError {
    TierError::new(kind, Cause::Missing, "the object does not exist").about(path)
}

pub fn busy(kind: Kind) -> TierError {
    let detail = format!("too many operations wait for the {kind} tier's threads");
    TierError::new(kind, Cause::Busy, detail)
}

/// The result of an operation after the tier was closed.
pub fn closed(kind: Kind) -> TierError {
    TierError::new(kind, Cause::Gone, "the tier was closed")
}
