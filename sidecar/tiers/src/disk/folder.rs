//! The folder: its file names, format and lock. Every file is opened relative to the folder's descriptor, so another folder that appears
//! under the same path is never used by mistake.

use super::fault::failed;
use super::files::{self, ContainerFile, Name, new_file};
use super::lock::Lock;
use crate::files::raw::{self, Block, Part};
use crate::{Cause, Kind, TierError};
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{
    AtFlags, Dir, FallocateFlags, Mode, OFlags, fallocate, fdatasync, fstat, fsync, ftruncate,
    openat, renameat, stat, statat, unlinkat,
};
use rustix::io::{Errno, read, retry_on_intr, write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Version of the folder's format that this build reads and writes.
pub const FORMAT: u32 = 1;
const FORMAT_WORD: &str = "kvcachepool-disk";
const FORMAT_FILE: &str = files::FORMAT;
const LOCK_FILE: &str = files::LOCK;
const PROBE_FILE: &str = files::PROBE;
/// Content of the folder.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Listing {
    pub containers: Vec<ContainerFile>,
    /// Generations that have a snapshot.
    pub snapshots: Vec<u64>,
    /// Generations that have a journal.
    pub journals: Vec<u64>,
    /// Unfinished files of the tier.
    pub unfinished: Vec<String>,
    /// Number of foreign names.
    pub foreign: u64,
}

#[derive(Debug, Clone)]
pub struct Folder {
    path: PathBuf,
    dir: Arc<OwnedFd>,
    identity: (u64, u64),
}

