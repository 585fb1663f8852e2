//! The folder, and the files in it that are no objects. The folder is found again by its path when it was replaced, for example after its
//! file system was mounted again.

use super::fault::failed;
use crate::clock::Clock;
use crate::{Cause, Kind, TierError};
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RenameFlags, Stat, fchmod, fstat, fstatvfs, fsync, linkat,
    mkdirat, openat, renameat, renameat_with, stat, statat, unlinkat,
};
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Version of the folder's format that this build reads and writes.
const FORMAT: u32 = 1;
const FORMAT_WORD: &str = "kvcachepool-filesystem";
pub const FORMAT_FILE: &str = "format";
/// Time and result of the last count.
pub const COUNTED_FILE: &str = "counted";
/// Prefix of unfinished files.
pub const NEW: &str = ".new-";
/// Bytes of a file that is written to try the folder.
const TEXT: &[u8] = b"kvcachepool tries here what it may do. This file can be removed.\n";
/// Names of unfinished files that are tried until one is free.
const NAMES_MAX: u32 = 16;

#[derive(Debug)]
pub struct Root {
    path: PathBuf,
    dir: Mutex<Option<Arc<OwnedFd>>>,
    /// Random number of this process, in the names of its unfinished files.
    writer: u64,
    next: AtomicU64,
    /// Whether the file system has hard links, as far as it is known.
    links: AtomicBool,
    /// The folder had a format file.
    formatted: AtomicBool,
}

/// Result of giving a finished file its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Published {
    New,
    /// The name existed before.
    Already,
}

/// A file under a temporary name, which its drop removes.
pub struct Unfinished<'a> {
    folder: BorrowedFd<'a>,
    name: String,
    pub file: File,
    /// The name is gone.
    ended: bool,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = unlinkat(self.folder, &*self.name, AtFlags::empty());
        }
    }
}

impl Root {
    /// The folder at this path, which is opened by its first use.
    pub fn new(path: &Path, links: bool) -> Self {
        Self {
            path: path.to_owned(),
            dir: Mutex::default(),
            writer: fastrand::u64(..),
            next: AtomicU64::new(0),
            links: AtomicBool::new(links),
            formatted: AtomicBool::new(false),
        }
    }

    /// Path of a name in the folder, for messages.
    pub fn place(&self, name: &str) -> String {
        let path = match name {
            "" => self.path.clone(),
            name => self.path.join(name),
        };
        path.display().to_string()
    }

    fn failed(&self, step: &str, name: &str, error: impl Into<std::io::Error>) -> TierError {
        failed(step, &self.place(name), error)
    }

