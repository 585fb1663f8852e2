//! Lists the folder: its objects in the order of their names, and unfinished files. Blocks: for threads where that is allowed.

use super::Folder;
use super::fault::failed;
use super::root::{COUNTED_FILE, FORMAT_FILE, NEW, is_file, modified_s, open_folder};
use crate::{Kind, Listed, Page, TierError};
use kvcachepool_protocol::object::ObjectName;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::fs::{AtFlags, Dir, statat, unlinkat};
use rustix::io::Errno;
use std::time::Duration;
use tracing::warn;

/// Folders on the way to an object: model, layout, first digits of its key.
const DIGITS: [usize; 3] = [16, 16, 2];
/// Created by file systems in their root.
const LOST_FOUND: &str = "lost+found";
/// Prefix of files that NFS clients keep open after their removal.
const NFS: &str = ".nfs";

/// What a name in the folder is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Name {
    /// A folder on the way to objects.
    Folder,
    /// Where objects are.
    File,
    /// An unfinished file.
    New,
    /// A file of the tier or of the file system.
    Known,
    Foreign,
}

/// Whether this is the name of an unfinished file of ours, as `Root::create` makes it.
fn is_unfinished(name: &str) -> bool {
    let hex = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_hexdigit());
    let Some((writer, number)) = name.strip_prefix(NEW).and_then(|rest| rest.split_once('-'))
    else {
        return false;
    };
    writer.len() <= 16 && hex(writer) && hex(number.strip_suffix("-probe").unwrap_or(number))
}

fn kind(depth: usize, name: &str) -> Name {
    let lower = |b: u8| matches!(b, b'0'..=b'9' | b'a'..=b'f');
    if is_unfinished(name) {
        return Name::New;
    }
    let of_root = depth == 0 && [FORMAT_FILE, COUNTED_FILE, LOST_FOUND].contains(&name);
    if of_root || name.starts_with(NFS) {
        return Name::Known;
    }
    match DIGITS.get(depth) {
        None => Name::File,
        Some(digits) if name.len() == *digits && name.bytes().all(lower) => Name::Folder,
        Some(_) => Name::Foreign,
    }
}

/// The names in a folder, in order. A name that is not UTF-8 is foreign in any spelling.
fn names(dir: BorrowedFd<'_>) -> Result<Vec<String>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    names.sort_unstable();
    Ok(names)
}

/// Whether the name was removed since it was listed.
fn is_gone(e: Errno) -> bool {
    e == Errno::NOENT || e == Errno::STALE
}

/// Errors of single names do not keep a walk from what else is in the folder: the first one is kept. Others end the walk.
fn pass_over(unread: &mut Option<TierError>, path: &str, e: Errno) -> Result<(), Errno> {
    let error = failed("read", "a name in the folder", e).about(path);
    if !error.of_one_object() {
        return Err(e);
    }
    unread.get_or_insert(error);
    Ok(())
}

impl Folder {
    /// At most `limit` objects after this name.
    pub fn page(&self, from: Option<&str>, limit: usize) -> Result<Page, TierError> {
        let dir = self.root.dir()?;
        let mut walk = Walk {
            page: Page::default(),
            limit,
        };
        let walked = walk.folder(dir.as_fd(), "", 0, from);
        walked.map_err(|e| failed("list", &self.root.place(""), e))?;
        Ok(walk.page)
    }

    /// Removes unfinished files that were last written at least this long ago, by the clock of the file system. Returns their number.
    pub fn tidy(&self, age: Duration) -> Result<u64, TierError> {
        let dir = self.root.dir()?;
        let mut tidying = Tidying {
            before_s: self.clock.unix_s_or_own().saturating_sub(age.as_secs()),
            removed: 0,
            unread: None,
        };
        let tidied = tidying.folder(dir.as_fd(), "", 0);
        tidied.map_err(|e| failed("tidy up", &self.root.place(""), e))?;
        if let Some(e) = tidying.unread {
            let (tier, reason) = (Kind::FileSystem.name(), e.cause.name());
            warn!(tier, reason, error = %e, "cannot remove some unfinished files");
        }
        Ok(tidying.removed)
    }
}

