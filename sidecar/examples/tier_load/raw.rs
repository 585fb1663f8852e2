//! The limit of a disk: the same sizes and depth by threads that read and write one file directly, and nothing else.

use super::Load;
use super::measure::{Part, Phase, Turns, threads};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Direct I/O wants addresses, offsets and lengths that are multiples of this.
const ALIGN: usize = 4096;

pub fn run(folder: &Path, load: Load) {
    assert!(
        load.size.0.is_multiple_of(ALIGN as u64),
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
    let bytes = load.size.0 as usize + ALIGN;
    let mut memories: Vec<_> = (0..load.in_flight).map(|_| vec![0xA7; bytes]).collect();
    let put = phase(&file, load, &mut memories, Part::Put, load.operations());
    phase(&file, load, &mut memories, Part::Get, put);
}

fn phase(file: &File, load: Load, memories: &mut [Vec<u8>], part: Part, count: u64) -> u64 {
    let phase = Phase::begin();
    let turns = Turns::begin(part, count, load);
    let times = threads(&turns, memories, |memory, number| {
        let from = memory.as_ptr().align_offset(ALIGN);
        let buffer = memory.get_mut(from..from + load.size.0 as usize).unwrap();
        match part {
            Part::Put => file.write_all_at(buffer, number * load.size.0).unwrap(),
            Part::Get => file.read_exact_at(buffer, number * load.size.0).unwrap(),
        }
    });
    if matches!(part, Part::Put) {
        file.sync_data().unwrap();
    }
    let done = times.len() as u64;
    phase.end(part, load, times);
    done
}
