//! How much memory this container may use. Exceeding it is an OOM kill and not an error, so it is checked in advance.

use super::memfd::Pages;
use kvcachepool_engine::table::Geometry;
use kvcachepool_protocol::config::beside_arena;
use std::path::{Path, PathBuf};

/// Memory of the machine in bytes; 0 if it is unknown.
pub fn machine_bytes() -> u64 {
    let meminfo = std::fs::read_to_string(MEMINFO).unwrap_or_default();
    machine(&meminfo).map_or(0, |limit| limit.bytes)
}

const MEMINFO: &str = "/proc/meminfo";

/// Where cgroups are mounted.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExceedsLimit {
    #[error(
        "{arena} bytes of memory.size and {overhead} bytes of other memory exceed the limit of {} bytes ({}): lower memory.size or raise the container's memory limit", limit.bytes, limit.source
    )]
    Memory {
        /// Bytes of the arena that count against this limit; 0 if it uses huge pages with a limit of their own.
        arena: u64,
        /// Bytes that the sidecar needs beside the arena.
        overhead: u64,
        limit: Limit,
    },
    #[error(
        "{arena} bytes of memory.size exceed the limit of {} bytes of huge pages ({}): lower memory.size or raise the container's limit of huge pages", limit.bytes, limit.source
    )]
    HugePages { arena: u64, limit: Limit },
}

/// A limit in bytes and the file that states it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    pub bytes: u64,
    pub source: String,
}

/// Checks an arena of these pages, the memory needed beside it, and `more` bytes against the limits of this process.
pub fn check(geometry: &Geometry, pages: Pages, more: u64) -> Result<(), ExceedsLimit> {
    let text = |path| std::fs::read_to_string(path).unwrap_or_default();
    let own = text("/proc/self/cgroup");
    Limits {
        memory: memory_limit(Path::new(CGROUP_ROOT), &own, &text(MEMINFO)),
        huge_pages: huge_pages_limit(Path::new(CGROUP_ROOT), &own, pages),
        huge_pages_are_memory: charges_huge_pages(&text("/proc/self/mounts")),
    }
    .check(geometry, pages, more)
}

struct Limits {
    memory: Option<Limit>,
    huge_pages: Option<Limit>,
    /// Huge pages count against the memory limit too.
    huge_pages_are_memory: bool,
}

impl Limits {
    fn check(self, geometry: &Geometry, pages: Pages, more: u64) -> Result<(), ExceedsLimit> {
        let arena = geometry.arena_bytes;
        if let Some(limit) = self.huge_pages
            && arena > limit.bytes
        {
            return Err(ExceedsLimit::HugePages { arena, limit });
        }
        let counts = pages == Pages::Base || self.huge_pages_are_memory;
        let arena = if counts { arena } else { 0 };
        let overhead = beside_arena(geometry, pages.bytes()).saturating_add(more);
        match self.memory {
            Some(limit) if arena.saturating_add(overhead) > limit.bytes => {
                Err(ExceedsLimit::Memory {
                    arena,
                    overhead,
                    limit,
                })
            }
            _ => Ok(()),
        }
    }
}

/// The smallest memory limit of this process: of its cgroup, all parent cgroups (v1 and v2), and the machine.
fn memory_limit(root: &Path, own_cgroups: &str, meminfo: &str) -> Option<Limit> {
    let files = ["memory.max", "memory.limit_in_bytes"];
    cgroup_limits(root, own_cgroups, "memory", files)
        .into_iter()
        .chain(machine(meminfo))
        .min_by_key(|limit| limit.bytes)
}

/// The smallest limit on huge pages of this size. The node's supply is checked when they are mapped.
fn huge_pages_limit(root: &Path, own_cgroups: &str, pages: Pages) -> Option<Limit> {
    let size = match pages {
        Pages::Base => return None,
        Pages::Huge2Mi => "2MB",
        Pages::Huge1Gi => "1GB",
    };
    let files = [
        format!("hugetlb.{size}.max"),
        format!("hugetlb.{size}.limit_in_bytes"),
    ];
    let files = files.each_ref().map(String::as_str);
    cgroup_limits(root, own_cgroups, "hugetlb", files)
        .into_iter()
        .min_by_key(|limit| limit.bytes)
}

/// Huge pages are charged to the memory controller only if cgroup2 is mounted with that option (Linux 6.7 and newer).
fn charges_huge_pages(mounts: &str) -> bool {
    mounts.lines().any(|line| {
        let mut fields = line.split(' ').skip(2);
        fields.next() == Some("cgroup2")
            && fields
                .next()
                .is_some_and(|o| o.split(',').any(|o| o == "memory_hugetlb_accounting"))
    })
}

/// Limits of a controller for this process: of its cgroup and all parents, from the files of v2 and v1.
fn cgroup_limits(
    root: &Path,
    own_cgroups: &str,
    controller: &str,
    [v2, v1]: [&str; 2],
) -> Vec<Limit> {
    let folders = cgroups(root, own_cgroups, controller).into_iter();
    folders
        .filter_map(|(version, folder)| {
            let file = match version {
                Version::V2 => v2,
                Version::V1 => v1,
            };
            read_limit(&folder.join(file))
        })
        .collect()
}

/// Version of the cgroup interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// One hierarchy per controller.
    V1,
    V2,
}

/// Folders of this process's cgroups that may contain a controller's files, innermost first. `own_cgroups` is the content of
/// `/proc/self/cgroup`.
pub fn cgroups(root: &Path, own_cgroups: &str, controller: &str) -> Vec<(Version, PathBuf)> {
    let mut folders = Vec::new();
    for line in own_cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (mount, version) = if id == "0" && controllers.is_empty() {
            (root.to_owned(), Version::V2)
        } else if controllers.split(',').any(|c| c == controller) {
            (root.join(controller), Version::V1)
        } else {
            continue;
        };
        // The path may be the host's while only this container's cgroup is mounted: then the mount's root is the container's cgroup.
        let mut folder = mount.join(path.trim_start_matches('/'));
        loop {
            folders.push((version, folder.clone()));
            if folder == mount || !folder.starts_with(&mount) || !folder.pop() {
                break;
            }
        }
    }
    folders
}