struct Walk {
    page: Page,
    limit: usize,
}

impl Walk {
    /// Adds what is in a folder, after the rest of a name. False: the page is full, and there is more.
    fn folder(
        &mut self,
        dir: BorrowedFd<'_>,
        path: &str,
        depth: usize,
        from: Option<&str>,
    ) -> Result<bool, Errno> {
        let slash = if path.is_empty() { "" } else { "/" };
        let (first, rest) = match from {
            Some(from) => from.split_once('/').unwrap_or((from, "")),
            None => ("", ""),
        };
        for name in names(dir)? {
            let kind = kind(depth, &name);
            // The folder of the last object is listed again, the object itself is not.
            let again = name == first && kind == Name::Folder;
            if (from.is_some() && &*name <= first && !again)
                || matches!(kind, Name::Known | Name::New)
            {
                continue;
            }
            let full = format!("{path}{slash}{name}");
            match kind {
                Name::Folder => {
                    let inside = open_folder(dir, &name).and_then(|inner| {
                        let from = again.then_some(rest);
                        self.folder(inner.as_fd(), &full, depth + 1, from)
                    });
                    match inside {
                        Ok(true) => continue,
                        Ok(false) => return Ok(false),
                        Err(Errno::NOTDIR | Errno::LOOP) => {}
                        Err(e) if is_gone(e) => continue,
                        Err(e) => {
                            pass_over(&mut self.page.unread, &full, e)?;
                            continue;
                        }
                    }
                }
                Name::File => {
                    if let Ok(object) = ObjectName::from_s3("", &full) {
                        let found = match statat(dir, &*name, AtFlags::SYMLINK_NOFOLLOW) {
                            Ok(found) => found,
                            Err(e) if is_gone(e) => continue,
                            Err(e) => {
                                pass_over(&mut self.page.unread, &full, e)?;
                                continue;
                            }
                        };
                        if is_file(&found) {
                            if self.is_full() {
                                return Ok(false);
                            }
                            self.page.objects.push(Listed {
                                name: object,
                                bytes: u64::try_from(found.st_size).unwrap_or(0),
                                written_unix_s: modified_s(&found),
                            });
                            continue;
                        }
                    }
                }
                Name::Foreign | Name::Known | Name::New => {}
            }
            if self.is_full() {
                return Ok(false);
            }
            self.page.foreign += 1;
        }
        Ok(true)
    }

    /// Whether the page has no room for another name; it then ends at its last object.
    fn is_full(&mut self) -> bool {
        let full = self.page.objects.len() >= self.limit;
        if full {
            self.page.next = self.page.objects.last().map(|last| last.name.s3(""));
        }
        full
    }
}

struct Tidying {
    before_s: u64,
    removed: u64,
    /// The error of the first name that was passed over.
    unread: Option<TierError>,
}

impl Tidying {
    fn folder(&mut self, dir: BorrowedFd<'_>, path: &str, depth: usize) -> Result<(), Errno> {
        for name in names(dir)? {
            let full = format!("{path}/{name}");
            let done = match kind(depth, &name) {
                Name::Folder => open_folder(dir, &name)
                    .and_then(|inner| self.folder(inner.as_fd(), &full, depth + 1)),
                Name::New => self.unfinished(dir, &name),
                Name::File | Name::Known | Name::Foreign => Ok(()),
            };
            match done {
                Ok(()) | Err(Errno::NOTDIR | Errno::LOOP) => {}
                Err(e) if is_gone(e) => {}
                Err(e) => pass_over(&mut self.unread, &full, e)?,
            }
        }
        Ok(())
    }

    fn unfinished(&mut self, dir: BorrowedFd<'_>, name: &str) -> Result<(), Errno> {
        let found = statat(dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if is_file(&found) && modified_s(&found) <= self.before_s {
            unlinkat(dir, name, AtFlags::empty())?;
            self.removed += 1;
        }
        Ok(())
    }
}
