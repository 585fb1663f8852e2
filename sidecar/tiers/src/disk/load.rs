//! Reads a folder's state: snapshot, then journal. Whatever was truncated, corrupted or left over, the result is a state that was
//! durable once.

use super::fault::failed;
use super::files::{journal_file, snapshot_file};
use super::folder::{Folder, Listing};
use super::journal::Journal;
use super::record::{Scan, scan};
use super::state::{Bounds, State};
use crate::TierError;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::File;
use tracing::warn;

/// Reads a claimed folder and removes leftover files.
pub fn load(folder: &Folder, bounds: Bounds) -> Result<(State, Journal), TierError> {
    let listing = folder.list()?;
    let mut state = State::new(bounds);
    state.counts.foreign_files = listing.foreign;
    for name in &listing.unfinished {
        folder.remove(name)?;
    }
    containers(folder, &listing, &mut state)?;
    let generation = generation(&listing);
    let snapshot = read(folder, &snapshot_file(generation), &mut state)?;
    let journal = read(folder, &journal_file(generation), &mut state)?;
    state.settle();
    // A snapshot is complete before it gets its name.
    state.counts.corrupt_records = snapshot.corrupt + journal.corrupt;
    state.counts.corrupt_records += snapshot
        .torn_bytes
        .div_ceil(super::record::RECORD_BYTES as u64);
    state.counts.torn_tails = u64::from(journal.torn_bytes > 0);
    let stale = |g: &&u64| **g != generation;
    for number in listing.snapshots.iter().filter(stale) {
        folder.remove(&snapshot_file(*number))?;
    }
    for number in listing.journals.iter().filter(stale) {
        folder.remove(&journal_file(*number))?;
    }
    loop {
        match Journal::open(folder, generation, journal.end) {
            Ok(journal) => {
                let state = shrink(folder, state, bounds)?;
                let found = state.counts.named().into_iter();
                for (event, count) in found.filter(|(_, count)| *count > 0) {
                    warn!(
                        tier = "disk",
                        event, count, "found problems while reading the folder"
                    );
                }
                return Ok((state, journal));
            }
            // The file system is completely full: the coldest container is evicted.
            Err(e) if e.cause == crate::Cause::Full => {
                let file = state.drain_coldest(None).ok_or(e)?;
                folder.remove(&file.name())?;
            }
            Err(e) => return Err(e),
        }
    }
}

/// Adds the containers whose files have the right length.
fn containers(folder: &Folder, listing: &Listing, state: &mut State) -> Result<(), TierError> {
    let mut seen = std::collections::HashSet::new();
    for file in &listing.containers {
        if folder.length(&file.name())? >= file.bytes() && seen.insert(file.id) {
            state.space.add(file.id, file.units, file.slots, None);
        } else {
            // It was not finished, or was truncated later.
            folder.remove(&file.name())?;
            state.space.saw_id(file.id);
            state.counts.lost_containers += 1;
        }
    }
    Ok(())
}

/// The newest snapshot's generation; its journal may not exist yet. Without snapshots, the first journal's.
fn generation(listing: &Listing) -> u64 {
    let newest = listing.snapshots.iter().max();
    let first = listing.journals.iter().min();
    newest.or(first).copied().unwrap_or(0)
}

fn read(folder: &Folder, name: &str, state: &mut State) -> Result<Scan, TierError> {
    let fail = |e: std::io::Error| failed("read", &folder.place(name), e);
    match folder.open_file(name, OFlags::RDONLY) {
        Ok(file) => scan(&File::from(file), |record| state.replay(&record)).map_err(fail),
        Err(Errno::NOENT) => Ok(Scan::default()),
        Err(e) => Err(fail(e.into())),
    }
}

/// Adapts the state to a lower capacity.
fn shrink(folder: &Folder, mut state: State, bounds: Bounds) -> Result<State, TierError> {
    while state.space.bytes() > bounds.capacity {
        let Some(file) = state.drain_coldest(None) else {
            break;
        };
        folder.remove(&file.name())?;
    }
    Ok(state)
}