fn read_limit(file: &Path) -> Option<Limit> {
    // v2 writes `max` for "no limit", which does not parse.
    let bytes = std::fs::read_to_string(file).ok()?.trim().parse().ok()?;
    Some(Limit {
        bytes,
        source: file.display().to_string(),
    })
}

fn machine(meminfo: &str) -> Option<Limit> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(Limit {
        bytes: kib << 10,
        source: "MemTotal of /proc/meminfo".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const MACHINE: &str = "MemTotal:       16777216 kB\nMemFree: 1 kB\n";

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn the_smallest_limit_above_us_counts_on_v2() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "pod/memory.max", &(3 * GIB).to_string());
        write(root.path(), "pod/side/memory.max", "max\n");
        let found = memory_limit(root.path(), "0::/pod/side\n", MACHINE).unwrap();
        assert_eq!(found.bytes, 3 * GIB);
        assert!(found.source.ends_with("pod/memory.max"));
    }

    #[test]
    fn a_path_of_the_host_falls_back_to_the_root_of_the_mount() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "memory.max", &(2 * GIB).to_string());
        let found = memory_limit(root.path(), "0::/kubepods/pod1/c1\n", MACHINE).unwrap();
        assert_eq!(found.bytes, 2 * GIB);
    }

    #[test]
    fn v1_has_a_folder_per_controller_and_a_huge_number_for_none() {
        let root = tempfile::tempdir().unwrap();
        write(
            root.path(),
            "memory/a/memory.limit_in_bytes",
            "9223372036854771712\n",
        );
        let own = "8:pids:/a\n4:memory:/a\n0::/\n";
        assert_eq!(
            memory_limit(root.path(), own, MACHINE).unwrap().bytes,
            16 * GIB
        );
        write(
            root.path(),
            "memory/a/memory.limit_in_bytes",
            "1073741824\n",
        );
        assert_eq!(memory_limit(root.path(), own, MACHINE).unwrap().bytes, GIB);
    }

    fn limit(bytes: u64) -> Option<Limit> {
        Some(Limit {
            bytes,
            source: "x".into(),
        })
    }

    fn of_memory(bytes: u64) -> Limits {
        Limits {
            memory: limit(bytes),
            huge_pages: None,
            huge_pages_are_memory: false,
        }
    }

    #[test]
    fn an_arena_that_fills_the_limit_leaves_no_room_for_the_rest() {
        let fits = Geometry::new(1, GIB / 2, 1 << 16);
        assert!(of_memory(GIB).check(&fits, Pages::Base, 0).is_ok());
        let fills = Geometry::new(1, GIB, 1 << 16);
        let refused = of_memory(GIB).check(&fills, Pages::Base, 0).unwrap_err();
        assert!(refused.to_string().contains("lower memory.size"));
    }

    #[test]
    fn huge_pages_count_against_their_own_limit_and_only_the_rest_against_memory() {
        let geometry = Geometry::new(1, 16 * GIB, 1 << 16);
        assert!(of_memory(GIB).check(&geometry, Pages::Huge2Mi, 0).is_ok());
        assert!(of_memory(GIB).check(&geometry, Pages::Base, 0).is_err());
        let beside = beside_arena(&geometry, Pages::Huge2Mi.bytes());
        let of_beside = || of_memory(beside);
        assert!(of_beside().check(&geometry, Pages::Huge2Mi, 0).is_ok());
        assert!(of_beside().check(&geometry, Pages::Huge2Mi, 1).is_err());
        let refused = of_memory(beside - 1).check(&geometry, Pages::Huge2Mi, 0);
        assert!(matches!(
            refused,
            Err(ExceedsLimit::Memory { arena: 0, .. })
        ));
        let few = Limits {
            huge_pages: limit(8 * GIB),
            ..of_memory(64 * GIB)
        };
        let refused = few.check(&geometry, Pages::Huge2Mi, 0).unwrap_err();
        assert!(refused.to_string().contains("limit of huge pages"));
        let charged = Limits {
            huge_pages_are_memory: true,
            ..of_memory(16 * GIB)
        };
        assert!(charged.check(&geometry, Pages::Huge2Mi, 0).is_err());
    }

    #[test]
    fn the_limit_of_huge_pages_is_that_of_their_size() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "pod/hugetlb.2MB.max", &GIB.to_string());
        write(root.path(), "pod/hugetlb.1GB.max", "max\n");
        write(
            root.path(),
            "hugetlb/a/hugetlb.1GB.limit_in_bytes",
            &(2 * GIB).to_string(),
        );
        let of = |own, pages| huge_pages_limit(root.path(), own, pages).map(|l| l.bytes);
        assert_eq!(of("0::/pod\n", Pages::Huge2Mi), Some(GIB));
        assert_eq!(of("0::/pod\n", Pages::Huge1Gi), None);
        assert_eq!(of("0::/pod\n", Pages::Base), None);
        assert_eq!(of("3:hugetlb:/a\n", Pages::Huge1Gi), Some(2 * GIB));
    }

    #[test]
    fn huge_pages_are_memory_only_where_the_mount_says_so() {
        let plain = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate 0 0\n";
        assert!(!charges_huge_pages(plain));
        let charged = "cgroup2 /sys/fs/cgroup cgroup2 rw,memory_hugetlb_accounting 0 0\n";
        assert!(charges_huge_pages(charged));
    }
}
