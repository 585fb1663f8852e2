//! The sidecar's half of a window in device memory: made, passed, copied both ways, and what becomes of it when somebody dies.

use crate::Rig;
use crate::data::Data;
use crate::report::{Check, Why, holds, same};

use kvcachepool_gpu::cuda::buffer::{Buffer, Pinned};
use kvcachepool_gpu::cuda::import::Imported;
use kvcachepool_gpu::cuda::peer::{self, Ask, NotPassed, Peer, WINDOW_BYTES, pattern};
use kvcachepool_gpu::device::{Device, NoWindow, Part, Progress, Ticket};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::{Direction, Unavailable};
use rustix::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

const ARENA_BYTES: u64 = 32 << 20;
/// By this argument the program is the second process.
pub const PEER: &str = "--other-process";
/// Longest that it may take for one answer: it makes a context first.
const ANSWER_LONGEST: Duration = Duration::from_secs(60);
/// Longest that a copy of some MiB may take.
const LONGEST: Duration = Duration::from_secs(20);

type Run = fn(&Rig) -> Result<String, Why>;

pub fn checks() -> Vec<Check> {
    let all: [(&str, Run); 10] = [
        ("made", made),
        ("seen by another process", by_descriptor),
        ("an IPC handle seen by another process", by_handle),
        ("loads", |rig| copied(rig, &[Direction::Load])),
        ("stores", |rig| copied(rig, &[Direction::Store])),
        ("both directions at once", |rig| {
            copied(rig, &[Direction::Load, Direction::Store])
        }),
        ("page lock", page_lock),
        ("no device memory left", memory_out),
        ("the worker dies", importer_dies),
        ("the sidecar dies", exporter_dies),
    ];
    let named = all.into_iter();
    named
        .map(|(name, run)| Check::new(format!("window/{name}"), run))
        .collect()
}

fn window(rig: &Rig, bytes: u64) -> Result<Box<dyn Device>, NoWindow> {
    kvcachepool_gpu::cuda::open_alone(&rig.uuid, bytes)
}

fn arena() -> Result<Arc<Mapping>, Why> {
    let mapping = Mapping::private("gpu-check", ARENA_BYTES);
    Ok(Arc::new(mapping.map_err(|e| Why::Failed(e.to_string()))?))
}

fn made(rig: &Rig) -> Result<String, Why> {
    let mut window = window(rig, WINDOW_BYTES)?;
    let mut seen = vec![0; 4096];
    let last = WINDOW_BYTES - 4096;
    window.write(last, &pattern(3))?;
    window.read(last, &mut seen)?;
    same("the last page", &seen, &pattern(3))?;
    holds(
        window.write(last + 1, &seen).is_err(),
        "a write goes beyond the window",
    )?;
    Ok(window.memory())
}

/// A second process, which is this program.
fn peer(rig: &Rig) -> Result<Peer, NotPassed> {
    Peer::start(&[PEER, &rig.uuid], ANSWER_LONGEST)
}

fn by_descriptor(rig: &Rig) -> Result<String, Why> {
    peer::by_descriptor(&rig.uuid, &peer(rig)?)?;
    Ok("a pattern each way; mapped a second time".into())
}

fn by_handle(rig: &Rig) -> Result<String, Why> {
    peer::by_handle(&rig.context, peer(rig)?)?;
    Ok("a pattern each way".into())
}

fn ended(device: &mut dyn Device, ticket: Ticket) -> Result<(), Why> {
    let begun = Instant::now();
    loop {
        match device.progress(ticket) {
            Progress::Done => return Ok(()),
            Progress::Failed(error) | Progress::Unknown(error) => return Err(error.into()),
            Progress::Running => std::thread::yield_now(),
        }
        holds(begun.elapsed() < LONGEST, "a copy does not end")?;
    }
}

/// Parts of odd sizes at odd places: loads into the window's first half, stores from its second.
fn copied(rig: &Rig, directions: &[Direction]) -> Result<String, Why> {
    let half = WINDOW_BYTES / 2;
    let mut window = window(rig, WINDOW_BYTES)?;
    let arena = arena()?;
    let bytes = Data::Random.bytes(ARENA_BYTES as usize, 6);
    let inside = Data::Random.bytes(WINDOW_BYTES as usize, 7);
    holds(arena.write(0, &bytes), "the arena takes its bytes")?;
    window.write(0, &inside)?;
    let parts = |first: u64, arena: u64| -> Vec<Part> {
        let sizes = [1, 4096, (2 << 20) + 3, 64 << 10, 77];
        let mut at = 0;
        let place = |bytes| {
            let part = Part {
                window: first + at,
                arena: arena + 3 * at,
                bytes,
            };
            at += bytes + 5;
            part
        };
        sizes.map(place).into()
    };
    let (loads, stores) = (parts(0, 9), parts(half, 16 << 20));
    let mut tickets = Vec::new();
    for direction in directions {
        let parts = match direction {
            Direction::Load => loads.clone(),
            Direction::Store => stores.clone(),
        };
        tickets.push(window.begin(*direction, &arena, parts)?);
    }
    for ticket in tickets {
        ended(window.as_mut(), ticket)?;
    }
    let (mut arena_after, mut window_after) = (bytes.clone(), inside.clone());
    let range = |at: u64, bytes: u64| at as usize..(at + bytes) as usize;
    if directions.contains(&Direction::Load) {
        for part in &loads {
            let from = &bytes[range(part.arena, part.bytes)];
            window_after[range(part.window, part.bytes)].copy_from_slice(from);
        }
    }
    if directions.contains(&Direction::Store) {
        for part in &stores {
            let from = &inside[range(part.window, part.bytes)];
            arena_after[range(part.arena, part.bytes)].copy_from_slice(from);
        }
    }
    let mut seen = vec![0; WINDOW_BYTES as usize];
    window.read(0, &mut seen)?;
    same("the window", &seen, &window_after)?;
    let mut seen = vec![0; ARENA_BYTES as usize];
    holds(arena.read(0, &mut seen), "the arena is read")?;
    same("the arena", &seen, &arena_after)?;
    Ok(format!("{} parts each", loads.len()))
}

