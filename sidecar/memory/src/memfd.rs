//! Sealed memfds: nobody can truncate one under a mapping, so no process that maps it takes a SIGBUS. Of base pages: seals do not keep a
//! process with the descriptor from punching holes. There a page of zeros comes back, charged to who touches it next; a huge page comes
//! of those that are free on the node, and where none is, or the cgroup's limit is reached, the touch is a SIGBUS.

use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstatfs, ftruncate, memfd_create};
use rustix::io::Errno;

/// Seals of every memfd that is passed on: size is fixed for ever, and nobody can add further seals (a write seal would end all writes). Memory that
/// comes back must have all of them.
pub const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Page size of an arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pages {
    /// What the kernel gives (4 KiB, or transparent huge pages where it is set up so).
    Base,
    /// hugetlbfs pages of 2 MiB, reserved on the node beforehand.
    Huge2Mi,
    /// hugetlbfs pages of 1 GiB.
    Huge1Gi,
}

impl Pages {
    /// Bytes that a size must be a multiple of.
    pub fn bytes(self) -> u64 {
        match self {
            Self::Base => 4 << 10,
            Self::Huge2Mi => 2 << 20,
            Self::Huge1Gi => 1 << 30,
        }
    }

    /// Those of a file. One that cannot be asked, or of pages of another size, counts as of base pages: those are limited most.
    pub fn of(file: impl AsFd) -> Self {
        let Ok(stat) = fstatfs(file) else {
            return Self::Base;
        };
        // Types differ between architectures; the numbers are small.
        match (stat.f_type as u64, stat.f_bsize as u64) {
            (HUGETLBFS_MAGIC, bytes) if bytes == Self::Huge2Mi.bytes() => Self::Huge2Mi,
            (HUGETLBFS_MAGIC, bytes) if bytes == Self::Huge1Gi.bytes() => Self::Huge1Gi,
            _ => Self::Base,
        }
    }
}

/// File system type of a memfd of huge pages (`linux/magic.h`).
const HUGETLBFS_MAGIC: u64 = 0x958458f6;

/// The kernel refused to make, seal or map a memfd.
#[derive(Debug, thiserror::Error)]
#[error("memfd {name} of {bytes} bytes: {step} failed: {source}")]
pub struct MemfdError {
    pub name: &'static str,
    pub bytes: u64,
    pub step: &'static str,
    pub source: Errno,
}

/// Makes a memfd of `bytes` bytes, zeroed, unpopulated, with [`SEALS`].
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
    // Kernels before 6.3 do not know NOEXEC_SEAL; later ones may log or refuse without it.
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
