//! GPUs of the node and what their driver can do: converts raw answers to named facts.

use super::driver::{Answer, Answers};
use kvcachepool_gpu::cuda::NO_DEVICE;
use kvcachepool_gpu::cuda::management::{Link, NoManagement, uuid_text};
use kvcachepool_gpu::cuda::sys::{CUcomputemode, CUresult};
use serde::Serialize;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Why this process cannot use a GPU; `null` if it can.
    pub reason: Option<GpuReason>,
    /// The same as text, with the driver's error.
    pub detail: String,
    /// Version of the driver; empty if unknown.
    pub driver: String,
    /// Newest CUDA version that the driver supports; empty without a driver.
    pub cuda: String,
    /// Why NVML cannot be used; empty if it can, or without a driver.
    pub no_management: String,
    /// Devices visible to this process.
    pub devices: Vec<Device>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum GpuReason {
    /// `libcuda.so.1` cannot be opened: the node has no driver, or the container does not get it.
    NoDriver,
    /// The library lacks a function or fails to initialise; the detail has its error.
    DriverUnusable,
    /// The user-mode half of the driver does not match the kernel's half.
    DriverMismatch,
    /// The machine's GPUs are not usable yet: with NVSwitches, because its fabric manager does not run.
    SystemNotReady,
    /// The driver works and lists no device.
    NoDevice,
    /// The driver did not answer in time.
    TimedOut,
}

