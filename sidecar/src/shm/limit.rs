//! How much memory this container may use. Populating past it is an OOM kill, not an error, so it is asked beforehand.

use std::path::Path;

/// Where cgroups are mounted.
pub const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// The arena does not fit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "memory.size of {arena} bytes and {overhead} bytes beside it exceed the limit of {limit} bytes ({source_of_limit}): lower memory.size or raise the container's memory limit"
)]
pub struct ArenaExceedsMemoryLimit {
    /// Wanted bytes.
    pub arena: u64,
    /// Bytes that the sidecar needs beside the arena.
    pub overhead: u64,
    /// Bytes that may be used.
    pub limit: u64,
    /// File that says so.
    pub source_of_limit: String,
}

/// A limit in bytes and the file that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// File.
    pub source: String,
}

/// Bytes that the sidecar needs beside an arena: processes and page tables (8 bytes per 4 KiB page, for the engine and again while
/// a restarted engine overlaps with it), and the slot table.
pub fn overhead(arena: u64, table: u64) -> u64 {
    (64 << 20) + arena / 256 + table
}

/// Checks an arena and its table against the limit of this process.
pub fn check(arena: u64, table: u64) -> Result<(), ArenaExceedsMemoryLimit> {
    let own = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    check_against(
        smallest(Path::new(CGROUP_ROOT), &own, &meminfo),
        arena,
        table,
    )
}

fn check_against(
    limit: Option<Limit>,
    arena: u64,
    table: u64,
) -> Result<(), ArenaExceedsMemoryLimit> {
    let overhead = overhead(arena, table);
    match limit {
        Some(limit) if arena.saturating_add(overhead) > limit.bytes => {
            Err(ArenaExceedsMemoryLimit {
                arena,
                overhead,
                limit: limit.bytes,
                source_of_limit: limit.source,
            })
        }
        _ => Ok(()),
    }
}

/// The smallest limit over this process: its cgroup and all above it (v1 and v2), and the memory of the machine.
pub fn smallest(root: &Path, own_cgroups: &str, meminfo: &str) -> Option<Limit> {
    let mut limits: Vec<Limit> = machine(meminfo).into_iter().collect();
    for line in own_cgroups.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) =
            (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        let (mount, file) = if id == "0" && controllers.is_empty() {
            (root.to_owned(), "memory.max")
        } else if controllers.split(',').any(|c| c == "memory") {
            (root.join("memory"), "memory.limit_in_bytes")
        } else {
            continue;
        };
        // The path may be named as the host sees it while only our own cgroup is mounted: then the mount's root is ours.
        let mut folder = mount.join(path.trim_start_matches('/'));
        loop {
            limits.extend(read_limit(&folder.join(file)));
            if folder == mount || !folder.starts_with(&mount) || !folder.pop() {
                break;
            }
        }
    }
    limits.into_iter().min_by_key(|limit| limit.bytes)
}

fn read_limit(file: &Path) -> Option<Limit> {
    // v2 writes `max`, which is no number and no limit.
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
        let found = smallest(root.path(), "0::/pod/side\n", MACHINE).unwrap();
        assert_eq!(found.bytes, 3 * GIB);
        assert!(found.source.ends_with("pod/memory.max"));
    }

    #[test]
    fn a_path_of_the_host_falls_back_to_the_root_of_the_mount() {
        let root = tempfile::tempdir().unwrap();
        write(root.path(), "memory.max", &(2 * GIB).to_string());
        let found = smallest(root.path(), "0::/kubepods/pod1/c1\n", MACHINE).unwrap();
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
        assert_eq!(smallest(root.path(), own, MACHINE).unwrap().bytes, 16 * GIB);
        write(
            root.path(),
            "memory/a/memory.limit_in_bytes",
            "1073741824\n",
        );
        assert_eq!(smallest(root.path(), own, MACHINE).unwrap().bytes, GIB);
    }

    #[test]
    fn an_arena_that_fills_the_limit_leaves_no_room_for_the_rest() {
        let limit = Some(Limit {
            bytes: GIB,
            source: "x".into(),
        });
        assert!(check_against(limit.clone(), GIB / 2, 1 << 20).is_ok());
        let refused = check_against(limit, GIB, 1 << 20).unwrap_err();
        assert!(refused.to_string().contains("lower memory.size"));
    }
}
