//! Sealed memfds. Nobody can truncate one, so processes that map it get no SIGBUS, if it has base pages. Seals do not keep a process with
//! the descriptor from punching holes. A hole in base pages reads as zeros, charged to the process that touches it next. A hole in huge
//! pages takes a free huge page of the node; without one, or at the cgroup's limit, the touch is a SIGBUS.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstatfs, ftruncate, memfd_create};
use rustix::io::Errno;

/// Seals of every shared memfd: its size is fixed, and no further seals can be added (a write seal would end all writes). Adopted memory
/// must have all of them.
pub const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Page size of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// The kernel's default (4 KiB, or transparent huge pages if configured).
    Base,
    /// hugetlbfs pages of 2 MiB, reserved on the node in advance.
    Huge2Mi,
    /// hugetlbfs pages of 1 GiB.
    Huge1Gi,
}

impl Pages {
    /// Sizes must be a multiple of this. Bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Base => 4 << 10,
            Self::Huge2Mi => 2 << 20,
            Self::Huge1Gi => 1 << 30,
        }
    }

    /// Page size of a file. If it is unknown, base pages are assumed, because they have the strictest limit.
    pub fn of(file: impl AsFd) -> Self {
        let Ok(stat) = fstatfs(file) else {
            return Self::Base;
        };
        // Types differ between architectures; the values are small.
        match (stat.f_type as u64, stat.f_bsize as u64) {
            (HUGETLBFS_MAGIC, bytes) if bytes == Self::Huge2Mi.bytes() => Self::Huge2Mi,
            (HUGETLBFS_MAGIC, bytes) if bytes == Self::Huge1Gi.bytes() => Self::Huge1Gi,
            _ => Self::Base,
        }
    }
}

/// File system type of a memfd with huge pages (`linux/magic.h`).
const HUGETLBFS_MAGIC: u64 = 0x958458f6;

/// The kernel refused to create, seal or map a memfd.
#[derive(Debug, thiserror::Error)]
#[error("memfd {name} of {bytes} bytes: {step} failed: {source}")]
pub struct MemfdError {
    pub name: &'static str,
    pub bytes: u64,
    pub step: &'static str,
    pub source: Errno,
}

/// Creates a memfd of `bytes` bytes, zeroed, unpopulated, with [`SEALS`].
pub fn sealed(name: &'static str, bytes: u64, pages: Pages) -> Result<OwnedFd, MemfdError> {
    let fail = |step| {
        move |source| MemfdError {
            name,
            bytes,
            step,
            source,
        }
    };
    let huge = match pages {
        Pages::Base => MemfdFlags::empty(),
        Pages::Huge2Mi => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
        Pages::Huge1Gi => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
    };
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | huge;
    // Kernels before 6.3 lack NOEXEC_SEAL; later ones may log or refuse a memfd without it.
    let fd = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|e| {
            if e == Errno::INVAL {
                memfd_create(name, flags)
            } else {
                Err(e)
            }
        })
        .map_err(fail("memfd_create"))?;
    ftruncate(fd.as_fd(), bytes).map_err(fail("ftruncate"))?;
    fcntl_add_seals(fd.as_fd(), SEALS).map_err(fail("F_ADD_SEALS"))?;
    Ok(fd)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_says_of_which_pages_it_is() {
        for pages in [Pages::Base, Pages::Huge2Mi, Pages::Huge1Gi] {
            // No page is taken before it is mapped.
            match sealed("pages-test", 1 << 30, pages) {
                Ok(fd) => assert_eq!(Pages::of(&fd), pages),
                Err(e) => eprintln!("skipped: this kernel has no {pages:?}: {e}"),
            }
        }
    }
}
