//! Reads objects: header and sections in one request if they are small or other objects are read at the same time; otherwise in several
//! concurrent ranges. Bytes are received into their place.

use super::fault::found;
use super::request::Requests;
use super::stream::Stream;
use crate::files::sections::{Section, wanted};
use crate::{Cause, Get, Kind, Running, TierError};
use futures::stream::{StreamExt, TryStreamExt};
use kvcachepool_protocol::object::{
    ALIGN, BadObject, HEADER_BYTES, MAX_BYTES, Object, ObjectName, head_bytes,
};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// Size that most headers do not exceed.
const HEAD_BYTES: u64 = 16 << 10;
/// Smaller gaps of unwanted bytes are read: another request would take longer.
const GAP_BYTES: u64 = 64 << 10;

/// After this many bytes other tasks of the thread get their turn.
const TURN_BYTES: u64 = 2 << 20;

/// How large objects are read: in concurrent ranges while few objects are read; in one request each while there are as many objects as
/// there would be ranges.
#[derive(Debug, Clone, Copy)]
pub struct Parts {
    /// Bytes of a range.
    pub bytes: u64,
    /// Concurrent ranges, in addition to the first.
    pub at_once: usize,
}

/// An object that is being read.
struct Reading<'a>(&'a AtomicUsize);

impl<'a> Reading<'a> {
    /// Counts one more read; returns how many are running.
    fn begin(all: &'a AtomicUsize) -> (Self, usize) {
        (Self(all), all.fetch_add(1, Relaxed) + 1)
    }
}

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}

impl Requests {
    /// The header of an object.
    pub async fn head(&self, name: &ObjectName) -> Result<Object, TierError> {
        let key = self.key(name);
        let mut stream = self.range(&key, (0, HEAD_BYTES), None).await?;
        let object = self.read_head(&mut stream, name, &key).await?;
        // Reads to the end, so that the connection can be reused: a new one would take longer. A server without support for ranges sends
        // the whole object, which is not read.
        if stream.end <= HEAD_BYTES {
            let _ = stream.skip_to(HEAD_BYTES).await;
        }
        Ok(object)
    }

    /// Reads sections into their places.
    pub async fn get(&self, get: &Get, parts: Parts) -> Result<Object, TierError> {
        let key = self.key(&get.name);
        let (_reading, readers) = Reading::begin(&self.reading);
        let longest = match readers > parts.at_once {
            true => MAX_BYTES,
            false => parts.bytes,
        };
        let lengths = get
            .places
            .iter()
            .map(|place| place.span.length.next_multiple_of(ALIGN));
        let expected = lengths.fold(HEAD_BYTES, u64::saturating_add);
        let first = (0, reach(0, expected, longest.max(HEAD_BYTES)));
        let mut stream = self.range(&key, first, None).await?;
        let object = self.read_head(&mut stream, &get.name, &key).await?;
        let sections = wanted(Kind::S3, 0, &object, get)?;
        // Forgets the digests of an earlier attempt.
        sections.iter().for_each(|section| section.span.saw(None));
        let version = stream.version.clone();
        let (read_to, end) = (stream.at, stream.end);
        let rest = ranges(&sections, end, longest);
        // The wanted bytes of the first response. Without any, nobody reads it, and it must not hold a permit against the other ranges.
        let here = sections.iter().any(|s| s.offset < end && s.end() > read_to);
        let first = here.then_some(stream);
        let (key, version, sections) = (&key, Some(&version), &sections);
        let first = async move {
            match first {
                Some(mut stream) => land(&mut stream, sections).await,
                None => Ok(0),
            }
        };
        let others = futures::stream::iter(rest)
            .map(|range| async move {
                let mut stream = self.range(key, range, version).await?;
                land(&mut stream, sections).await
            })
            .buffer_unordered(parts.at_once.max(1))
            .try_fold(0, |sum, landed| async move { Ok(sum + landed) });
        let (landed, others) = tokio::try_join!(first, others)?;
        let expected: u64 = sections.iter().map(|s| s.span.length).sum();
        if landed + others != expected {
            let asked = self.asked("s3:GetObject", Some(key));
            let detail = format!("received {} of {expected} bytes", landed + others);
            return Err(found(asked, Cause::Protocol, detail));
        }
        Ok(object)
    }

