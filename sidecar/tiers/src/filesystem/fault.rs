//! Errors of the folder.

use crate::{Cause, Kind, TierError, files};
use std::io;

/// The error of a system call: the step, and the file it concerns.
pub fn failed(step: &str, what: &str, error: impl Into<io::Error>) -> TierError {
    let denied =
        "the sidecar's user must be allowed to read and write the folder and what is in it";
    files::fault::failed(Kind::FileSystem, step, what, &error.into(), denied)
}

pub fn missing(path: &str) -> TierError {
    TierError::new(
        Kind::FileSystem,
        Cause::Missing,
        "the object does not exist",
    )
    .about(path)
}

pub fn busy() -> TierError {
    let detail = "too many operations wait for the file system tier's threads";
    TierError::new(Kind::FileSystem, Cause::Busy, detail)
}

/// The result of an operation after the tier was closed.
pub fn closed() -> TierError {
    TierError::new(Kind::FileSystem, Cause::Gone, "the tier was closed")
}
