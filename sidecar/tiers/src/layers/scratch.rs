//! Private memory: a mapping for each operation that needs one, with a limit over all of them.

use super::{Op, deadline};
use crate::{Cause, Kind, Span, TierError};
use kvcachepool_memory::mapping::Mapping;
use parking_lot::Mutex;
use std::any::Any;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Alignment for direct I/O.
const ALIGN: u64 = 4096;
const MI: u64 = 1 << 20;

/// Keeps an operation's share of the room until the last span and the last clone are dropped.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// Room in MiB for all operations of a tier, possibly a share of a room of several tiers. Clones belong to the same tier.
#[derive(Debug, Clone)]
pub struct Room {
    left: Arc<Semaphore>,
    all: u64,
    /// The free part of the tier's share.
    own: Arc<Semaphore>,
    share: u64,
    kept: Kept,
}

/// Mappings of earlier operations, within the free part of a room. Faulting in new pages takes longer than copying their content.
type Kept = Arc<Mutex<Vec<Arc<Mapping>>>>;

/// Gives a mapping back with the last span into it.
struct Lent {
    mapping: Arc<Mapping>,
    kept: Kept,
    /// The operation's share of the room.
    _hold: Hold,
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.kept.lock().push(self.mapping.clone());
    }
}

impl Room {
    /// An amount that is reserved in the container's memory.
    pub fn new(bytes: u64) -> Self {
        let all = bytes / MI;
        Self {
            left: Arc::new(Semaphore::new(all as usize)),
            all,
            own: Arc::new(Semaphore::new(all as usize)),
            share: all,
            kept: Kept::default(),
        }
    }

    /// The same room, divided among this many tiers.
    pub fn of_tiers(self, tiers: usize) -> Self {
        let share = (self.all / tiers.max(1) as u64).max(1);
        Self { share, ..self }.of_another()
    }

    /// The same room, for another tier.
    pub fn of_another(&self) -> Self {
        let own = Arc::new(Semaphore::new(self.share as usize));
        Self {
            own,
            ..self.clone()
        }
    }

    /// Waits for `bytes` of room. `None`: the whole room is smaller. A tier uses at most its share, so that a slow tier does not delay the
    /// others. An operation that needs more waits until its tier uses nothing else; such operations of different tiers take turns.
    pub async fn take(&self, bytes: u64) -> Option<Hold> {
        let wanted = bytes.div_ceil(MI).max(1);
        if wanted > self.all {
            return None;
        }
        let own = wanted.min(self.share) as u32;
        // The semaphores are never closed.
        let own = self.own.clone().acquire_many_owned(own).await;
        let left = self.left.clone().acquire_many_owned(wanted as u32).await;
        Some(Arc::new((own.ok(), left.ok())))
    }

    /// The same, waiting at most as long as the operation may take that needs it, which moves `moved` bytes.
    pub async fn take_within(
        &self,
        kind: Kind,
        deadline: deadline::Options,
        op: Op,
        bytes: u64,
        moved: u64,
    ) -> Result<Option<Hold>, TierError> {
        let longest = deadline.longest(op, moved, 1);
        let taken = timeout(longest, self.take(bytes)).await;
        taken.map_err(|_| {
            let (op, seconds) = (op.name(), longest.as_secs_f64());
            let detail = format!(
                "no room to convert or pack for {seconds:.1} s, because other operations use it; {op} was not tried"
            );
            TierError::new(kind, Cause::Busy, detail)
        })
    }

    /// Spans of these lengths in a mapping that later operations use again. `hold`: from this room, for at least these bytes. The content is
    /// that of an earlier operation.
    pub fn scratch(&self, kind: Kind, lengths: &[u64], hold: Hold) -> Result<Scratch, TierError> {
        let bytes = length_of(lengths).next_multiple_of(MI);
        let (same, _gone) = {
            let mut kept = self.kept.lock();
            let same = kept.iter().position(|mapping| mapping.length() == bytes);
            let same = same.map(|at| kept.swap_remove(at));
            // Kept memory and that of running operations fit into the room together.
            let free = self.left.available_permits() as u64 * MI;
            let mut all: u64 = kept.iter().map(|mapping| mapping.length()).sum();
            let mut gone = Vec::new();
            while all > free
                && let Some(mapping) = kept.pop()
            {
                all -= mapping.length();
                gone.push(mapping);
            }
            (same, gone)
        };
        let mapping = match same {
            Some(mapping) => mapping,
            None => mapping_of(kind, bytes)?,
        };
        let lent = Lent {
            mapping: mapping.clone(),
            kept: self.kept.clone(),
            _hold: hold,
        };
        Scratch::within(kind, mapping, lengths, Arc::new(lent))
    }

