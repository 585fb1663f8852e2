//! Measures the speeds of this node, and what each one limits.

use super::deadline::Deadline;
use super::facilities::unnamed;
use super::report::{Speed, SpeedName};
use kvcachepool_memory::mapping::Mapping;
use rustix::fd::OwnedFd;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Duration of a measurement: some periods of a CPU quota (100 ms), so that throttling shows.
const LONG: Duration = Duration::from_millis(300);
/// Timeout of one measurement with its preparation.
const LONGEST: Duration = Duration::from_secs(3);
/// Bytes of one step; the time is checked between steps.
const STEP_BYTES: usize = 4 << 20;
/// Size of the memory area: more than most caches hold. The table says when a cache holds more: to fill an area twice as large as the
/// cache would take longer than the measurement.
const AREA_BYTES: u64 = 64 << 20;
/// Bytes on disk.
const DISK_BYTES: u64 = 64 << 20;
const DISK_STEP_BYTES: usize = 1 << 20;
/// Alignment of direct I/O.
const ALIGN_BYTES: usize = 4096;

/// Size of the memory area: at most an eighth of the free memory, because two areas are held at a time and a sidecar in the same
/// container may need the rest. `None` when that is too small for a measurement.
fn area(room_bytes: u64) -> Option<usize> {
    let bytes = usize::try_from(AREA_BYTES.min(room_bytes / 8)).ok()?;
    let bytes = bytes / STEP_BYTES * STEP_BYTES;
    (bytes >= 2 * STEP_BYTES).then_some(bytes)
}

pub fn measured(
    deadline: Deadline,
    disk: Option<PathBuf>,
    room_bytes: u64,
    cores: u32,
) -> Vec<Speed> {
    let mut speeds = Vec::new();
    let area = area(room_bytes);
    let memory = [
        SpeedName::CopyOneThread,
        SpeedName::CopyAllCores,
        SpeedName::ArenaWrite,
        SpeedName::ArenaRead,
        SpeedName::Digest,
    ];
    for name in memory {
        let threads = if name == SpeedName::CopyAllCores {
            cores.clamp(1, 64)
        } else {
            1
        };
        let found = match area {
            Some(bytes) => timed(deadline, move || in_memory(name, bytes, threads)),
            None => Err("NoRoom".into()),
        };
        speeds.push(row(name, found, area.unwrap_or(0) as u64, threads));
    }
    if let Some(folder) = disk {
        let (write, read) = match timed(deadline, move || on_disk(&folder)) {
            Ok((write, read)) => (Ok(write), Ok(read)),
            Err(reason) => (Err(reason.clone()), Err(reason)),
        };
        speeds.push(row(SpeedName::DiskWrite, write, DISK_BYTES, 1));
        speeds.push(row(SpeedName::DiskRead, read, DISK_BYTES, 1));
    }
    speeds
}

fn timed<T: Send + 'static>(
    deadline: Deadline,
    look: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, String> {
    let found = deadline.within(LONGEST, look);
    found.unwrap_or_else(|| Err("TimedOut".into()))
}

/// One measurement, and what it limits.
pub(super) fn row(
    name: SpeedName,
    found: Result<u64, String>,
    over_bytes: u64,
    threads: u32,
) -> Speed {
    let bounds = match name {
        SpeedName::CopyOneThread => "a hit's copy to a vLLM on CPUs, by one thread",
        SpeedName::CopyAllCores => "all copies and digests of the node together",
        SpeedName::Digest => "how soon a stored chunk can be hit, by one thread",
        SpeedName::ArenaWrite => "stores, and loads from lower tiers",
        SpeedName::ArenaRead => "hits, and writes to lower tiers",
        SpeedName::DiskWrite => "stores to the disk tier, one at a time",
        SpeedName::DiskRead => "hits in the disk tier, one at a time",
        SpeedName::PinnedToDevice => "loads by vLLM's worker",
        SpeedName::PinnedFromDevice => "stores by vLLM's worker",
        SpeedName::PinnedBothWays => "loads and stores at the same time",
        SpeedName::WindowRoundTrip => "a store and its load by a window",
        SpeedName::DecodeIdle => "kernels like decoding, on an idle device",
        SpeedName::DecodeBeside => "the same beside copies both ways at full rate",
    };
    let (bytes_per_second, reason) = match found {
        Ok(bytes) => (Some(bytes), String::new()),
        Err(reason) => (None, reason),
    };
    Speed {
        name,
        bytes_per_second,
        over_bytes,
        threads,
        bounds: bounds.into(),
        reason,
    }
}

fn in_memory(name: SpeedName, bytes: usize, threads: u32) -> Result<u64, String> {
    // Written, so that its pages exist.
    let mut plain = vec![0x5a; bytes];
    match name {
        SpeedName::CopyOneThread | SpeedName::CopyAllCores => {
            let mut to = vec![0xa5; bytes];
            Ok(copied(&plain, &mut to, threads as usize))
        }
        SpeedName::ArenaWrite => {
            let arena = arena(bytes)?;
            Ok(walked(bytes, STEP_BYTES, |at| {
                black_box(arena.write(at as u64, step(&plain, at)));
            }))
        }
        SpeedName::ArenaRead => {
            let arena = arena(bytes)?;
            Ok(walked(bytes, STEP_BYTES, |at| {
                let into = plain.get_mut(at..at + STEP_BYTES).unwrap_or_default();
                black_box(arena.read(at as u64, into));
            }))
        }
        SpeedName::Digest => {
            drop(plain);
            let arena = arena(bytes)?;
            Ok(walked(bytes, STEP_BYTES, |at| {
                black_box(arena.xxh3_128(at as u64, STEP_BYTES as u64));
            }))
        }
        _ => Err("NotInMemory".into()),
    }
}