    /// Reads the header; the stream continues behind it, or behind the requested range if that is shorter.
    async fn read_head(
        &self,
        stream: &mut Stream<'_>,
        name: &ObjectName,
        key: &str,
    ) -> Result<Object, TierError> {
        let asked = self.asked("s3:GetObject", Some(key));
        let bad = |e: BadObject| found(asked, Cause::of_head(&e), e.to_string());
        let version = stream.version.clone();
        let total = version.total;
        // A response without an ETag may come from a proxy instead of the object.
        self.tags.read(key, version.etag.clone());
        let mut head = Vec::new();
        let mut needed = HEADER_BYTES as u64;
        take(stream, &mut head, needed).await?;
        if head.len() >= HEADER_BYTES {
            needed = head_bytes(&head).map_err(bad)?;
            if needed > total {
                return Err(bad(BadObject::Torn { got: total, needed }));
            }
            take(stream, &mut head, needed).await?;
        }
        if (head.len() as u64) < needed && stream.end < total {
            // A long header: its rest is requested separately, and the sections later.
            let range = (stream.end, needed);
            let mut more = self.range(key, range, Some(&version)).await?;
            take(&mut more, &mut head, needed).await?;
        }
        let object = Object::decode(&head).map_err(bad)?;
        if object.name() != *name {
            let detail = format!("the key holds the object {}", object.name().s3(""));
            return Err(found(asked, Cause::Foreign, detail));
        }
        if object.total_bytes() != total {
            let says = object.total_bytes();
            let detail = format!("the object has {total} bytes, but its header says {says}");
            return Err(found(asked, Cause::Corrupt, detail));
        }
        Ok(object)
    }
}

/// Reads until there are `needed` bytes, or the range ends.
async fn take(stream: &mut Stream<'_>, head: &mut Vec<u8>, needed: u64) -> Result<(), TierError> {
    while (head.len() as u64) < needed && stream.at < stream.end {
        head.extend_from_slice(&stream.next(needed - head.len() as u64).await?);
    }
    Ok(())
}

/// Receives a stream's bytes at their destinations; returns the number of wanted bytes.
async fn land(stream: &mut Stream<'_>, sections: &[Section]) -> Result<u64, TierError> {
    let (mut landed, mut turn, mut running) = (0, 0, Running::default());
    for section in sections {
        if section.end() <= stream.at {
            continue;
        }
        stream.skip_to(section.offset).await?;
        while stream.at < section.end().min(stream.end) {
            let (at, bytes) = (stream.at - section.offset, section.end() - stream.at);
            let received = stream.receive_into(&section.span, at, bytes).await?;
            // A section that exceeds the stream gets no running digest: its rest arrives in another stream, possibly earlier.
            if section.end() <= stream.end {
                running.came(&section.span, at, received);
            }
            landed += received;
            turn += received;
            if turn >= TURN_BYTES {
                turn = 0;
                tokio::task::yield_now().await;
            }
        }
    }
    stream.skip_to(u64::MAX).await?;
    Ok(landed)
}

/// End of a range from `start`: after `most` bytes, or a little later if hardly anything would remain for the next request.
fn reach(start: u64, end: u64, most: u64) -> u64 {
    match end - start <= most + most / 4 {
        true => end,
        false => start + most,
    }
}

/// Ranges from `from` on that contain the wanted bytes, each of at most about `most` bytes.
fn ranges(sections: &[Section], from: u64, most: u64) -> Vec<(u64, u64)> {
    let mut ranges: Vec<(u64, u64)> = Vec::new();
    for section in sections {
        let (mut start, end) = (section.offset.max(from), section.end());
        if let Some(last) = ranges.last_mut()
            && start < end
            && start.saturating_sub(last.1) <= GAP_BYTES
            && start < last.0 + most
        {
            last.1 = reach(last.0, end, most).max(last.1);
            start = last.1;
        }
        while start < end {
            let to = reach(start, end, most.max(1));
            ranges.push((start, to));
            start = to;
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::Memory;

    fn sections(places: &[(u64, u64)]) -> Vec<Section> {
        let memory = Memory::new(1 << 20);
        let section = |&(offset, length): &(u64, u64)| Section {
            offset,
            span: memory.span(length),
        };
        places.iter().map(section).collect()
    }

    #[test]
    fn ranges_hold_all_that_is_wanted_and_no_gap_that_is_long() {
        let near = sections(&[(4_096, 10_000), (16_384, 10_000), (200_000, 5_000)]);
        assert_eq!(
            ranges(&near, 0, 1 << 20),
            [(4_096, 26_384), (200_000, 205_000)]
        );
        assert_eq!(
            ranges(&near, 20_000, 1 << 20),
            [(20_000, 26_384), (200_000, 205_000)]
        );
        assert_eq!(ranges(&near, 205_000, 1 << 20), []);
        assert_eq!(ranges(&[], 0, 1 << 20), []);
    }

    #[test]
    fn no_range_is_longer_than_a_part() {
        let long = sections(&[(4_096, 100_000), (106_496, 30_000)]);
        let ranges = ranges(&long, 0, 40_000);
        let mut at = 4_096;
        for (start, end) in &ranges {
            assert!(
                *start <= at.max(106_496) && end - start <= 40_000,
                "{ranges:?}"
            );
            at = *end;
        }
        assert_eq!(at, 136_496);
    }
}
