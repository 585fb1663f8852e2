//! Keys of memory and disk.

use super::super::convert;
use super::super::keys::Form::{Any, Flag, Number, Text, Whole};
use super::super::keys::Outcome::{Automatic, NotSupported, Translated};
use super::super::keys::{Row, key, older};
use super::row;

pub const MEMORY: &[Row] = &[
    row(
        &[
            key("max_local_cpu_size", Number),
            older("max_local_cache_size", Number, "max_local_cpu_size"),
        ],
        Translated {
            to: &["memory.size"],
            note: "GiB of each worker, times `--workers`.",
            by: convert::memory_per_worker,
        },
    ),
    row(
        &[key("extra_config.first_rank_max_local_cpu_size", Number)],
        Translated {
            to: &["memory.size"],
            note: "GiB of the first worker, with `save_only_first_rank` or MLA.",
            by: convert::memory_first_rank,
        },
    ),
    row(
        &[key("spec.l1.sizeGB", Number)],
        Translated {
            to: &["memory.size"],
            note: "GiB of each node, divided by `--pods-per-node`.",
            by: convert::memory_per_node,
        },
    ),
    row(
        &[key("local_cpu", Flag)],
        Automatic("The memory tier is always on."),
    ),
    row(
        &[older("local_device", Text, "local_cpu")],
        Translated {
            to: &[],
            note: "`cpu` needs no field.",
            by: convert::device,
        },
    ),
    row(
        &[key("local_cpu_use_hugepages", Flag)],
        Translated {
            to: &["memory.hugePages"],
            note: "true is 2Mi; the node must have reserved the pages.",
            by: convert::huge_pages,
        },
    ),
    row(
        &[key("cache_policy", Text), key("spec.eviction.policy", Text)],
        Translated {
            to: &["memory.evictionPolicy"],
            note: "LRU, LFU and FIFO; others are not supported.",
            by: convert::eviction,
        },
    ),
    row(
        &[
            key("spec.eviction.triggerWatermark", Number),
            key("spec.eviction.evictionRatio", Number),
        ],
        Automatic("Chunks are evicted when room is needed."),
    ),
    row(
        &[
            key("pin_timeout_sec", Whole),
            key("pin_check_interval_sec", Whole),
        ],
        Automatic("The hold of a request on its chunks ends by itself."),
    ),
    row(
        &[
            key("reserve_local_cpu_size", Number),
            key("enable_lazy_memory_allocator", Flag),
            key("lazy_memory_*", Number),
            key("extra_config.local_cpu.pinned_align_bytes", Whole),
        ],
        Automatic("The operator adds what the sidecar needs beside the memory tier."),
    ),
    row(
        &[
            key("numa_mode", Text),
            key("extra_config.gpu_to_numa_mapping", Any),
        ],
        NotSupported("Use the kubelet's topology manager."),
    ),
    row(
        &[
            key("maru_*", Any),
            key("extra_config.maru_*", Any),
            key("extra_config.dax.*", Any),
        ],
        NotSupported("Memory belongs to a pod; Redis, file system and S3 are shared."),
    ),
];

pub const DISK: &[Row] = &[
    row(
        &[key("local_disk", Text)],
        Translated {
            to: &["disk.path"],
            note: "A folder of the node's own disk. For a volume write `ephemeral` instead.",
            by: convert::disk_folder,
        },
    ),
    row(
        &[key("spec.l2Backend.raw.config.base_path", Text)],
        Translated {
            to: &["disk.path"],
            note: "The disk tier belongs to one pod. For a folder that pods share write `shared.fileSystem` instead.",
            by: convert::base_path,
        },
    ),
    row(
        &[key("max_local_disk_size", Number)],
        Translated {
            to: &["disk.size"],
            note: "GiB of each worker, times `--workers`.",
            by: convert::disk_size,
        },
    ),
    row(
        &[
            key("local_disk_path_sharding", Text),
            key("extra_config.use_odirect", Flag),
            key("extra_config.disk_io_threads", Whole),
        ],
        Automatic(
            "One folder has the objects of all ranks, and direct I/O is used where the file system allows it.",
        ),
    ),
    row(
        &[
            key("gds_path", Text),
            key("gds_path_sharding", Text),
            key("gds_buffer_size", Whole),
            key("gds_backend", Text),
            key("use_gds", Flag),
            key("weka_path", Text),
            older("cufile_buffer_size", Whole, "gds_buffer_size"),
            key("extra_config.use_cufile", Flag),
            key("extra_config.use_direct_io", Flag),
            key("extra_config.rust_raw_block.*", Any),
        ],
        NotSupported("Use `local.disk`, or `shared.fileSystem` or S3 for storage that pods share."),
    ),
];
