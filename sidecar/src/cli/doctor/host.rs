//! The node, and the part of it that this process may use, from files of `/proc` and `/sys`.

use kvcachepool_memory::limit::{self, Version};
use serde::Serialize;
use std::path::Path;

/// Facts of the node. `None`: the file is missing or does not contain the value.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Host {
    pub kernel: String,
    pub cpu: String,
    /// Cores that this process may run on (affinity).
    pub cores: u32,
    /// Cores of the node.
    pub node_cores: u32,
    /// Runnable threads of the whole node, averaged over the last minute.
    pub load: Option<f64>,
    /// CPU quota of its cgroups, in cores; `None` without a limit.
    pub cpu_quota_cores: Option<f64>,
    /// Bytes of the largest cache that a core uses.
    pub cache_bytes: Option<u64>,
    pub numa_nodes: u32,
    /// NUMA nodes of which this process may use a core; empty if unknown.
    pub numa_reach: Vec<u32>,
    pub memory_total_bytes: Option<u64>,
    pub memory_available_bytes: Option<u64>,
    /// Smallest memory limit of its cgroups.
    pub memory_limit_bytes: Option<u64>,
    /// Memory in use in the cgroup with the least room left.
    pub memory_used_bytes: Option<u64>,
    /// Memory that this process can still take before a cgroup or the machine is full.
    pub memory_room_bytes: u64,
    pub dev_shm_bytes: Option<u64>,
    pub huge_pages: Vec<HugePages>,
    /// `shmem_enabled` of transparent huge pages: the selected word.
    pub shmem_huge_pages: String,
}

/// Huge pages of one size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct HugePages {
    pub page_bytes: u64,
    /// Reserved on the node.
    pub total: u64,
    pub free: u64,
}

impl Host {
    /// Reads the files of this machine.
    pub fn read() -> Self {
        let mut host = Self::of(Path::new("/"));
        let cores = rustix::thread::sched_getaffinity(None).map(|set| set.count());
        host.cores = cores.unwrap_or_else(|_| {
            std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1))
        });
        host.dev_shm_bytes = dev_shm(&text(Path::new("/proc/self/mounts")));
        host
    }

    /// Reads the files below `root`.
    fn of(root: &Path) -> Self {
        let (proc, sys) = (root.join("proc"), root.join("sys"));
        let (meminfo, cpuinfo) = (text(&proc.join("meminfo")), text(&proc.join("cpuinfo")));
        let available = kib(&meminfo, "MemAvailable");
        let memory = Memory::read(&sys.join("fs/cgroup"), &text(&proc.join("self/cgroup")));
        let room = [memory.room, available].into_iter().flatten().min();
        Self {
            kernel: text(&proc.join("sys/kernel/osrelease")).trim().to_owned(),
            cpu: field(&cpuinfo, "model name"),
            node_cores: processors(&cpuinfo),
            load: load(&text(&proc.join("loadavg"))),
            cpu_quota_cores: quota(&sys.join("fs/cgroup"), &text(&proc.join("self/cgroup"))),
            cache_bytes: cache(&sys.join("devices/system/cpu/cpu0/cache")),
            numa_nodes: numa_ids(&sys.join("devices/system/node")).len().max(1) as u32,
            numa_reach: numa_reach(
                &sys.join("devices/system/node"),
                &field(&text(&proc.join("self/status")), "Cpus_allowed_list"),
            ),
            memory_total_bytes: kib(&meminfo, "MemTotal"),
            memory_available_bytes: available,
            memory_limit_bytes: memory.limit,
            memory_used_bytes: memory.used,
            memory_room_bytes: room.unwrap_or(0),
            huge_pages: huge_pages(&sys.join("kernel/mm/hugepages")),
            shmem_huge_pages: chosen(&text(
                &sys.join("kernel/mm/transparent_hugepage/shmem_enabled"),
            )),
            ..Self::default()
        }
    }
}

