//! The folder as its census sees it. One sidecar lists it for all: a small file contains the last count, and its age says when that was
//! taken. Two that replace it at the same moment both list, which is harmless.

use super::remove::{Doomed, Ended};
use super::root::{COUNTED_FILE, modified_s, open_file};
use super::{Folder, Live, PAGE_MAX, fault};
use crate::census::{Census, Marker, Shared, Sum, TEXT_BYTES, Turn, read_text, text};
use crate::{Cause, Listed, Operation, Page, Removal, Source, Swept, TierError};
use rustix::fd::AsFd;
use rustix::fs::fstat;
use rustix::io::Errno;
use std::fs::File;
use std::io::{Read, Write};
use std::time::Duration;

impl Folder {
    fn marker(&self) -> Result<Option<Marker>, TierError> {
        let dir = self.root.dir()?;
        let file = match open_file(dir.as_fd(), COUNTED_FILE) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT | Errno::STALE) => return Ok(None),
            Err(e) => return Err(self.failed("open", e)),
        };
        let written = modified_s(&fstat(&file).map_err(|e| self.failed("inspect", e))?);
        let mut bytes = Vec::new();
        let read = file.take(TEXT_BYTES as u64).read_to_end(&mut bytes);
        read.map_err(|e| self.failed("read", e))?;
        let now = self.clock.unix_s_or_own();
        let sum = read_text(&bytes);
        Ok(Some(Marker::new(sum, Some(written), Some(now))))
    }

    pub(super) fn turn(&self, young: Duration) -> Result<Turn, TierError> {
        let marker = self.marker()?;
        if let Some(taken) = marker.as_ref().and_then(|marker| marker.taken(young)) {
            return Ok(taken);
        }
        match self.publish(marker.and_then(|marker| marker.sum)) {
            // only a removal makes room in a full file system
            Err(e) if e.cause == Cause::Full => {}
            published => published?,
        }
        Ok(Turn::Mine)
    }

    /// Replaces the count.
    fn publish(&self, sum: Option<Sum>) -> Result<(), TierError> {
        let dir = self.root.dir()?;
        let write = || -> std::io::Result<()> {
            let mut new = self.root.create(dir.as_fd())?;
            new.file.write_all(text(sum).as_bytes())?;
            new.file.sync_all()?;
            self.clock.is_now(modified_s(&fstat(&new.file)?));
            Ok(self.root.replace(&mut new, COUNTED_FILE)?)
        };
        write().map_err(|e| self.failed("write", e))
    }

    fn failed(&self, step: &str, error: impl Into<std::io::Error>) -> TierError {
        fault::failed(step, &self.root.place(COUNTED_FILE), error)
    }
}

impl Source for Live {
    fn page<'a>(&'a self, from: Option<&'a str>) -> Operation<'a, Page> {
        Box::pin(self.list(from, PAGE_MAX))
    }

    fn remove_chosen<'a>(&'a self, chosen: &'a [Listed]) -> Operation<'a, Swept> {
        Box::pin(async move {
            let ended = self.remove(Doomed::of(Removal::Listed(chosen))).await?;
            let mut swept = Swept::default();
            for (listed, ended) in chosen.iter().zip(ended) {
                match ended {
                    Ended::Removed(bytes) => {
                        swept.objects += 1;
                        swept.bytes = swept.bytes.saturating_add(bytes);
                    }
                    Ended::Absent => {}
                    Ended::Refused(why) => {
                        swept.kept.push(listed.name.clone());
                        swept.why = swept.why.or(Some(why));
                    }
                }
            }
            Ok(swept)
        })
    }
}

impl Shared for Live {
    fn census(&self) -> &Census {
        &self.census
    }

    fn unix_s(&self) -> Option<u64> {
        self.folder.clock.unix_s()
    }

    fn turn(&self, young: Duration) -> Operation<'_, Turn> {
        let folder = self.folder.clone();
        Box::pin(self.ask(move || folder.turn(young)))
    }

    fn counted_lately(&self, young: Duration) -> Operation<'_, Option<Turn>> {
        let folder = self.folder.clone();
        Box::pin(self.ask(move || Ok(folder.marker()?.and_then(|marker| marker.taken(young)))))
    }

    fn publish(&self, sum: Sum) -> Operation<'_, ()> {
        let folder = self.folder.clone();
        Box::pin(self.ask(move || folder.publish(Some(sum))))
    }

    fn tidy(&self, age: Duration) -> Operation<'_, u64> {
        let folder = self.folder.clone();
        Box::pin(self.ask(move || folder.tidy(age)))
    }
}