    /// Room from any share, if it is free now: for callers that already hold room.
    pub fn try_take(&self, bytes: u64) -> Option<Hold> {
        let wanted = u32::try_from(bytes.div_ceil(MI).max(1)).ok()?;
        let permit = self.left.clone().try_acquire_many_owned(wanted).ok()?;
        Some(Arc::new(permit))
    }
}

/// Bytes of a mapping with spans of these lengths.
fn length_of(lengths: &[u64]) -> u64 {
    let bytes: u64 = lengths.iter().map(|n| n.next_multiple_of(ALIGN)).sum();
    bytes.max(ALIGN)
}

fn mapping_of(kind: Kind, bytes: u64) -> Result<Arc<Mapping>, TierError> {
    let mapping = Mapping::private("kvcachepool-scratch", bytes);
    let mapping = mapping.map_err(|e| failed(kind, &e.to_string()))?;
    Ok(Arc::new(mapping))
}

fn failed(kind: Kind, why: &str) -> TierError {
    TierError::new(kind, Cause::Io, format!("cannot allocate memory: {why}"))
}

/// A mapping, cut into spans. Untouched pages take no memory.
#[derive(Debug)]
pub struct Scratch {
    pub spans: Vec<Span>,
    hold: Hold,
}

impl Scratch {
    /// Spans of these lengths; each has a hold.
    pub fn new(kind: Kind, lengths: &[u64], hold: Hold) -> Result<Self, TierError> {
        let mapping = mapping_of(kind, length_of(lengths))?;
        Self::within(kind, mapping, lengths, hold)
    }

    fn within(
        kind: Kind,
        mapping: Arc<Mapping>,
        lengths: &[u64],
        hold: Hold,
    ) -> Result<Self, TierError> {
        let mut at = 0;
        let span = |length: &u64| {
            let span = Span::new(mapping.clone(), at, *length, hold.clone());
            at += length.next_multiple_of(ALIGN);
            span
        };
        let spans: Option<Vec<_>> = lengths.iter().map(span).collect();
        let spans = spans.ok_or_else(|| failed(kind, "a span is outside of its mapping"))?;
        Ok(Self { spans, hold })
    }

    /// Writes bytes to the start of a span, and shortens the span to their length. False: they are longer than the span.
    pub fn fill(&mut self, index: usize, bytes: &[u8]) -> bool {
        let Some(span) = self.spans.get_mut(index).filter(|s| s.write(0, bytes)) else {
            return false;
        };
        let (arena, hold) = (span.arena.clone(), self.hold.clone());
        match Span::new(arena, span.offset, bytes.len() as u64, hold) {
            Some(cut) => {
                *span = cut;
                true
            }
            None => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind::Disk;

    fn kept(room: &Room) -> Vec<u64> {
        let kept = room.kept.lock();
        kept.iter().map(|mapping| mapping.length() / MI).collect()
    }

    #[tokio::test]
    async fn a_mapping_is_used_again_once_its_last_span_is_gone_and_only_within_the_room() {
        let room = Room::new(8 * MI);
        let other = room.clone().of_tiers(2);
        let taken = async |room: &Room, bytes: u64| {
            let hold = room.take(bytes).await.unwrap();
            room.scratch(KIND, &[bytes], hold).unwrap()
        };
        let first = taken(&room, 3 * MI).await;
        let (address, span) = (Arc::as_ptr(&first.spans[0].arena), first.spans[0].clone());
        drop(first);
        assert!(kept(&room).is_empty(), "a span is still used");
        drop(span);
        assert_eq!(kept(&room), [3]);
        // Another tier shares the room and its memory.
        let again = taken(&other, 3 * MI - 5).await;
        assert_eq!(Arc::as_ptr(&again.spans[0].arena), address);
        let more = taken(&room, 3 * MI).await;
        drop((again, more));
        assert_eq!(kept(&room), [3, 3]);
        // Room for another length comes from what is kept.
        let long = taken(&room, 4 * MI).await;
        assert_eq!(kept(&room), [3]);
        let longer = taken(&room, 2 * MI).await;
        assert!(kept(&room).is_empty());
        drop((long, longer));
        assert_eq!(kept(&room).iter().sum::<u64>(), 6);
        assert_eq!(room.left.available_permits(), 8);
    }
}