    /// The open folder. Opens the path again if another folder is there now.
    pub fn dir(&self) -> Result<Arc<OwnedFd>, TierError> {
        let there = stat(&self.path).map_err(|e| self.failed("inspect", "", e))?;
        if let Some(dir) = self.dir.lock().clone()
            && fstat(&dir).is_ok_and(|s| (s.st_dev, s.st_ino) == (there.st_dev, there.st_ino))
        {
            return Ok(dir);
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&self.path, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOTDIR => TierError::new(
                Kind::FileSystem,
                Cause::Config,
                format!("{} is not a folder; name a folder", self.place("")),
            ),
            e => self.failed("open the folder", "", e),
        })?;
        let opened = Arc::new(opened);
        self.check_format(&opened)?;
        *self.dir.lock() = Some(opened.clone());
        Ok(opened)
    }

    /// Checks the folder, and with `writes` tries to write in it. Sets the clock to that of the file system.
    pub fn begin(&self, writes: bool, clock: &Clock) -> Result<(), TierError> {
        let dir = self.dir()?;
        if !writes {
            return Ok(());
        }
        let tried = self.try_file(&dir, clock);
        match tried.map_err(|e| self.failed("write and read in", "", e)) {
            // a full folder can still be read, and removals make room
            Err(e) if e.cause == Cause::Full && self.formatted.load(Relaxed) => Ok(()),
            tried => tried.and_then(|()| self.write_format(&dir)),
        }
    }

    /// Writes a file, publishes it, reads it back and removes it.
    fn try_file(&self, dir: &OwnedFd, clock: &Clock) -> std::io::Result<()> {
        let mut new = self.create(dir.as_fd())?;
        new.file.write_all(TEXT)?;
        new.file.sync_all()?;
        clock.is_now(modified_s(&fstat(&new.file)?));
        let name = format!("{}-probe", new.name);
        let published = self.publish(&mut new, &name);
        let read = published.and_then(|_| {
            let mut bytes = Vec::new();
            File::from(open_file(dir.as_fd(), &name)?).read_to_end(&mut bytes)?;
            match bytes == TEXT {
                true => Ok(()),
                false => Err(std::io::ErrorKind::InvalidData.into()),
            }
        });
        let removed = unlinkat(dir, &*name, AtFlags::empty());
        read?;
        Ok(removed?)
    }

    /// Fails if the folder has a format other than ours; a folder without one is not used yet.
    fn check_format(&self, dir: &OwnedFd) -> Result<(), TierError> {
        let word = match open_file(dir.as_fd(), FORMAT_FILE) {
            Ok(file) => first_line(File::from(file)),
            Err(Errno::NOENT) if self.formatted.load(Relaxed) => {
                // below a mount point is an empty folder, which must not pass for an empty tier
                return Err(TierError::new(
                    Kind::FileSystem,
                    Cause::Gone,
                    format!(
                        "{} is another folder now, without the file {FORMAT_FILE}: check the mount, or restart the sidecar to use it as it is",
                        self.place("")
                    ),
                ));
            }
            Err(Errno::NOENT) => return Ok(()),
            Err(e) => return Err(self.failed("open", FORMAT_FILE, e)),
        };
        let word = word.map_err(|e| self.failed("read", FORMAT_FILE, e))?;
        let refuse = |detail: String| TierError::new(Kind::FileSystem, Cause::Config, detail);
        match version(&word) {
            Some(FORMAT) => {
                self.formatted.store(true, Relaxed);
                Ok(())
            }
            Some(version) => Err(refuse(format!(
                "{} is of format {version}, this build reads format {FORMAT}: name another folder, or run the version that wrote it",
                self.place("")
            ))),
            None => Err(refuse(format!(
                "{} is not the format file of a file system tier: name another folder",
                self.place(FORMAT_FILE)
            ))),
        }
    }

    fn write_format(&self, dir: &OwnedFd) -> Result<(), TierError> {
        if statat(dir, FORMAT_FILE, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
            return Ok(());
        }
        let write = || -> std::io::Result<()> {
            let mut new = self.create(dir.as_fd())?;
            new.file
                .write_all(format!("{FORMAT_WORD} {FORMAT}\n").as_bytes())?;
            new.file.sync_all()?;
            self.publish(&mut new, FORMAT_FILE)?;
            Ok(sync(dir.as_fd())?)
        };
        write().map_err(|e| self.failed("write", FORMAT_FILE, e))?;
        self.check_format(dir)
    }

    /// Checks whether the file server answers.
    pub fn reach(&self) -> Result<(), TierError> {
        let dir = self.dir()?;
        fstatvfs(&dir)
            .map(drop)
            .map_err(|e| self.failed("inspect", "", e))
    }

    /// Opens the folder at this path below the root, and creates it if it is missing.
    pub fn folder(&self, dir: &OwnedFd, path: &str) -> Result<OwnedFd, Errno> {
        match open_folder(dir.as_fd(), path) {
            Err(Errno::NOENT) => {}
            opened => return opened,
        }
        let mode = permissions(dir)?;
        for (end, _) in path.match_indices('/').chain([(path.len(), "")]) {
            let part = path.get(..end).unwrap_or(path);
            match mkdirat(dir, part, mode) {
                Ok(()) => {
                    let made = open_folder(dir.as_fd(), part)?;
                    // The process's umask applied. Some file systems have no permissions.
                    let _ = fchmod(&made, mode);
                    let parent = part.rsplit_once('/').map(|(parent, _)| parent);
                    match parent {
                        Some(parent) => sync(open_folder(dir.as_fd(), parent)?.as_fd())?,
                        None => sync(dir.as_fd())?,
                    }
                }
                Err(Errno::EXIST) => {}
                Err(e) => return Err(e),
            }
        }
        open_folder(dir.as_fd(), path)
    }

    /// Creates an unfinished file in a folder, with the folder's permissions.
    pub fn create<'a>(&self, folder: BorrowedFd<'a>) -> Result<Unfinished<'a>, Errno> {
        let mode = permissions(folder)? & Mode::from_raw_mode(0o666);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mut tried = 0;
        loop {
            let number = self.next.fetch_add(1, Relaxed);
            let name = format!("{NEW}{:016x}-{number:x}", self.writer);
            match openat(folder, &*name, flags, mode) {
                Ok(file) => {
                    let _ = fchmod(&file, mode);
                    return Ok(Unfinished {
                        folder,
                        name,
                        file: file.into(),
                        ended: false,
                    });
                }
                Err(Errno::EXIST) if tried < NAMES_MAX => tried += 1,
                Err(e) => return Err(e),
            }
        }
    }

    /// Gives a file its name, unless that exists.
    pub fn publish(&self, new: &mut Unfinished<'_>, name: &str) -> std::io::Result<Published> {
        let folder = new.folder;
        if self.links.load(Relaxed) {
            match linkat(folder, &*new.name, folder, name, AtFlags::empty()) {
                Ok(()) => return Ok(Published::New),
                Err(Errno::EXIST) => return Ok(published_before(new, name)?),
                // Not every file system has hard links.
                Err(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                    self.links.store(false, Relaxed);
                }
                Err(e) => return Err(e.into()),
            }
        }
        match renameat_with(folder, &*new.name, folder, name, RenameFlags::NOREPLACE) {
            Ok(()) => new.ended = true,
            Err(Errno::EXIST) => return Ok(published_before(new, name)?),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                if statat(folder, name, AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                    return Ok(Published::Already);
                }
                // Of two writers at this moment the second replaces an object by one with the same bytes.
                self.replace(new, name)?;
            }
            Err(e) => return Err(e.into()),
        }
        Ok(Published::New)
    }

    /// Gives a file its name, also if that exists.
    pub fn replace(&self, new: &mut Unfinished<'_>, name: &str) -> Result<(), Errno> {
        renameat(new.folder, &*new.name, new.folder, name)?;
        new.ended = true;
        Ok(())
    }
}

