//! Removes objects, by their names. Blocks: for threads where that is allowed.

use super::Folder;
use super::fault::failed;
use super::object::Version;
use super::root::is_file;
use crate::{Removal, TierError};
use rustix::fs::{AtFlags, statat, unlinkat};
use rustix::io::Errno;

/// An object to remove.
#[derive(Debug, Clone)]
pub struct Doomed {
    path: String,
    /// Only the file that was read last under the name.
    as_read: bool,
}

/// What became of it.
#[derive(Debug)]
pub enum Ended {
    /// Removed, with its length.
    Removed(u64),
    /// It did not exist, or another object has its name.
    Absent,
    /// It cannot be removed, for a reason that may not concern others.
    Refused(TierError),
}

impl Doomed {
    pub fn of(removal: Removal<'_>) -> Vec<Self> {
        let as_read = matches!(removal, Removal::Unusable(_));
        let names = removal.names();
        let doomed = names.iter().map(|name| Self {
            path: name.s3(""),
            as_read,
        });
        doomed.collect()
    }
}

impl Ended {
    /// Length of a removed object.
    pub fn removed(&self) -> Option<u64> {
        match self {
            Self::Removed(bytes) => Some(*bytes),
            Self::Absent | Self::Refused(_) => None,
        }
    }
}

/// Number of removed objects; the first refusal is an error.
pub fn count(all: Vec<Ended>) -> Result<u64, TierError> {
    let mut count = 0;
    for ended in all {
        match ended {
            Ended::Removed(_) => count += 1,
            Ended::Absent => {}
            Ended::Refused(e) => return Err(e),
        }
    }
    Ok(count)
}

impl Folder {
    pub fn remove(&self, doomed: &[Doomed]) -> Result<Vec<Ended>, TierError> {
        let dir = self.root.dir()?;
        let remove = |doomed: &Doomed| -> Result<Option<u64>, Errno> {
            let found = statat(&dir, &*doomed.path, AtFlags::SYMLINK_NOFOLLOW)?;
            let last = || self.tags.last(&doomed.path);
            // A file that was never read here may be newer than the one that cannot be used.
            let other = doomed.as_read && last() != Some(Version::of(&found));
            if other || !is_file(&found) {
                return Ok(None);
            }
            unlinkat(&dir, &*doomed.path, AtFlags::empty())?;
            Ok(Some(u64::try_from(found.st_size).unwrap_or(0)))
        };
        let ended = doomed.iter().map(|doomed| match remove(doomed) {
            Ok(Some(bytes)) => Ok(Ended::Removed(bytes)),
            Ok(None) | Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => Ok(Ended::Absent),
            Err(e) => {
                let error = failed("remove", "an object", e).about(doomed.path.clone());
                match error.of_one_object() {
                    true => Ok(Ended::Refused(error)),
                    false => Err(error),
                }
            }
        });
        ended.collect()
    }
}
