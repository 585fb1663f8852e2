//! Errors of the folder.

pub use crate::files::fault::{cause, closed, missing};

use crate::{Cause, Kind, TierError, files};
use std::io;

/// The error of a system call: the step, and the file it concerns.
pub fn failed(step: &str, what: &str, error: impl Into<io::Error>) -> TierError {
    let denied = "the sidecar's user must own the folder";
    files::fault::failed(Kind::Disk, step, what, &error.into(), denied)
}

/// Whether a cause concerns the whole folder, and not only one operation.
pub fn of_the_folder(cause: Cause) -> bool {
    matches!(
        cause,
        Cause::Io | Cause::ReadOnly | Cause::Gone | Cause::Denied | Cause::Unreachable
    )
}
