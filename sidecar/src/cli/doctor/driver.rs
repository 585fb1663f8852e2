//! Queries NVIDIA's libraries about the GPUs, through their C interfaces (`cuda.h`, `nvml.h`). The node's driver provides the
//! libraries, if at all, so they are opened at run time. No context is created: it would take some 0.5 GiB of device memory from a vLLM.
#![allow(unsafe_code)]

use kvcachepool_gpu::cuda::Query;
use kvcachepool_gpu::cuda::library::Library;
use kvcachepool_gpu::cuda::management::{Link, Management, NoManagement};
use kvcachepool_gpu::cuda::sys::{CUdevice_attribute::*, CUuuid};
use std::ffi::{CStr, c_int};
use std::path::Path;

/// Raw answers of the libraries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answers {
    /// Why `libcuda.so.1` cannot be opened; empty if it can.
    pub no_library: String,
    /// A function that the library lacks; empty if it lacks none.
    pub no_symbol: &'static str,
    /// Result of `cuInit`; 0 = success.
    pub init: c_int,
    /// `cuDriverGetVersion`: 12080 is CUDA 12.8.
    pub cuda: c_int,
    /// Version of the driver, from NVML; empty without NVML.
    pub driver: String,
    /// Why NVML cannot be used; `None` if it can.
    pub no_management: Option<NoManagement>,
    pub devices: Vec<Answer>,
}

/// Answers for one device. 0 or `None`: unknown.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    pub name: String,
    pub uuid: [u8; 16],
    pub memory_total_bytes: u64,
    /// From NVML.
    pub memory_free_bytes: Option<u64>,
    /// Compute capability, major and minor.
    pub capability: (c_int, c_int),
    /// `CUcomputemode`.
    pub compute_mode: c_int,
    /// From NVML.
    pub link: Option<Link>,
    /// NUMA node that the device is attached to.
    pub numa_node: Option<u32>,
}

/// Queries the libraries. Returns at once when there is no GPU.
pub fn ask() -> Answers {
    let cuda = match Library::open(c"libcuda.so.1") {
        Ok(library) => Query::of(&library),
        Err(reason) => {
            return Answers {
                no_library: reason,
                ..Answers::default()
            };
        }
    };
    let mut answers = match cuda {
        Ok(cuda) => answers(&cuda),
        Err(name) => {
            return Answers {
                no_symbol: name,
                ..Answers::default()
            };
        }
    };
    match Management::open() {
        Ok(management) => complete(&mut answers, &management),
        Err(why) => answers.no_management = Some(why),
    }
    answers
}

/// Buffer size for a name or a bus address.
const NAME_BYTES: usize = 256;

fn answers(cuda: &Query) -> Answers {
    let mut answers = Answers::default();
    // SAFETY: the only pointer is to a local int. The version can be read before cuInit, and is most useful when cuInit fails.
    unsafe {
        (cuda.version)(&mut answers.cuda);
        answers.init = (cuda.init)(0);
    }
    if answers.init != 0 {
        return answers;
    }
    let mut count = 0;
    // SAFETY: the pointer is to a local int; cuInit has succeeded.
    unsafe { (cuda.device_count)(&mut count) };
    answers.devices = (0..count).map(|ordinal| answer(cuda, ordinal)).collect();
    answers
}

fn answer(cuda: &Query, ordinal: c_int) -> Answer {
    let mut answer = Answer::default();
    let (mut device, mut name, mut bytes) = (0, [0u8; NAME_BYTES], 0usize);
    let (mut uuid, mut bus) = (CUuuid { bytes: [0; 16] }, [0u8; NAME_BYTES]);
    // SAFETY: each pointer is to a local variable as large as the call writes; buffers are passed with their length. A call that fails
    // writes nothing; the zero that remains means unknown.
    unsafe {
        (cuda.device_get)(&mut device, ordinal);
        (cuda.device_name)(name.as_mut_ptr().cast(), NAME_BYTES as c_int, device);
        (cuda.device_uuid)(&mut uuid, device);
        (cuda.device_memory)(&mut bytes, device);
        (cuda.device_attribute)(
            &mut answer.capability.0,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            device,
        );
        (cuda.device_attribute)(
            &mut answer.capability.1,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            device,
        );
        (cuda.device_attribute)(
            &mut answer.compute_mode,
            CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            device,
        );
        (cuda.device_bus)(bus.as_mut_ptr().cast(), NAME_BYTES as c_int, device);
    }
    answer.name = text(&name);
    answer.uuid = uuid.bytes.map(|byte| byte as u8);
    answer.numa_node = numa_node(Path::new("/sys/bus/pci/devices"), &text(&bus));
    answer.memory_total_bytes = bytes as u64;
    answer
}

fn text(bytes: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(bytes).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

/// Adds what the driver API reports only within a context, from NVML.
fn complete(answers: &mut Answers, management: &Management) {
    answers.driver = management.driver_version();
    for device in &mut answers.devices {
        device.memory_free_bytes = management.free_bytes(&device.uuid);
        device.link = management.link(&device.uuid);
    }
}

/// The kernel reports -1 when it does not know, and drivers write bus addresses in upper case.
fn numa_node(devices: &Path, bus: &str) -> Option<u32> {
    let file = devices.join(bus.to_ascii_lowercase()).join("numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_which_numa_node_a_device_hangs_on() {
        let devices = tempfile::tempdir().unwrap();
        for (bus, said) in [("0000:0a:00.0", "1\n"), ("0000:0b:00.0", "-1\n")] {
            std::fs::create_dir(devices.path().join(bus)).unwrap();
            std::fs::write(devices.path().join(bus).join("numa_node"), said).unwrap();
        }
        for (bus, node) in [
            ("0000:0A:00.0", Some(1)),
            ("0000:0B:00.0", None),
            ("", None),
        ] {
            assert_eq!(numa_node(devices.path(), bus), node, "{bus}");
        }
    }
}
