//! A shared mapping of a memfd, with checked access by offset.
#![allow(unsafe_code)]

use super::digest::Digest;
use super::memfd::{MemfdError, Pages, sealed};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Block size of copies of long runs, which have at least this length. Rows and records of the slot table are read by words.
#[cfg(target_arch = "x86_64")]
const BLOCK_BYTES: usize = 64;
#[cfg(target_arch = "x86_64")]
const LONG_BYTES: usize = 2048;

/// A shared, writable mapping. Other processes write to the same pages, so no references into it are created: bytes are read as atomics and
/// written through raw pointers. The slot table, not this type, decides whether a range is stable.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping is plain memory that any thread may access; all accessors check their offsets.
unsafe impl Send for Mapping {}
// SAFETY: as above; shared access goes through atomics or through copies whose stability the slot table decides.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes of `fd`, excluded from core dumps and forked children.
    pub fn new(fd: BorrowedFd<'_>, length: u64) -> Result<Self, Errno> {
        let length = usize::try_from(length).map_err(|_| Errno::NOMEM)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other memory.
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
        let this = Self {
            start: NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?,
            length,
        };
        this.advise(start, length);
        Ok(this)
    }

    /// Excludes a range from core dumps and forked children.
    fn advise(&self, start: *mut c_void, bytes: usize) {
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            // SAFETY: the range is mapped, and the advice changes no content. A refusal is harmless.
            let _ = unsafe { madvise(start, bytes, advice) };
        }
    }

    /// Maps private memory. `name` appears in the process's list of mappings.
    pub fn private(name: &'static str, bytes: u64) -> Result<Self, MemfdError> {
        Ok(Self::with_fd(name, bytes)?.1)
    }

    /// Like `private`, with a descriptor for mapping it elsewhere.
    pub fn with_fd(name: &'static str, bytes: u64) -> Result<(OwnedFd, Self), MemfdError> {
        let fd = sealed(name, bytes, Pages::Base)?;
        match Self::new(fd.as_fd(), bytes) {
            Ok(mapping) => Ok((fd, mapping)),
            Err(source) => Err(MemfdError {
                name,
                bytes,
                step: "mmap",
                source,
            }),
        }
    }

    pub fn length(&self) -> u64 {
        self.length as u64
    }

    /// Maps the file anew from this offset (a multiple of the page size) on, which frees the page tables of that part.
    pub fn renew(&self, fd: BorrowedFd<'_>, offset: u64) -> Result<(), Errno> {
        let at = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        let bytes = self.length.saturating_sub(at);
        if bytes == 0 {
            return Ok(());
        }
        let start = self.at(offset, bytes, 4096).ok_or(Errno::INVAL)?;
        // SAFETY: the range lies in this mapping, which it replaces in one step by the same bytes of the same file; other threads see one
        // mapping or the other.
        unsafe {
            mmap(
                start.cast(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::FIXED,
                fd,
                offset,
            )?
        };
        self.advise(start.cast(), bytes);
        Ok(())
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

    /// The address of a range, for system calls that move its bytes; `None` out of range. The caller keeps the mapping until the kernel is
    /// done with it, and creates no reference to it.
    pub fn address(&self, offset: u64, bytes: u64) -> Option<NonNull<u8>> {
        let bytes = usize::try_from(bytes).ok()?;
        NonNull::new(self.at(offset, bytes, 1)?)
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

    /// The byte at `offset`, 0 out of range.
    fn byte(&self, offset: u64) -> u8 {
        self.at(offset, 1, 1).map_or(0, |p| {
            // SAFETY: in range; the mapping lives as long as self; AtomicU8 has no alignment and no invalid values.
            unsafe { AtomicU8::from_ptr(p) }.load(Relaxed)
        })
    }

    /// Copies bytes out of the mapping. Returns false without effect if out of range.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> bool {
        let Some(p) = self.at(offset, into.len(), 1) else {
            return false;
        };
        // SAFETY: `at` checked that the range is as long as `into`.
        let copied = unsafe { copy_blocks(p, into) };
        let (p, into) = (p.wrapping_add(copied), into.split_at_mut(copied).1);
        let offset = offset + copied as u64;
        let (head, rest) = into.split_at_mut(p.align_offset(8).min(into.len()));
        let (words, tail) = rest.as_chunks_mut::<8>();
        let at_words = head.len();
        let at_tail = at_words + words.len() * 8;
        for (i, byte) in head.iter_mut().enumerate() {
            *byte = self.byte(offset + i as u64);
        }
        for (i, word) in words.iter_mut().enumerate() {
            // SAFETY: `at` checked the range, and this offset is aligned for u64. All references to these bytes are atomic; a concurrent
            // write by another process yields a mix of old and new words.
            let shared = unsafe { AtomicU64::from_ptr(p.add(at_words + i * 8).cast()) };
            *word = shared.load(Relaxed).to_ne_bytes();
        }
        for (i, byte) in tail.iter_mut().enumerate() {
            *byte = self.byte(offset + (at_tail + i) as u64);
        }
        true
    }

    /// Copies bytes into the mapping. Returns false without effect if out of range.
    pub fn write(&self, offset: u64, from: &[u8]) -> bool {
        let Some(p) = self.at(offset, from.len(), 1) else {
            return false;
        };
        // SAFETY: the destination range was checked; the source is private and cannot overlap the mapping. The copy is plain, like those of
        // other processes, and may race with a read of the range by another thread, such as a digest of the slot's old content. Reads are
        // atomic or in assembly, and readers compare the slot's state and generation afterwards and discard mixed bytes.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), p, from.len()) };
        true
    }

    /// xxh3-128 (little-endian) of `length` bytes at `offset`, `None` out of range. A concurrent writer only changes the result: the caller
    /// uses it only if the slot still has the state and generation from the start.
    pub fn xxh3_128(&self, offset: u64, length: u64) -> Option<[u8; 16]> {
        let mut digest = Digest::default();
        digest.add(self, offset, length).then(|| digest.value())
    }

    /// Allocates the pages of a range, charged to this process's cgroup, without changing their content.
    pub fn populate(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let bytes = usize::try_from(length).map_err(|_| Errno::INVAL)?;
        let p = self.at(offset, bytes, 4096).ok_or(Errno::INVAL)?;
        loop {
            // SAFETY: the range lies in this mapping; populating changes no content.
            match unsafe { madvise(p.cast(), bytes, Advice::LinuxPopulateWrite) } {
                Ok(()) => return Ok(()),
                Err(Errno::INTR | Errno::AGAIN) => {}
                // Kernels before 5.14 lack this advice: touch every page and keep its content.
                Err(Errno::INVAL) => return self.touch(offset, length),
                Err(e) => return Err(e),
            }
        }
    }

    /// Touches each page by replacing a first word of zero with zero; a page with another value exists already. The compiler would drop an
    /// addition of zero.
    fn touch(&self, offset: u64, length: u64) -> Result<(), Errno> {
        let mut at = offset;
        while at < offset + length {
            let word = self.word(at).ok_or(Errno::INVAL)?;
            let _ = word.compare_exchange(0, 0, Relaxed, Relaxed);
            at += 4096;
        }
        Ok(())
    }
}

/// Copies whole blocks of a long run, and returns the number of bytes. [`Mapping::read`] copies the rest by words. In assembly: the
/// compiler turns atomic loads into 8-byte loads, which take twice as long, and must not see racing plain loads.
///
/// # Safety
/// `from` must be readable for the length of `into`; other processes may write there concurrently.
#[cfg(target_arch = "x86_64")]
unsafe fn copy_blocks(from: *const u8, into: &mut [u8]) -> usize {
    let bytes = into.len() / BLOCK_BYTES * BLOCK_BYTES;
    if bytes < LONG_BYTES {
        return 0;
    }
    // SAFETY: reads `bytes` bytes at `from`, which the caller guarantees, and writes as many to `into`, which is that long. A prefetch past
    // the end has no effect. The compiler sees no load that races with another process's stores.
    unsafe {
        std::arch::asm!(
            "2:",
            "prefetcht0 [{from} + 1024]",
            "movdqu {a}, [{from}]",
            "movdqu {b}, [{from} + 16]",
            "movdqu {c}, [{from} + 32]",
            "movdqu {d}, [{from} + 48]",
            "movdqu [{into}], {a}",
            "movdqu [{into} + 16], {b}",
            "movdqu [{into} + 32], {c}",
            "movdqu [{into} + 48], {d}",
            "add {from}, 64",
            "add {into}, 64",
            "sub {left}, 64",
            "jnz 2b",
            from = inout(reg) from => _,
            into = inout(reg) into.as_mut_ptr() => _,
            left = inout(reg) bytes => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
    bytes
}

/// Other CPUs copy by words only.
///
/// # Safety
/// No requirements.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn copy_blocks(_: *const u8, _: &mut [u8]) -> usize {
    0
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and no reference into it outlives self.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(length: usize) -> (Mapping, Vec<u8>) {
        let fd = sealed("mapping-test", length as u64, Pages::Base).unwrap();
        let mapping = Mapping::new(fd.as_fd(), length as u64).unwrap();
        let bytes: Vec<u8> = (0..length).map(|i| (i * 31 + i / 251) as u8).collect();
        assert!(mapping.write(0, &bytes));
        (mapping, bytes)
    }

    #[test]
    fn bytes_come_out_as_they_are_whatever_their_alignment() {
        let (mapping, bytes) = filled(4096);
        for offset in 0..16 {
            for length in [0, 1, 3, 7, 8, 9, 64, 1000, 2048, 2175, 4096 - offset] {
                let mut out = vec![0; length];
                assert!(mapping.read(offset as u64, &mut out));
                assert_eq!(out, bytes[offset..offset + length], "{length} at {offset}");
            }
        }
        assert!(!mapping.read(4095, &mut [0; 2]));
    }

    #[test]
    fn a_kernel_that_populates_nothing_itself_is_made_to_by_touching_every_page() {
        let (half, bytes) = (1 << 20, 2 << 20);
        let (fd, mapping) = Mapping::with_fd("touch-test", bytes).unwrap();
        assert!(mapping.write(half, b"kept"));
        mapping.touch(half, half).unwrap();
        let allocated = rustix::fs::fstat(&fd).unwrap().st_blocks as u64 * 512;
        assert!(allocated >= half, "{allocated}");
        let mut kept = [0; 4];
        assert!(mapping.read(half, &mut kept));
        assert_eq!(&kept, b"kept");
    }

    #[test]
    fn an_address_is_given_for_what_is_mapped_and_for_nothing_else() {
        let (mapping, _) = filled(8192);
        let start = mapping.address(0, 8192).unwrap().as_ptr() as usize;
        assert!(start.is_multiple_of(4096));
        let inner = mapping.address(4096, 4096).unwrap().as_ptr() as usize;
        assert_eq!(inner, start + 4096);
        for (offset, bytes) in [
            (0, 8193),
            (8192, 1),
            (1, 8192),
            (u64::MAX, 1),
            (1, u64::MAX),
        ] {
            assert_eq!(mapping.address(offset, bytes), None, "{bytes} at {offset}");
        }
    }
}