fn text(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn number(path: &Path) -> Option<u64> {
    text(path).trim().parse().ok()
}

/// The value of `key` in lines of `key : value`.
fn field(text: &str, key: &str) -> String {
    let lines = text.lines().filter_map(|line| line.split_once(':'));
    let mut values = lines.filter(|(name, _)| name.trim() == key);
    values.next().map_or("", |(_, v)| v).trim().to_owned()
}

fn kib(meminfo: &str, key: &str) -> Option<u64> {
    let value = field(meminfo, key);
    let kib: u64 = value.trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn processors(cpuinfo: &str) -> u32 {
    let lines = cpuinfo.lines().filter(|line| line.starts_with("processor"));
    u32::try_from(lines.count()).unwrap_or(0)
}

/// The one-minute average.
fn load(loadavg: &str) -> Option<f64> {
    loadavg.split(' ').next()?.parse().ok()
}

/// The word in brackets of `always [never] advise`.
fn chosen(words: &str) -> String {
    let after = words.split_once('[').map_or("", |(_, after)| after);
    after.split_once(']').map_or("", |(word, _)| word).into()
}

/// Memory limits of cgroups.
#[derive(Default)]
struct Memory {
    limit: Option<u64>,
    used: Option<u64>,
    room: Option<u64>,
}

impl Memory {
    fn read(mount: &Path, own: &str) -> Self {
        let groups = limit::cgroups(mount, own, "memory").into_iter();
        let groups = groups.filter_map(|(version, folder)| {
            let (most, used) = match version {
                Version::V2 => ("memory.max", "memory.current"),
                Version::V1 => ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            };
            // Without a limit v2 says `max`, and v1 a number close to the size of the address space.
            let most = number(&folder.join(most)).filter(|most| *most < 1 << 60)?;
            Some((most, number(&folder.join(used)).unwrap_or(0)))
        });
        let groups: Vec<(u64, u64)> = groups.collect();
        let room = |(most, used): &(u64, u64)| most.saturating_sub(*used);
        let tightest = groups.iter().min_by_key(|group| room(group));
        Self {
            limit: groups.iter().map(|(most, _)| *most).min(),
            used: tightest.map(|(_, used)| *used),
            room: tightest.map(room),
        }
    }
}

/// CPU quota of the tightest cgroup, in cores.
fn quota(mount: &Path, own: &str) -> Option<f64> {
    let groups = limit::cgroups(mount, own, "cpu").into_iter();
    let quotas = groups.filter_map(|(version, folder)| {
        let (quota, period) = match version {
            Version::V2 => {
                let max = text(&folder.join("cpu.max"));
                let (quota, period) = max.trim().split_once(' ')?;
                (quota.parse().ok()?, period.parse().ok()?)
            }
            Version::V1 => (
                number(&folder.join("cpu.cfs_quota_us"))?,
                number(&folder.join("cpu.cfs_period_us"))?,
            ),
        };
        (period > 0).then(|| quota as f64 / period as f64)
    });
    quotas.min_by(f64::total_cmp)
}

/// The largest cache of a core: names of levels differ between machines.
fn cache(folder: &Path) -> Option<u64> {
    let sizes = (0..8).map(|index| text(&folder.join(format!("index{index}/size"))));
    let sizes = sizes.filter_map(|size| {
        let kib: u64 = size.trim().strip_suffix('K')?.parse().ok()?;
        kib.checked_mul(1024)
    });
    sizes.max()
}

/// Empty for a kernel without NUMA, which has no such folder.
fn numa_ids(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let ids = entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix("node")?.parse().ok()
    });
    let mut ids: Vec<u32> = ids.collect();
    ids.sort_unstable();
    ids
}

/// Nodes with at least one of these cores.
fn numa_reach(folder: &Path, allowed: &str) -> Vec<u32> {
    let allowed = ranges(allowed);
    let mut reach = numa_ids(folder);
    reach.retain(|id| {
        let cores = ranges(&text(&folder.join(format!("node{id}/cpulist"))));
        let meet = |core: &(u32, u32)| allowed.iter().any(|a| a.0 <= core.1 && core.0 <= a.1);
        cores.iter().any(meet)
    });
    reach
}

/// Ranges of a list such as `0-3,8`, with both ends.
fn ranges(list: &str) -> Vec<(u32, u32)> {
    let ranges = list.trim().split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some((first.parse().ok()?, last.parse().ok()?))
    });
    ranges.collect()
}

fn huge_pages(folder: &Path) -> Vec<HugePages> {
    let sizes = [2 << 20, 1 << 30].into_iter().filter_map(|page_bytes| {
        let folder = folder.join(format!("hugepages-{}kB", page_bytes >> 10));
        Some(HugePages {
            page_bytes,
            total: number(&folder.join("nr_hugepages"))?,
            free: number(&folder.join("free_hugepages"))?,
        })
    });
    sizes.collect()
}