impl GpuReason {
    /// Whether there is simply no GPU for this process, as on most nodes, and nothing is broken.
    pub fn is_absence(self) -> bool {
        matches!(self, Self::NoDriver | Self::NoDevice)
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Device {
    pub name: String,
    /// As `nvidia-smi` writes it.
    pub uuid: String,
    pub memory_total_bytes: u64,
    /// Free memory; `null` if the driver does not report it without a context.
    pub memory_free_bytes: Option<u64>,
    pub compute_capability: String,
    /// Which processes may create contexts: `Default`, `Prohibited`, `ExclusiveProcess`.
    pub compute_mode: String,
    /// Connection to the host; `null` if NVML does not report it.
    pub link: Option<Link>,
    /// NUMA node that the device is attached to; `null` if the kernel does not report it.
    pub numa_node: Option<u32>,
    /// Limits for a second process on the device.
    pub limits: Vec<DeviceLimit>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum DeviceLimit {
    /// The device is an instance of a partitioned GPU; memory cannot be passed between instances.
    MigEnabled,
    /// One process at a time: a sidecar beside vLLM cannot create a context.
    ExclusiveProcess,
    /// No process can create a context.
    Prohibited,
    /// Less memory is free than a context and a window need beside the reserve for vLLM.
    OutOfMemory,
    /// NVML does not report the free memory; the sidecar creates no context then.
    FreeMemoryUnknown,
    /// The driver is older than CUDA 12.8, the first version with `cuMemcpyBatchAsync`.
    DriverTooOld,
}

/// First CUDA with `cuMemcpyBatchAsync`, by which the connector copies a job with one call.
const BATCH_SINCE: i32 = 12080;

/// Results of `cuInit`.
const SYSTEM_NOT_READY: i32 = CUresult::CUDA_ERROR_SYSTEM_NOT_READY as i32;
const SYSTEM_DRIVER_MISMATCH: i32 = CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as i32;
const COMPAT_NOT_SUPPORTED: i32 = CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE as i32;
/// Which processes may create contexts.
const PROHIBITED: i32 = CUcomputemode::CU_COMPUTEMODE_PROHIBITED as i32;
const EXCLUSIVE_PROCESS: i32 = CUcomputemode::CU_COMPUTEMODE_EXCLUSIVE_PROCESS as i32;
/// `nvmlReturn_t` of `nvml.h`: library and kernel module are of different versions.
const RM_VERSION_MISMATCH: i32 = 18;

/// Judges the driver's answers; `None`: it did not answer. `needed_bytes`: what must be free for a window.
pub fn judged(answers: Option<Answers>, needed_bytes: u64) -> Gpu {
    let Some(answers) = answers else {
        return Gpu {
            reason: Some(GpuReason::TimedOut),
            detail: "the driver did not answer in time".into(),
            ..Gpu::default()
        };
    };
    let why = refusal(&answers);
    let devices = answers.devices.iter();
    Gpu {
        reason: why.as_ref().map(|(reason, _)| *reason),
        detail: why.map(|(_, detail)| detail).unwrap_or_default(),
        driver: answers.driver.clone(),
        cuda: cuda(answers.cuda),
        no_management: answers
            .no_management
            .as_ref()
            .map(no_management)
            .unwrap_or_default(),
        devices: devices
            .map(|d| device(d, answers.cuda, needed_bytes))
            .collect(),
    }
}

fn refusal(answers: &Answers) -> Option<(GpuReason, String)> {
    if !answers.no_library.is_empty() {
        return Some((GpuReason::NoDriver, answers.no_library.clone()));
    }
    if !answers.no_symbol.is_empty() {
        let detail = format!("libcuda.so.1 lacks the function {}", answers.no_symbol);
        return Some((GpuReason::DriverUnusable, detail));
    }
    let failed = |why: &str| format!("cuInit: {why} ({})", answers.init);
    match answers.init {
        0 if answers.devices.is_empty() => Some((
            GpuReason::NoDevice,
            "no device is visible to this process".into(),
        )),
        0 => None,
        NO_DEVICE => Some((GpuReason::NoDevice, failed("no device"))),
        SYSTEM_NOT_READY => Some((
            GpuReason::SystemNotReady,
            failed(
                "the machine is not ready, for example because nvidia-fabricmanager does not run",
            ),
        )),
        SYSTEM_DRIVER_MISMATCH | COMPAT_NOT_SUPPORTED => Some((
            GpuReason::DriverMismatch,
            failed("the container's libcuda.so.1 does not match the node's driver"),
        )),
        _ if is_mismatch(answers) => {
            let why = answers.no_management.as_ref().map(no_management);
            Some((GpuReason::DriverMismatch, failed(&why.unwrap_or_default())))
        }
        _ => Some((GpuReason::DriverUnusable, failed("failed"))),
    }
}

fn is_mismatch(answers: &Answers) -> bool {
    answers.no_management == Some(NoManagement::Refused(RM_VERSION_MISMATCH))
}

fn no_management(why: &NoManagement) -> String {
    match why {
        NoManagement::Refused(RM_VERSION_MISMATCH) => {
            format!(
                "{why}: DriverMismatch, the driver's libraries and the kernel's module are of different versions"
            )
        }
        _ => why.to_string(),
    }
}

fn cuda(version: i32) -> String {
    if version <= 0 {
        return String::new();
    }
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

fn device(answer: &Answer, cuda: i32, needed_bytes: u64) -> Device {
    // An instance of a partitioned GPU is `<GPU> MIG <profile>`.
    let mig = answer.name.split(' ').any(|word| word == "MIG");
    let (mode, limit) = match answer.compute_mode {
        PROHIBITED => ("Prohibited", Some(DeviceLimit::Prohibited)),
        EXCLUSIVE_PROCESS => ("ExclusiveProcess", Some(DeviceLimit::ExclusiveProcess)),
        _ => ("Default", None),
    };
    let memory = match answer.memory_free_bytes {
        Some(free) if free < needed_bytes => Some(DeviceLimit::OutOfMemory),
        // NVML knows an instance by another name, and an instance supports no window anyway.
        None if !mig => Some(DeviceLimit::FreeMemoryUnknown),
        _ => None,
    };
    let limits = [
        mig.then_some(DeviceLimit::MigEnabled),
        limit,
        memory,
        (cuda < BATCH_SINCE).then_some(DeviceLimit::DriverTooOld),
    ];
    let (major, minor) = answer.capability;
    Device {
        name: answer.name.clone(),
        uuid: uuid_text(if mig { "MIG" } else { "GPU" }, &answer.uuid),
        memory_total_bytes: answer.memory_total_bytes,
        memory_free_bytes: answer.memory_free_bytes,
        compute_capability: format!("{major}.{minor}"),
        compute_mode: mode.into(),
        link: answer.link,
        numa_node: answer.numa_node,
        limits: limits.into_iter().flatten().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDED: u64 = 1 << 30;

    fn one(name: &str, compute_mode: i32) -> Answers {
        Answers {
            cuda: 13000,
            devices: vec![Answer {
                name: name.into(),
                compute_mode,
                memory_free_bytes: Some(NEEDED),
                ..Answer::default()
            }],
            ..Answers::default()
        }
    }

    #[test]
    fn what_stands_against_every_gpu_has_a_name() {
        let init = |init| Answers {
            init,
            ..Answers::default()
        };
        let no_library = Answers {
            no_library: "libcuda.so.1: cannot open shared object file".into(),
            ..Answers::default()
        };
        let no_symbol = Answers {
            no_symbol: "cuInit",
            ..Answers::default()
        };
        let mismatched = Answers {
            no_management: Some(NoManagement::Refused(18)),
            ..init(999)
        };
        for (answers, reason, words) in [
            (
                Some(mismatched),
                Some(GpuReason::DriverMismatch),
                "different versions",
            ),
            (
                Some(init(802)),
                Some(GpuReason::SystemNotReady),
                "nvidia-fabricmanager",
            ),
            (None, Some(GpuReason::TimedOut), "in time"),
            (
                Some(no_library),
                Some(GpuReason::NoDriver),
                "shared object file",
            ),
            (
                Some(no_symbol),
                Some(GpuReason::DriverUnusable),
                "lacks the function cuInit",
            ),
            (
                Some(init(NO_DEVICE)),
                Some(GpuReason::NoDevice),
                "no device",
            ),
            (Some(init(0)), Some(GpuReason::NoDevice), "no device"),
            (Some(init(803)), Some(GpuReason::DriverMismatch), "(803)"),
            (Some(init(804)), Some(GpuReason::DriverMismatch), "(804)"),
            (Some(init(999)), Some(GpuReason::DriverUnusable), "(999)"),
            (Some(one("H100", 0)), None, ""),
        ] {
            let gpu = judged(answers, NEEDED);
            assert_eq!(gpu.reason, reason, "{gpu:?}");
            assert!(gpu.detail.contains(words), "{gpu:?}");
        }
    }

    #[test]
    fn limits_of_a_device_have_names() {
        for (name, mode, cuda, limits) in [
            ("NVIDIA H100 80GB HBM3", 0, 12080, vec![]),
            (
                "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
                0,
                13000,
                vec![DeviceLimit::MigEnabled],
            ),
            ("MIGHTY", 3, 13000, vec![DeviceLimit::ExclusiveProcess]),
            ("A", 2, 13000, vec![DeviceLimit::Prohibited]),
            ("A", 0, 12070, vec![DeviceLimit::DriverTooOld]),
        ] {
            let mut answers = one(name, mode);
            answers.cuda = cuda;
            let gpu = judged(Some(answers), NEEDED);
            assert_eq!(gpu.devices[0].limits, limits, "{gpu:?}");
        }
    }

    #[test]
    fn memory_that_is_short_or_not_told_is_a_limit() {
        for (name, free, limits) in [
            ("A", Some(NEEDED), vec![]),
            ("A", Some(NEEDED - 1), vec![DeviceLimit::OutOfMemory]),
            ("A", None, vec![DeviceLimit::FreeMemoryUnknown]),
            ("A MIG 1g.10gb", None, vec![DeviceLimit::MigEnabled]),
        ] {
            let mut answers = one(name, 0);
            answers.devices[0].memory_free_bytes = free;
            let gpu = judged(Some(answers), NEEDED);
            assert_eq!(gpu.devices[0].limits, limits, "{gpu:?}");
        }
    }

    #[test]
    fn versions_and_uuids_are_written_as_nvidias_tools_write_them() {
        let mut answers = one("H100 MIG 1g.10gb", 0);
        answers.devices[0].uuid = std::array::from_fn(|at| at as u8 * 17);
        answers.devices[0].capability = (9, 0);
        let gpu = judged(Some(answers), NEEDED);
        let device = &gpu.devices[0];
        assert_eq!(device.uuid, "MIG-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!((&*gpu.cuda, &*device.compute_capability), ("13.0", "9.0"));
        assert_eq!(cuda(12080), "12.8");
    }
}