fn arena(bytes: usize) -> Result<Mapping, String> {
    let bytes = bytes as u64;
    let arena = Mapping::private("kvcachepool-doctor", bytes).map_err(|e| e.to_string())?;
    arena.populate(0, bytes).map_err(|e| e.to_string())?;
    Ok(arena)
}

fn step(bytes: &[u8], at: usize) -> &[u8] {
    bytes.get(at..at + STEP_BYTES).unwrap_or_default()
}

/// Bytes per second of repeated steps through an area.
fn walked(bytes: usize, step: usize, mut one: impl FnMut(usize)) -> u64 {
    let (began, mut done, mut at) = (Instant::now(), 0u64, 0);
    loop {
        one(at);
        done += step as u64;
        at += step;
        if at + step > bytes {
            at = 0;
        }
        if began.elapsed() >= LONG {
            return rate(done, began.elapsed());
        }
    }
}

fn rate(bytes: u64, took: Duration) -> u64 {
    (bytes as f64 / took.as_secs_f64().max(1e-9)) as u64
}

/// Each thread copies its own part.
fn copied(from: &[u8], to: &mut [u8], threads: usize) -> u64 {
    let part = (from.len() / threads.max(1)).max(1);
    let parts = from.chunks_exact(part).zip(to.chunks_exact_mut(part));
    std::thread::scope(|scope| {
        let copies = parts.map(|(from, to)| {
            let step = part.min(STEP_BYTES);
            scope.spawn(move || {
                walked(part, step, |at| {
                    if let Some(to) = to.get_mut(at..at + step)
                        && let Some(from) = from.get(at..at + step)
                    {
                        black_box(&mut *to).copy_from_slice(black_box(from));
                    }
                })
            })
        });
        // All threads start before the first is joined.
        let copies: Vec<_> = copies.collect();
        copies.into_iter().filter_map(|c| c.join().ok()).sum()
    })
}

/// Bytes per second written and read.
fn on_disk(folder: &Path) -> Result<(u64, u64), String> {
    let file = unnamed(folder).map_err(|e| e.to_string())?;
    let space = rustix::fs::fstatvfs(&file).map_err(|e| e.to_string())?;
    // A sidecar may need the rest.
    if space.f_bavail.saturating_mul(space.f_frsize) < 4 * DISK_BYTES {
        return Err("NoRoom".into());
    }
    let mut memory = vec![0x5a; DISK_STEP_BYTES + ALIGN_BYTES];
    let from = memory.as_ptr().align_offset(ALIGN_BYTES);
    let block = memory
        .get_mut(from..from + DISK_STEP_BYTES)
        .unwrap_or_default();
    let (began, mut written) = (Instant::now(), 0);
    // A slow disk gets less to read.
    while written < DISK_BYTES && began.elapsed() < LONG {
        written += moved(rustix::io::pwrite(&file, block, written))?;
    }
    synced(&file)?;
    let write = rate(written, began.elapsed());
    let (began, mut read, mut at) = (Instant::now(), 0, 0);
    while began.elapsed() < LONG {
        let got = moved(rustix::io::pread(&file, &mut *block, at))?;
        read += got;
        at = (at + got) % written;
    }
    Ok((write, rate(read, began.elapsed())))
}

fn synced(file: &OwnedFd) -> Result<(), String> {
    rustix::fs::fdatasync(file).map_err(|e| e.to_string())
}

fn moved(result: Result<usize, rustix::io::Errno>) -> Result<u64, String> {
    match result {
        Ok(0) => Err("the kernel transferred no bytes".into()),
        Ok(bytes) => Ok(bytes as u64),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_area_leaves_room_for_others() {
        const MIB: u64 = 1 << 20;
        for (room, expected) in [
            (8 << 30, Some(64 * MIB)),
            (256 * MIB, Some(32 * MIB)),
            (63 * MIB, None),
            (0, None),
        ] {
            assert_eq!(area(room).map(|bytes| bytes as u64), expected, "{room}");
        }
    }

    #[test]
    fn every_way_is_measured_or_says_why_not() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Some(folder.path().to_owned());
        let speeds = measured(Deadline::start(), disk, 512 << 20, 2);
        assert_eq!(speeds.len(), 7);
        for speed in &speeds {
            let found = speed.bytes_per_second.is_some_and(|bytes| bytes > 0);
            assert_eq!(found, speed.reason.is_empty(), "{speed:?}");
        }
        let memory = speeds.iter().take(5);
        assert!(memory.clone().all(|s| s.reason.is_empty()), "{speeds:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn without_room_no_memory_is_taken() {
        let speeds = measured(Deadline::start(), None, 0, 2);
        assert!(speeds.iter().all(|s| s.reason == "NoRoom"), "{speeds:?}");
        assert_eq!(speeds.len(), 5);
    }
}