/// Only if it is a separate mount: otherwise the size would be that of the disk.
fn dev_shm(mounts: &str) -> Option<u64> {
    let mut points = mounts.lines().filter_map(|line| line.split(' ').nth(1));
    points.find(|point| *point == "/dev/shm")?;
    let stat = rustix::fs::statvfs("/dev/shm").ok()?;
    stat.f_blocks.checked_mul(stat.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(files: &[(&str, &str)]) -> Host {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        Host::of(root.path())
    }

    #[test]
    fn files_of_a_node_are_read() {
        let host = machine(&[
            ("proc/sys/kernel/osrelease", "6.8.0\n"),
            ("proc/cpuinfo", "processor\t: 0\nmodel name\t: Some CPU\n"),
            ("proc/loadavg", "10.50 9.00 8.00 3/500 12345\n"),
            (
                "proc/meminfo",
                "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n",
            ),
            ("sys/devices/system/cpu/cpu0/cache/index0/size", "32K\n"),
            ("sys/devices/system/cpu/cpu0/cache/index3/size", "65536K\n"),
            ("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0,6-9\n"),
            ("sys/devices/system/node/node0/cpulist", "1-3\n"),
            ("sys/devices/system/node/node1/cpulist", "4-5,8-11\n"),
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
                "512\n",
            ),
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
                "12\n",
            ),
            (
                "sys/kernel/mm/transparent_hugepage/shmem_enabled",
                "always within_size advise [never] deny force\n",
            ),
        ]);
        let expected = Host {
            kernel: "6.8.0".into(),
            cpu: "Some CPU".into(),
            node_cores: 1,
            load: Some(10.5),
            cache_bytes: Some(64 << 20),
            numa_nodes: 2,
            numa_reach: vec![1],
            memory_total_bytes: Some(16 * GIB),
            memory_available_bytes: Some(8 * GIB),
            memory_room_bytes: 8 * GIB,
            huge_pages: vec![HugePages {
                page_bytes: 2 << 20,
                total: 512,
                free: 12,
            }],
            shmem_huge_pages: "never".into(),
            ..Host::default()
        };
        assert_eq!(host, expected);
    }

    #[test]
    fn of_nested_cgroups_the_tightest_counts() {
        let host = machine(&[
            ("proc/meminfo", "MemAvailable: 8388608 kB\n"),
            ("proc/self/cgroup", "0::/pod/side\n"),
            ("sys/fs/cgroup/pod/memory.max", "4294967296"),
            ("sys/fs/cgroup/pod/memory.current", "4026531840"),
            ("sys/fs/cgroup/pod/side/memory.max", "2147483648"),
            ("sys/fs/cgroup/pod/side/memory.current", "1073741824"),
            ("sys/fs/cgroup/pod/cpu.max", "max 100000"),
            ("sys/fs/cgroup/pod/side/cpu.max", "50000 100000\n"),
        ]);
        assert_eq!(host.memory_limit_bytes, Some(2 * GIB));
        assert_eq!(host.memory_used_bytes, Some(4_026_531_840));
        assert_eq!(host.memory_room_bytes, GIB / 4);
        assert_eq!(host.cpu_quota_cores, Some(0.5));
    }

    #[test]
    fn cgroups_of_the_first_version_are_read_too() {
        let host = machine(&[
            ("proc/self/cgroup", "4:memory:/a\n5:cpu,cpuacct:/a\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1073741824"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "1"),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712",
            ),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "150000"),
            ("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000"),
            ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1"),
            ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000"),
        ]);
        assert_eq!(host.memory_limit_bytes, Some(GIB));
        assert_eq!(host.memory_room_bytes, GIB - 1);
        assert_eq!(host.cpu_quota_cores, Some(1.5));
    }

    #[test]
    fn a_node_that_says_nothing_has_no_room() {
        let host = machine(&[]);
        assert_eq!(host.numa_nodes, 1);
        assert_eq!((host.memory_room_bytes, host.memory_limit_bytes), (0, None));
    }

    #[test]
    fn this_machine_says_what_every_machine_does() {
        let host = Host::read();
        assert!(host.cores >= 1 && !host.kernel.is_empty(), "{host:?}");
        assert!(host.memory_room_bytes > 0, "{host:?}");
    }
}
