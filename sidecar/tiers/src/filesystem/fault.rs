//! Errors of the folder.

use crate::{Kind, TierError, files};
use std::io;

/// The error of a system call: the step, and the file it concerns.
pub fn failed(step: &str, what: &str, error: impl Into<io::Error>) -> TierError {
    let denied =
        "the sidecar's user must be allowed to read and write the folder and what is in it";
    files::fault::failed(Kind::FileSystem, step, what, &error.into(), denied)
}