/// A server may have carried out a request whose answer was lost: then the name is that of the new file.
fn published_before(new: &Unfinished<'_>, name: &str) -> Result<Published, Errno> {
    let ours = fstat(&new.file)?;
    match statat(new.folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(s) if (s.st_dev, s.st_ino) == (ours.st_dev, ours.st_ino) => Ok(Published::New),
        Ok(_) | Err(Errno::NOENT) => Ok(Published::Already),
        Err(e) => Err(e),
    }
}

/// Permissions of new files and folders: those of the folder that they are in.
fn permissions(folder: impl AsFd) -> Result<Mode, Errno> {
    Ok(Mode::from_raw_mode(fstat(folder)?.st_mode) & Mode::from_raw_mode(0o3777))
}

/// Makes the names in a folder durable, where the file system can do that for folders.
pub fn sync(folder: BorrowedFd<'_>) -> Result<(), Errno> {
    match fsync(folder) {
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::BADF) => Ok(()),
        synced => synced,
    }
}

pub fn open_folder(dir: BorrowedFd<'_>, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, path, flags, Mode::empty())
}

/// Opens a file for reading. Does not wait for the writer of a pipe.
pub fn open_file(dir: BorrowedFd<'_>, path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    openat(dir, path, flags, Mode::empty())
}

pub fn is_file(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
}

/// Time of the last write, Unix seconds.
pub fn modified_s(found: &Stat) -> u64 {
    u64::try_from(found.st_mtime).unwrap_or(0)
}

/// Whether the folder has the format of a file system tier, of any version.
pub fn has_format(folder: &Path) -> bool {
    let line = File::open(folder.join(FORMAT_FILE)).and_then(first_line);
    line.is_ok_and(|line| version(&line).is_some())
}

fn first_line(file: File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    file.take(64).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn version(line: &str) -> Option<u32> {
    line.strip_prefix(FORMAT_WORD)?.trim().parse().ok()
}