/// Locked, used and unlocked, twice: a lock that stayed would refuse the second.
fn page_lock(rig: &Rig) -> Result<String, Why> {
    let mapping = arena()?;
    let bytes = Data::Random.bytes(ARENA_BYTES as usize, 8);
    for _ in 0..2 {
        holds(mapping.write(0, &bytes), "the arena takes its bytes")?;
        let host = Pinned::new(&rig.context, mapping.clone())?;
        let buffer = Buffer::new(&rig.context, ARENA_BYTES)?;
        buffer.copy_in(&rig.stream, 0, &host, 0, ARENA_BYTES)?;
        rig.stream.synchronize()?;
        same("the device", &buffer.content()?, &bytes)?;
        holds(
            mapping.write(0, &vec![0; bytes.len()]),
            "the arena is cleared",
        )?;
        buffer.copy_out(&rig.stream, 0, &host, 0, ARENA_BYTES)?;
        rig.stream.synchronize()?;
        let mut seen = vec![0; bytes.len()];
        holds(mapping.read(0, &mut seen), "the arena is read")?;
        same("the arena", &seen, &bytes)?;
    }
    Ok(format!("{ARENA_BYTES} bytes there and back, twice"))
}

fn memory_out(rig: &Rig) -> Result<String, Why> {
    let (_, total) = rig.context.memory()?;
    let more = (total / (2 << 20) + 1) * (2 << 20);
    match window(rig, more) {
        Ok(_) => return Err(Why::Failed(format!("{more} bytes of {total} were given"))),
        Err(none) => holds(none.why == Unavailable::OutOfMemory, none.to_string())?,
    }
    window(rig, WINDOW_BYTES)?;
    Ok(format!(
        "{more} bytes are refused by name, {WINDOW_BYTES} given afterwards"
    ))
}

fn importer_dies(rig: &Rig) -> Result<String, Why> {
    let mut window = window(rig, WINDOW_BYTES)?;
    let Some(fd) = window.export().fd else {
        return Err(Why::Skipped(format!("NoDescriptor: {}", window.memory())));
    };
    window.write(0, &pattern(1))?;
    let peer = peer(rig)?;
    peer.ask(&Ask::MapDescriptor, Some(fd.as_fd()))?;
    drop(peer);
    let mut seen = vec![0; pattern(0).len()];
    window.read(0, &mut seen)?;
    same("the window", &seen, &pattern(1))?;
    Ok("the window is as it was".into())
}

/// Either the memory lives on or the driver says no; nobody hangs, and the context goes on working.
fn exporter_dies(rig: &Rig) -> Result<String, Why> {
    let bytes = WINDOW_BYTES as usize;
    let seen = |mapped: Result<Imported, _>| -> Result<String, Why> {
        match mapped {
            Err::<_, kvcachepool_gpu::cuda::Failed>(failed) => Ok(failed.to_string()),
            Ok(imported) => {
                let mut seen = vec![0; pattern(0).len()];
                imported.read(&mut seen)?;
                Ok(match seen == pattern(1) {
                    true => "its bytes are there".into(),
                    false => "other bytes are there".into(),
                })
            }
        }
    };
    let peer = peer(rig)?;
    let (_, fd) = peer.ask(&Ask::MakeWindow, None)?;
    let mapped = match &fd {
        Some(fd) => Some(Imported::by_descriptor(&rig.context, fd.as_fd(), bytes)?),
        None => None,
    };
    let (handle, _) = peer.ask(&Ask::MakeBuffer, None)?;
    drop(peer);
    let before = match mapped {
        Some(mapped) => seen(Ok(mapped))?,
        None => "no descriptor".into(),
    };
    holds(
        before != "other bytes are there",
        "memory that was mapped changed when its maker died",
    )?;
    let after = match &fd {
        Some(fd) => seen(Imported::by_descriptor(&rig.context, fd.as_fd(), bytes))?,
        None => "no descriptor".into(),
    };
    let by_handle = seen(Imported::by_handle(&rig.context, &handle, bytes))?;
    page_lock(rig)?;
    Ok(format!(
        "mapped before: {before}; descriptor mapped afterwards: {after}; handle: {by_handle}"
    ))
}