impl Folder {
    /// Opens an existing folder.
    pub fn open(path: &Path) -> Result<Self, TierError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOTDIR => TierError::new(
                Kind::Disk,
                Cause::Config,
                format!("{} is not a folder; name a folder", path.display()),
            ),
            e => failed("open the folder", &path.display().to_string(), e),
        })?;
        let found = fstat(&dir).map_err(|e| failed("inspect", &path.display().to_string(), e))?;
        Ok(Self {
            path: path.to_owned(),
            dir: Arc::new(dir),
            identity: (found.st_dev, found.st_ino),
        })
    }

    /// Path of one of its files, for messages.
    pub fn place(&self, name: &str) -> String {
        self.path.join(name).display().to_string()
    }

    fn failed(&self, step: &str, name: &str, error: impl Into<std::io::Error>) -> TierError {
        failed(step, &self.place(name), error)
    }

    /// Whether the path still leads to this folder.
    pub fn check(&self) -> Result<(), TierError> {
        let found = stat(&self.path).map_err(|e| self.failed("inspect", "", e))?;
        if (found.st_dev, found.st_ino) == self.identity {
            return Ok(());
        }
        let detail = format!("another folder is now at {}", self.path.display());
        Err(TierError::new(Kind::Disk, Cause::Gone, detail))
    }

    /// Claims the folder for this process: its format must be ours, or missing, and no other process may hold its lock. `before`: a lock
    /// that is already held, which is kept if it is on this folder.
    pub fn claim(&self, before: Option<Arc<Lock>>) -> Result<Arc<Lock>, TierError> {
        let known = self.check_format()?;
        let lock = match before {
            Some(lock) if self.holds(&lock) => lock,
            _ => self.lock()?,
        };
        if !known {
            let new = new_file(FORMAT_FILE);
            let file = self.create(&new)?;
            let text = format!("{FORMAT_WORD} {FORMAT}\n");
            let written = write(&file, text.as_bytes()).and_then(|n| match n {
                n if n == text.len() => fdatasync(&file),
                _ => Err(Errno::NOSPC),
            });
            written.map_err(|e| self.failed("write", &new, e))?;
            self.rename(&new, FORMAT_FILE)?;
            self.sync()?;
        }
        Ok(lock)
    }

    /// Whether the folder has a format; fails if that is not ours.
    fn check_format(&self) -> Result<bool, TierError> {
        let file = match self.open_file(FORMAT_FILE, OFlags::RDONLY) {
            Ok(file) => file,
            Err(e) if e == Errno::NOENT => return Ok(false),
            Err(e) => return Err(self.failed("open", FORMAT_FILE, e)),
        };
        let mut bytes = [0; 64];
        let got = read(&file, &mut bytes).map_err(|e| self.failed("read", FORMAT_FILE, e))?;
        let text = std::str::from_utf8(bytes.get(..got).unwrap_or_default()).unwrap_or_default();
        let version = text
            .strip_prefix(FORMAT_WORD)
            .and_then(|rest| rest.trim().parse::<u32>().ok());
        let refuse = |detail: String| Err(TierError::new(Kind::Disk, Cause::Config, detail));
        match version {
            Some(FORMAT) => Ok(true),
            Some(version) => refuse(format!(
                "{} is of format {version}, this build reads format {FORMAT}: name another folder, or run the version that wrote it",
                self.path.display()
            )),
            None => refuse(format!(
                "{} is not the format file of a disk tier: name another folder",
                self.place(FORMAT_FILE)
            )),
        }
    }

    fn holds(&self, lock: &Lock) -> bool {
        let there = statat(&*self.dir, LOCK_FILE, AtFlags::SYMLINK_NOFOLLOW);
        there.is_ok_and(|s| {
            lock.identity()
                .is_ok_and(|held| held == (s.st_dev, s.st_ino))
        })
    }

    fn lock(&self) -> Result<Arc<Lock>, TierError> {
        let file = self
            .open_file(LOCK_FILE, OFlags::RDWR | OFlags::CREATE)
            .map_err(|e| self.failed("open", LOCK_FILE, e))?;
        match Lock::take(file) {
            Ok(Some(lock)) => Ok(Arc::new(lock)),
            Ok(None) => Err(TierError::new(
                Kind::Disk,
                Cause::InUse,
                format!(
                    "another sidecar uses {}: give each sidecar its own folder",
                    self.path.display()
                ),
            )),
            Err(e) => Err(self.failed("lock", LOCK_FILE, e)),
        }
    }

    pub fn list(&self) -> Result<Listing, TierError> {
        let fail = |e: Errno| self.failed("list", "", e);
        let mut listing = Listing::default();
        for entry in Dir::read_from(&*self.dir).map_err(fail)? {
            let entry = entry.map_err(fail)?;
            let name = entry.file_name().to_string_lossy();
            match Name::read(&name) {
                Name::Known => {}
                Name::Container(file) => listing.containers.push(file),
                Name::Snapshot(number) => listing.snapshots.push(number),
                Name::Journal(number) => listing.journals.push(number),
                Name::Unfinished => listing.unfinished.push(name.into_owned()),
                Name::Foreign => listing.foreign += 1,
            }
        }
        Ok(listing)
    }

    pub fn open_file(&self, name: &str, flags: OFlags) -> Result<OwnedFd, Errno> {
        let mode = Mode::from_raw_mode(0o600);
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        openat(&*self.dir, name, flags, mode)
    }

    /// Creates an empty file for reading and writing.
    pub fn create(&self, name: &str) -> Result<OwnedFd, TierError> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        self.open_file(name, flags)
            .map_err(|e| self.failed("create", name, e))
    }

    /// Creates a container file with all its blocks, durably. On failure no file is left. An existing file is an error, and is kept.
    pub fn create_container(
        &self,
        file: ContainerFile,
        direct: bool,
    ) -> Result<OwnedFd, TierError> {
        let name = file.name();
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let made = self
            .open_file(&name, flags | direct_flag(direct))
            .and_then(|fd| match self.make_durable(&fd, file.bytes()) {
                Ok(()) => Ok(fd),
                Err(e) => {
                    let _ = unlinkat(&*self.dir, &*name, AtFlags::empty());
                    Err(e)
                }
            });
        made.map_err(|e| self.failed("create", &name, e))
    }

    fn make_durable(&self, fd: &OwnedFd, bytes: u64) -> Result<(), Errno> {
        match retry_on_intr(|| fallocate(fd, FallocateFlags::empty(), 0, bytes)) {
            // Blocks are then allocated by the writes.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => ftruncate(fd, bytes)?,
            other => other?,
        }
        fsync(fd)?;
        fsync(&*self.dir)
    }

    pub fn open_container(&self, file: ContainerFile, direct: bool) -> Result<OwnedFd, Errno> {
        self.open_file(&file.name(), OFlags::RDWR | direct_flag(direct))
    }

    pub fn length(&self, name: &str) -> Result<u64, TierError> {
        let found = statat(&*self.dir, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| self.failed("inspect", name, e))?;
        Ok(u64::try_from(found.st_size).unwrap_or(0))
    }

    /// Removes a file; a missing file is not an error.
    pub fn remove(&self, name: &str) -> Result<(), TierError> {
        match unlinkat(&*self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(e) => Err(self.failed("remove", name, e)),
        }
    }

    pub fn rename(&self, from: &str, to: &str) -> Result<(), TierError> {
        renameat(&*self.dir, from, &*self.dir, to).map_err(|e| self.failed("rename", from, e))
    }

    /// Makes renames and creations durable.
    pub fn sync(&self) -> Result<(), TierError> {
        fsync(&*self.dir).map_err(|e| self.failed("sync", "", e))
    }

    /// Tests writing and reading. With `direct`, returns whether direct I/O is available.
    pub fn probe(&self, direct: bool) -> Result<bool, TierError> {
        let probed = match direct {
            true => match self.probe_once(true) {
                // Refused at open, or at the first transfer.
                Err(Errno::INVAL | Errno::OPNOTSUPP) => self.probe_once(false).map(|()| false),
                other => other.map(|()| true),
            },
            false => self.probe_once(false).map(|()| false),
        };
        let removed = self.remove(PROBE_FILE);
        let probed = probed.map_err(|e| self.failed("write and read", PROBE_FILE, e))?;
        removed.map(|()| probed)
    }

    fn probe_once(&self, direct: bool) -> Result<(), Errno> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        let fd = self.open_file(PROBE_FILE, flags | direct_flag(direct))?;
        let errno = |e: std::io::Error| Errno::from_io_error(&e).unwrap_or(Errno::IO);
        let mut block = Block::new(1);
        block.bytes_mut().fill(0xa5);
        raw::write_all(fd.as_fd(), 0, &mut [Part::Block(block)]).map_err(errno)?;
        fdatasync(&fd)?;
        let mut parts = [Part::Block(Block::new(1))];
        raw::read_all(fd.as_fd(), 0, &mut parts).map_err(errno)?;
        match &parts {
            [Part::Block(block)] if block.bytes().iter().all(|b| *b == 0xa5) => Ok(()),
            _ => Err(Errno::IO),
        }
    }
}

fn direct_flag(direct: bool) -> OFlags {
    if direct {
        OFlags::DIRECT
    } else {
        OFlags::empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_tells_ours_from_foreign() {
        let temp = tempfile::tempdir().unwrap();
        let ours = [
            "slots-00000001-00000002-00000003",
            "snapshot-0000000000000001",
            "journal-0000000000000002",
            "snapshot-0000000000000002.new",
            "probe",
            "format",
            "lock",
        ];
        for name in ours.iter().chain(&["notes.txt", "journal-2", "new"]) {
            std::fs::write(temp.path().join(name), "").unwrap();
        }
        std::fs::create_dir(temp.path().join("lost+found")).unwrap();
        let mut listing = Folder::open(temp.path()).unwrap().list().unwrap();
        listing.unfinished.sort();
        assert_eq!(listing.containers.len(), 1);
        assert_eq!((listing.snapshots, listing.journals), (vec![1], vec![2]));
        assert_eq!(
            listing.unfinished,
            ["probe", "snapshot-0000000000000002.new"]
        );
        assert_eq!(listing.foreign, 3);
    }
}
