//! Findings over made-up nodes.

use super::*;
use crate::cli::doctor::gpu::{Device, DeviceLimit, Gpu, GpuReason};
use crate::cli::doctor::host::{Host, HugePages};
use crate::cli::doctor::report::Speed;
use kvcachepool_gpu::cuda::management::Link;

/// A node that nothing is wrong with.
fn good() -> Facts {
    let facility = |name| Facility {
        name,
        works: true,
        reason: String::new(),
        detail: String::new(),
    };
    let speed = |name, bytes| Speed {
        name,
        bytes_per_second: Some(bytes),
        over_bytes: 1,
        threads: 1,
        bounds: String::new(),
        reason: String::new(),
    };
    Facts {
        wanted: None,
        host: Host {
            cores: 8,
            node_cores: 8,
            load: Some(12.0),
            memory_available_bytes: Some(64 * GIB),
            dev_shm_bytes: Some(8 * GIB),
            shmem_huge_pages: "within_size".into(),
            ..Host::default()
        },
        facilities: [
            FacilityName::Memfd,
            FacilityName::Pidfd,
            FacilityName::PassDescriptors,
            FacilityName::RecordLocks,
            FacilityName::IoUring,
            FacilityName::DirectIo,
            FacilityName::PageLock,
            FacilityName::OpenFiles,
            FacilityName::WindowByFd,
        ]
        .map(facility)
        .into(),
        gpu: Gpu {
            reason: Some(GpuReason::NoDriver),
            ..Gpu::default()
        },
        speeds: vec![
            speed(SpeedName::CopyOneThread, 10_000_000_000),
            speed(SpeedName::Digest, 9_000_000_000),
            speed(SpeedName::DiskRead, 2_000_000_000),
        ],
    }
}

/// A device on PCIe 5 x16, now and at most, over which copies run at 50 GB/s.
fn with_gpu(facts: &mut Facts) -> &mut Device {
    facts.host.numa_reach = vec![0];
    let copies = |name| Speed {
        name,
        bytes_per_second: Some(50_000_000_000),
        ..facts.speeds[0].clone()
    };
    let copies = [SpeedName::PinnedToDevice, SpeedName::PinnedFromDevice].map(copies);
    facts.speeds.extend(copies);
    facts.gpu = Gpu {
        devices: vec![Device {
            link: Some(Link {
                generation: 5,
                generation_max: 5,
                width: 16,
                width_max: 16,
            }),
            numa_node: Some(0),
            ..Device::default()
        }],
        ..Gpu::default()
    };
    &mut facts.gpu.devices[0]
}

fn wants(facts: &mut Facts) -> &mut Wanted {
    facts.wanted.get_or_insert_with(|| Wanted {
        arena_bytes: 16 * GIB,
        page_bytes: BASE_PAGE,
        ..Wanted::default()
    })
}

fn refuse(facts: &mut Facts, name: FacilityName, reason: &str) {
    let facility = facts.facilities.iter_mut().find(|f| f.name == name);
    let facility = facility.unwrap();
    facility.works = false;
    facility.reason = reason.into();
}

fn measure(facts: &mut Facts, name: SpeedName, bytes: Option<u64>) {
    let speed = facts.speeds.iter_mut().find(|s| s.name == name).unwrap();
    speed.bytes_per_second = bytes;
}

