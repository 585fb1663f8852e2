//! The limit of a disk: the same sizes and depth by threads that read and write one file directly, and nothing else.

use super::Load;
use super::measure::{Part, Phase};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

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
    let put = phase(&file, load, Part::Put, load.operations());
    phase(&file, load, Part::Get, put);
}

fn phase(file: &File, load: Load, part: Part, count: u64) -> u64 {
    let next = AtomicU64::new(0);
    let bytes = load.size.0 as usize;
    let phase = Phase::begin();
    let until = Instant::now() + load.time();
    let work = || {
        let mut memory = vec![0xA7; bytes + ALIGN];
        let from = memory.as_ptr().align_offset(ALIGN);
        let buffer = memory.get_mut(from..from + bytes).unwrap();
        let mut times: Vec<Duration> = Vec::new();
        while Instant::now() < until {
            let number = next.fetch_add(1, Relaxed);
            if number >= count {
                break;
            }
            let begun = Instant::now();
            match part {
                Part::Put => file.write_all_at(buffer, number * load.size.0).unwrap(),
                Part::Get => file.read_exact_at(buffer, number * load.size.0).unwrap(),
            }
            times.push(begun.elapsed());
        }
        times
    };
    let times: Vec<Duration> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..load.in_flight).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .flat_map(|t| t.join().unwrap())
            .collect()
    });
    if matches!(part, Part::Put) {
        file.sync_data().unwrap();
    }
    let done = times.len() as u64;
    phase.end(part, load, times);
    done
}
