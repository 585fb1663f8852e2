//! The limit of a disk: the same sizes and depth by threads that read and write one file directly, and nothing else.
#![allow(
    unsafe_code,
    reason = "the arena's memory is lent to file calls as plain bytes"
)]

use super::Load;
use super::measure::{Part, Phase, Turns, threads};
use super::objects::Slots;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Direct I/O wants addresses, offsets and lengths that are multiples of this.
const ALIGN: u64 = 4096;

/// From and to the slots: the kernel cuts its requests where memory is not of one piece, so other memory would have another limit.
/// Nobody else uses them while this runs.
pub fn run(folder: &Path, slots: &Slots, load: Load) {
    assert!(
        load.size.0.is_multiple_of(ALIGN),
        "whole pages can be read and written directly"
    );
    let path = folder.join(format!("raw-{}", std::process::id()));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .expect("a file for direct I/O");
    // It lives as long as it is open.
    std::fs::remove_file(&path).unwrap();
    let memory = |slot| {
        let (start, bytes) = slots.memory(slot);
        // SAFETY: the range is mapped as long as the slots live, slots do not overlap, and nobody else reads or writes them now.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), bytes) }
    };
    let mut memories: Vec<&mut [u8]> = (0..load.in_flight).map(memory).collect();
    let put = phase(&file, load, &mut memories, Part::Put, load.operations());
    phase(&file, load, &mut memories, Part::Get, put);
}

fn phase(file: &File, load: Load, memories: &mut [&mut [u8]], part: Part, count: u64) -> u64 {
    let phase = Phase::begin("raw");
    let turns = Turns::begin(part, count, load);
    let times = threads(&turns, memories, |memory, number| match part {
        Part::Put => file.write_all_at(memory, number * load.size.0).unwrap(),
        Part::Get => file.read_exact_at(memory, number * load.size.0).unwrap(),
    });
    if matches!(part, Part::Put) {
        file.sync_data().unwrap();
    }
    let done = times.len() as u64;
    phase.end(part, load, times);
    done
}