type Case = (&'static str, Weight, fn(&mut Facts));

const CASES: &[Case] = &[
    ("MemfdRefused", Weight::Blocks, |f| {
        refuse(f, FacilityName::Memfd, "EPERM");
    }),
    ("PidfdRefused", Weight::Blocks, |f| {
        refuse(f, FacilityName::Pidfd, "ENOSYS");
    }),
    ("DescriptorsRefused", Weight::Blocks, |f| {
        refuse(f, FacilityName::PassDescriptors, "NotPassed");
    }),
    ("RuntimeFolderUnusable", Weight::Blocks, |f| {
        wants(f);
        refuse(f, FacilityName::RecordLocks, "NoFolder");
    }),
    ("RuntimeFolderUnusable", Weight::Note, |f| {
        refuse(f, FacilityName::RecordLocks, "EROFS");
    }),
    ("ArenaExceedsMemoryLimit", Weight::Blocks, |f| {
        wants(f).arena_refused = "17179869184 bytes exceed".into();
    }),
    ("CpuThrottled", Weight::Degrades, |f| {
        f.host.cpu_quota_cores = Some(0.5);
    }),
    ("MemoryShort", Weight::Degrades, |f| {
        wants(f).arena_bytes = 65 * GIB;
    }),
    ("MemoryShort", Weight::Note, |f| {
        f.host.memory_available_bytes = Some(3 * GIB);
    }),
    ("HugePagesShort", Weight::Degrades, |f| {
        wants(f).page_bytes = 2 << 20;
    }),
    ("HugePagesShort", Weight::Degrades, |f| {
        wants(f).page_bytes = 2 << 20;
        f.host.huge_pages = vec![HugePages {
            page_bytes: 2 << 20,
            total: 8192,
            free: 8191,
        }];
    }),
    ("DiskFolderUnusable", Weight::Degrades, |f| {
        refuse(f, FacilityName::DirectIo, "NoFolder");
    }),
    ("DirectIoUnsupported", Weight::Slows, |f| {
        refuse(f, FacilityName::DirectIo, "Unsupported");
    }),
    ("OpenFilesFew", Weight::Degrades, |f| {
        refuse(f, FacilityName::OpenFiles, "Few");
    }),
    ("CoresFew", Weight::Slows, |f| f.host.cores = 1),
    ("CoresFew", Weight::Slows, |f| {
        f.host.cpu_quota_cores = Some(1.5);
    }),
    ("NodeBusy", Weight::Slows, |f| f.host.load = Some(12.1)),
    ("SmallPages", Weight::Note, |f| {
        f.host.shmem_huge_pages = "never".into();
    }),
    ("DigestSlow", Weight::Slows, |f| {
        measure(f, SpeedName::Digest, Some(3_000_000_000));
    }),
    ("CopySlow", Weight::Slows, |f| {
        measure(f, SpeedName::CopyOneThread, Some(2_000_000_000));
    }),
    ("DiskSlow", Weight::Slows, |f| {
        measure(f, SpeedName::DiskRead, Some(100_000_000));
    }),
    ("PageLockLimited", Weight::Note, |f| {
        refuse(f, FacilityName::PageLock, "ENOMEM");
    }),
    ("DevShmSmall", Weight::Note, |f| {
        f.host.dev_shm_bytes = Some(64 << 20);
    }),
    ("NoRoom", Weight::Note, |f| {
        measure(f, SpeedName::Digest, None);
        f.speeds[1].reason = "NoRoom".into();
    }),
    ("NoRoom", Weight::Note, |f| {
        refuse(f, FacilityName::WindowByFd, "NoRoom");
    }),
    ("DriverMismatch", Weight::Note, |f| {
        f.gpu.reason = Some(GpuReason::DriverMismatch);
    }),
    ("SystemNotReady", Weight::Note, |f| {
        f.gpu.reason = Some(GpuReason::SystemNotReady);
    }),
    ("NoManagementLibrary", Weight::Note, |f| {
        with_gpu(f);
        f.gpu.no_management = "libnvidia-ml.so.1: not there".into();
    }),
    ("LinkNarrow", Weight::Slows, |f| {
        with_gpu(f).link.as_mut().unwrap().width = 8;
    }),
    ("LinkGenerationLow", Weight::Slows, |f| {
        with_gpu(f).link.as_mut().unwrap().generation = 4;
    }),
    ("GpuCopySlow", Weight::Slows, |f| {
        with_gpu(f);
        measure(f, SpeedName::PinnedFromDevice, Some(31_000_000_000));
    }),
    ("GpuFar", Weight::Slows, |f| {
        with_gpu(f).numa_node = Some(1);
    }),
    ("DriverTooOld", Weight::Slows, |f| {
        f.gpu.devices = vec![Device {
            limits: vec![DeviceLimit::DriverTooOld],
            ..Device::default()
        }];
    }),
];

#[test]
fn each_thing_that_is_wrong_has_one_finding_of_its_weight() {
    for (name, weight, change) in CASES {
        let mut facts = good();
        change(&mut facts);
        let found = judged(&facts);
        let names: Vec<(&str, Weight)> =
            found.iter().map(|f| (f.name.as_str(), f.weight)).collect();
        assert_eq!(names, [(*name, *weight)]);
        assert_eq!(serves(&found), *weight != Weight::Blocks, "{name}");
        let Finding {
            message, advice, ..
        } = &found[0];
        assert!(!advice.is_empty(), "{name}: {message}");
    }
}

type Harmless = fn(&mut Facts);

#[test]
fn what_is_harmless_is_not_found() {
    let changes: [Harmless; 10] = [
        |_| {},
        |f| {
            with_gpu(f);
        },
        |f| {
            // An idle device lowers its link, and nothing was copied.
            with_gpu(f).link.as_mut().unwrap().generation = 1;
            f.speeds.truncate(3);
        },
        |f| {
            with_gpu(f).link = None;
            measure(f, SpeedName::PinnedToDevice, Some(1_000_000_000));
        },
        |f| refuse(f, FacilityName::IoUring, "SeccompDenied"),
        |f| refuse(f, FacilityName::PageLock, "NoRoom"),
        |f| f.gpu.reason = Some(GpuReason::NoDevice),
        |f| {
            // Huge pages are not available memory, and the arena is of them.
            wants(f).page_bytes = 2 << 20;
            f.host.memory_available_bytes = Some(8 * GIB);
            f.host.shmem_huge_pages = "never".into();
            f.host.huge_pages = vec![HugePages {
                page_bytes: 2 << 20,
                total: 8192,
                free: 8192,
            }];
        },
        |f| f.host.cpu_quota_cores = Some(64.0),
        |f| f.speeds.clear(),
    ];
    for (at, change) in changes.iter().enumerate() {
        let mut facts = good();
        change(&mut facts);
        assert_eq!(judged(&facts), [], "change {at}");
    }
}

#[test]
fn the_heaviest_comes_first() {
    let mut facts = good();
    for name in [FacilityName::PageLock, FacilityName::Memfd] {
        refuse(&mut facts, name, "EPERM");
    }
    facts.host.cores = 1;
    facts.host.cpu_quota_cores = Some(0.2);
    let names: Vec<String> = judged(&facts).into_iter().map(|f| f.name).collect();
    assert_eq!(names, ["MemfdRefused", "CpuThrottled", "PageLockLimited"]);
}
