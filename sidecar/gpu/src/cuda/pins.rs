//! Page locks of the arena. A thread locks one unit after another, from the first working window on. Locks stay for the life of the
//! process: a returning worker finds them, and an unlock delays the node's drivers like a lock does. Copies do not wait for locks.
#![allow(unsafe_code)]

use super::api::{ALREADY_REGISTERED, Api, done};
use super::context::{Context, refused};
use crate::device::{NoWindow, Part};
use cudarc::driver::sys::CU_MEMHOSTREGISTER_PORTABLE;
use kvcachepool_engine::table::Table;
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::mapping::Mapping;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes per lock. A large lock delays driver calls on the whole node, by some 6 ms for this size.
const UNIT: u64 = 64 << 20;
/// Pause between two locks, for other users of the driver.
const PAUSE: Duration = Duration::from_millis(100);
/// Poll interval while no unlocked pages are populated.
const IDLE: Duration = Duration::from_secs(1);

static LOCKED: AtomicU64 = AtomicU64::new(0);

/// Bytes page-locked, over all arenas of this process.
pub fn locked_bytes() -> u64 {
    LOCKED.load(Ordering::Relaxed)
}

/// Starts to lock an arena, once. Its mapping is kept forever, because the driver needs the pages in place.
pub fn begin(context: &Arc<Context>, arena: &Arena) {
    static BEGUN: Mutex<Vec<Arc<Mapping>>> = Mutex::new(Vec::new());
    let mut begun = BEGUN.lock();
    if begun.iter().any(|known| Arc::ptr_eq(known, &arena.bytes)) {
        return;
    }
    let (context, locked) = (context.clone(), arena.clone());
    let thread = std::thread::Builder::new()
        .name("arena-lock".into())
        .spawn(move || work(&context, &locked));
    match thread {
        Ok(_) => begun.push(arena.bytes.clone()),
        Err(error) => tracing::warn!(%error, "page-locking the arena failed; copies are slower"),
    }
}

fn work(context: &Context, arena: &Arena) {
    let locked = lock_all(
        &arena.bytes,
        // The arena keeps its size from the first window on.
        arena.capacity_bytes(),
        || u64::from(arena.table().populated_rows()) * kvcachepool_engine::table::ROW_BYTES,
        // The driver accounts for locked pages on the device, outside the memory left to vLLM.
        |start, bytes| context.spare(0, || register(context.api, start, bytes)),
        std::thread::sleep,
    );
    match locked {
        Ok(()) => tracing::info!(bytes = arena.capacity_bytes(), "the arena is page-locked"),
        Err(reason) => {
            tracing::warn!(%reason, locked_bytes = locked_bytes(), "page-locking the arena stopped; copies are slower");
        }
    }
}

/// Locks populated pages unit by unit. The driver would allocate missing pages, and delay the node meanwhile. Returns at the end, or with
/// the refusal.
fn lock_all(
    arena: &Mapping,
    end: u64,
    populated: impl Fn() -> u64,
    lock: impl Fn(*mut u8, usize) -> Result<(), NoWindow>,
    pause: impl Fn(Duration),
) -> Result<(), NoWindow> {
    let mut at = 0;
    while at < end {
        let bytes = UNIT.min(end - at);
        if populated() >= at + bytes
            && let Some(start) = arena.address(at, bytes)
        {
            lock(start.as_ptr(), bytes as usize)?;
            LOCKED.fetch_add(bytes, Ordering::Relaxed);
            at += bytes;
            pause(PAUSE);
        } else {
            pause(IDLE);
        }
    }
    Ok(())
}

fn register(api: &Api, start: *mut u8, bytes: usize) -> Result<(), NoWindow> {
    // Portable: valid in all contexts of this process.
    // SAFETY: the range is in a mapping that is kept forever.
    match unsafe { (api.register)(start.cast(), bytes, CU_MEMHOSTREGISTER_PORTABLE) } {
        ALREADY_REGISTERED => Ok(()),
        result => done("cuMemHostRegister", result).map_err(refused),
    }
}

/// Splits a part at unit boundaries: the driver rejects a copy over memory with two locks, or with a lock for a part of it.
pub fn cut(part: Part) -> impl Iterator<Item = Part> {
    let end = part.arena + part.bytes;
    let first = part.arena / UNIT;
    let last = end.saturating_sub(1).max(part.arena) / UNIT;
    (first..=last).map(move |unit| {
        let from = part.arena.max(unit * UNIT);
        let to = end.min((unit + 1) * UNIT);
        Part {
            window: part.window + (from - part.arena),
            arena: from,
            bytes: to - from,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::window::Unavailable;
    use std::cell::{Cell, RefCell};

    #[test]
    fn a_part_is_cut_where_units_meet_and_loses_nothing() {
        let part = |window, arena, bytes| Part {
            window,
            arena,
            bytes,
        };
        for (whole, cuts) in [
            (part(7, 0, UNIT), vec![part(7, 0, UNIT)]),
            (
                part(7, UNIT - 3, 8),
                vec![part(7, UNIT - 3, 3), part(10, UNIT, 5)],
            ),
            (
                part(0, UNIT - 1, UNIT + 2),
                vec![
                    part(0, UNIT - 1, 1),
                    part(1, UNIT, UNIT),
                    part(1 + UNIT, 2 * UNIT, 1),
                ],
            ),
            (part(0, UNIT, 0), vec![part(0, UNIT, 0)]),
        ] {
            assert_eq!(cut(whole).collect::<Vec<_>>(), cuts);
        }
    }

    #[test]
    fn what_is_populated_is_locked_unit_by_unit_with_a_pause_behind_each() {
        let arena = Mapping::private("arena", 2 * UNIT + 4096).unwrap();
        let start = arena.address(0, 1).unwrap().as_ptr() as usize;
        let (log, pages) = (RefCell::new(Vec::new()), Cell::new(UNIT));
        let before = locked_bytes();
        let outcome = lock_all(
            &arena,
            arena.length(),
            || pages.get(),
            |at, bytes| {
                let at = at as usize - start;
                assert!((at + bytes) as u64 <= pages.get(), "pages are missing");
                log.borrow_mut().push((at, bytes));
                Ok(())
            },
            |pause| {
                log.borrow_mut().push((0, pause.as_millis() as usize));
                if log.borrow().len() == 4 {
                    pages.set(arena.length());
                }
            },
        );
        let unit = UNIT as usize;
        let wanted = [
            (0, unit),
            (0, 100),
            (0, 1000),
            (0, 1000),
            (unit, unit),
            (0, 100),
            (2 * unit, 4096),
            (0, 100),
        ];
        assert_eq!((outcome, &log.borrow()[..]), (Ok(()), &wanted[..]));
        assert_eq!(locked_bytes() - before, arena.length());
    }

    #[test]
    fn a_driver_that_refuses_is_not_asked_again() {
        let arena = Mapping::private("arena", 2 * UNIT).unwrap();
        let asked = Cell::new(0);
        let refuses = |_, _| {
            asked.set(asked.get() + 1);
            Err(NoWindow::new(Unavailable::OutOfMemory, "no more"))
        };
        let why = lock_all(&arena, arena.length(), || u64::MAX, refuses, |_| ()).unwrap_err();
        assert_eq!((why.why, asked.get()), (Unavailable::OutOfMemory, 1));
    }
}
