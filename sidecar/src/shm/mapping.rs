//! A shared mapping of a memfd, with checked access by offset.
#![allow(unsafe_code)]

use rustix::fd::BorrowedFd;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// A shared, writable mapping. Other processes write to the same pages, so bytes are reached through raw pointers and atomics;
/// whether a range is stable at the moment is a matter of the slot table, not of this type.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory that any thread may address; all accessors take bounds-checked offsets.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access goes through atomics or through copies whose stability the slot table decides.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes of `fd`, kept out of core dumps and out of forked children.
    pub fn new(fd: BorrowedFd<'_>, length: u64) -> Result<Self, Errno> {
        let length = usize::try_from(length).map_err(|_| Errno::NOMEM)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing of ours.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                fd,
                0,
            )?
        };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: the range was just mapped; the advice changes no content. A refusal only costs comfort.
            let _ = unsafe { madvise(start, length, advice) };
        }
        let start = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        Ok(Self { start, length })
    }

    /// Mapped bytes.
    pub fn length(&self) -> u64 {
        self.length as u64
    }

    fn at(&self, offset: u64, bytes: usize, align: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(bytes)?;
        if end > self.length || !offset.is_multiple_of(align) {
            return None;
        }
        // SAFETY: offset + bytes was checked to lie inside the mapping.
        Some(unsafe { self.start.as_ptr().add(offset) })
    }

    /// The 32-bit word at `offset` (4-byte aligned), `None` out of range.
    pub fn word(&self, offset: u64) -> Option<&AtomicU32> {
        let p = self.at(offset, 4, 4)?;
        // SAFETY: in range and aligned (mmap gives page alignment); the mapping lives as long as self; AtomicU32 has no invalid values.
        Some(unsafe { AtomicU32::from_ptr(p.cast()) })
    }

    /// The 64-bit word at `offset` (8-byte aligned), `None` out of range.
    pub fn word64(&self, offset: u64) -> Option<&AtomicU64> {
        let p = self.at(offset, 8, 8)?;
        // SAFETY: as for `word`.
        Some(unsafe { AtomicU64::from_ptr(p.cast()) })
    }

    /// Copies bytes out of the mapping; false and nothing done when out of range.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some(p) = self.at(offset, into.len(), 1) else {
            return false;
        };
        // SAFETY: source range checked, destination is ours and cannot overlap a mapping that nobody holds as a slice.
        unsafe { std::ptr::copy_nonoverlapping(p, into.as_mut_ptr(), into.len()) };
        true
    }

    /// Copies bytes into the mapping; false and nothing done when out of range.
    pub fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(p) = self.at(offset, from.len(), 1) else {
            return false;
        };
        // SAFETY: destination range checked; the source is ours and cannot overlap the mapping.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), p, from.len()) };
        true
    }

    /// xxh3-128 (little-endian) of `length` bytes at `offset`, `None` out of range. A writer beside it changes the result, nothing else:
    /// the caller counts it only if the slot still has the state and generation that it began with.
    pub fn xxh3_128(&self, offset: u64, length: u64) -> Option<[u8; 16]> {
        let length = usize::try_from(length).ok()?;
        let p = self.at(offset, length, 1)?;
        // SAFETY: the range is mapped and readable for the life of self. Another process may write to it while it is hashed; the
        // hash only loads bytes and indexes nothing by them, so the outcome is a wrong digest, which the caller's check of
        // state and generation discards.
        let bytes = unsafe { std::slice::from_raw_parts(p, length) };
        Some(xxhash_rust::xxh3::xxh3_128(bytes).to_le_bytes())
    }

    /// Makes the pages of a range exist and be charged to this process's cgroup, without changing their content.
    pub fn populate(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let bytes = usize::try_from(length).map_err(|_| Errno::INVAL)?;
        let p = self.at(offset, bytes, 4096).ok_or(Errno::INVAL)?;
        loop {
            // SAFETY: the range lies in this mapping; populating changes no content.
            match unsafe { madvise(p.cast(), bytes, Advice::LinuxPopulateWrite) } {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Kernels before 5.14 do not know the advice: touch every page, keeping what is there.
                Err(Errno::INVAL) => return self.touch(offset, length),
                Err(e) => return Err(e),
            }
        }
    }

    fn touch(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let mut at = offset;
        while at < offset + length {
            self.word(at)
                .ok_or(Errno::INVAL)?
                .fetch_or(0, std::sync::atomic::Ordering::Relaxed);
            at += 4096;
        }
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new` and no reference into it outlives self.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}
