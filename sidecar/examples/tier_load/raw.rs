//! The limit of a disk: the same sizes and depth by threads that read and write one file directly, and nothing else.
#![allow(unsafe_code, reason = "file calls at addresses of the arena")]

use super::Load;
use super::measure::{Part, Phase, Turns, threads};
use super::objects::Slots;
use kvcachepool_tiers::Span;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Direct I/O wants addresses, offsets and lengths that are multiples of this.
const ALIGN: u64 = 4096;

/// From and to the slots: the kernel cuts its requests where memory is not of one piece, so other memory would have another limit.
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
    let mut spans: Vec<_> = (0..load.in_flight).map(|n| slots.span(n)).collect();
    let put = phase(&file, load, &mut spans, Part::Put, load.operations());
    phase(&file, load, &mut spans, Part::Get, put);
}

fn phase(file: &File, load: Load, spans: &mut [Span], part: Part, count: u64) -> u64 {
    let phase = Phase::begin("raw");
    let turns = Turns::begin(part, count, load);
    let times = threads(&turns, spans, |span, number| {
        moved(file, part, span, number * load.size.0);
    });
    if matches!(part, Part::Put) {
        file.sync_data().unwrap();
    }
    let done = times.len() as u64;
    phase.end(part, load, times);
    done
}

/// All bytes of a slot, to the file or from it.
fn moved(file: &File, part: Part, span: &Span, offset: u64) {
    let mut done = 0;
    while done < span.length {
        let bytes = span.length - done;
        let start = span.arena.address(span.offset + done, bytes).unwrap();
        let (fd, at) = (file.as_raw_fd(), (offset + done) as libc::off_t);
        // SAFETY: the range lies within a mapping that the span holds; the kernel keeps nothing, and no reference is made.
        let n = unsafe {
            match part {
                Part::Put => libc::pwrite(fd, start.as_ptr().cast(), bytes as usize, at),
                Part::Get => libc::pread(fd, start.as_ptr().cast(), bytes as usize, at),
            }
        };
        assert!(n > 0, "{}", std::io::Error::last_os_error());
        done += n as u64;
    }
}
