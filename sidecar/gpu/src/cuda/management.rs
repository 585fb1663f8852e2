//! NVML: device properties that the driver API provides only within a context. NVML creates no context and takes no device memory.
#![allow(unsafe_code)]

use super::library::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

/// Longest version in bytes.
const VERSION_BYTES: usize = 256;

/// `nvmlMemory_t`: total, free, used.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoManagement {
    /// NVML is missing, or lacks a function.
    #[error("{0}")]
    Missing(String),
    /// Initialisation failed with this `nvmlReturn_t`.
    #[error("nvmlInit failed with {0}")]
    Refused(c_int),
}

/// A device's connection to the host, now and at most. An idle device may use a lower generation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Link {
    /// PCIe generation in use.
    pub generation: u32,
    /// Highest generation that device and machine support.
    pub generation_max: u32,
    pub width: u32,
    /// Highest number of lanes that device and machine support.
    pub width_max: u32,
}

type AskNumber = unsafe extern "C" fn(*mut c_void, *mut c_uint) -> c_int;

/// The initialised library. Every result of its functions is an `nvmlReturn_t`, 0 for success.
pub struct Management {
    version: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory: unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int,
    /// In the order of [`Link`]'s fields. Only the doctor needs them.
    link: Option<[AskNumber; 4]>,
}

impl Management {
    /// Opens NVML. Fails if it is missing or does not initialise.
    pub fn open() -> Result<Self, NoManagement> {
        let library = Library::open(c"libnvidia-ml.so.1").map_err(NoManagement::Missing)?;
        let lacks = |name: &str| NoManagement::Missing(format!("libnvidia-ml.so.1 has no {name}"));
        // SAFETY: the types match nvml.h: nvmlDevice_t is a pointer.
        let (this, started) = unsafe {
            let init: unsafe extern "C" fn() -> c_int =
                library.function("nvmlInit_v2").map_err(lacks)?;
            let this = Self {
                version: library
                    .function("nvmlSystemGetDriverVersion")
                    .map_err(lacks)?,
                by_uuid: library
                    .function("nvmlDeviceGetHandleByUUID")
                    .map_err(lacks)?,
                memory: library.function("nvmlDeviceGetMemoryInfo").map_err(lacks)?,
                link: link_functions(&library),
            };
            (this, init())
        };
        match started {
            0 => Ok(this),
            result => Err(NoManagement::Refused(result)),
        }
    }

    /// Version of the driver; empty if unknown.
    pub fn driver_version(&self) -> String {
        let mut version = [0u8; VERSION_BYTES];
        // SAFETY: the pointer is to as many bytes as the length argument says.
        unsafe { (self.version)(version.as_mut_ptr().cast(), VERSION_BYTES as c_uint) };
        let text = CStr::from_bytes_until_nul(&version).unwrap_or_default();
        text.to_string_lossy().into_owned()
    }

    /// Free memory in bytes of the device with this UUID; none if unknown.
    pub fn free_bytes(&self, uuid: &[u8; 16]) -> Option<u64> {
        let (device, mut memory) = (self.device(uuid)?, Memory::default());
        // SAFETY: a handle from NVML, and a pointer to a local structure.
        let found = unsafe { (self.memory)(device, &mut memory) } == 0;
        (found && memory.free.saturating_add(memory.used) > 0).then_some(memory.free)
    }

    /// Host connection of the device with this UUID; none if unknown, as for devices without PCIe.
    pub fn link(&self, uuid: &[u8; 16]) -> Option<Link> {
        let device = self.device(uuid)?;
        let mut numbers = [0; 4];
        for (ask, number) in self.link?.iter().zip(&mut numbers) {
            // SAFETY: a handle from NVML, and a pointer to a local number.
            if unsafe { ask(device, number) } != 0 {
                return None;
            }
        }
        let [generation, generation_max, width, width_max] = numbers;
        Some(Link {
            generation,
            generation_max,
            width,
            width_max,
        })
    }

    fn device(&self, uuid: &[u8; 16]) -> Option<*mut c_void> {
        let uuid = CString::new(uuid_text("GPU", uuid)).ok()?;
        let mut device = null_mut();
        // SAFETY: a C string, and a pointer to a local handle.
        let found = unsafe { (self.by_uuid)(uuid.as_ptr(), &mut device) } == 0;
        found.then_some(device)
    }
}

fn link_functions(library: &Library) -> Option<[AskNumber; 4]> {
    // SAFETY: the type matches nvml.h for these four functions: a device, and a pointer to an unsigned int.
    unsafe {
        Some([
            library
                .function("nvmlDeviceGetCurrPcieLinkGeneration")
                .ok()?,
            library
                .function("nvmlDeviceGetMaxPcieLinkGeneration")
                .ok()?,
            library.function("nvmlDeviceGetCurrPcieLinkWidth").ok()?,
            library.function("nvmlDeviceGetMaxPcieLinkWidth").ok()?,
        ])
    }
}

/// A UUID in the format of NVIDIA's tools. `kind` is `GPU`, or `MIG` for an instance.
pub fn uuid_text(kind: &str, uuid: &[u8; 16]) -> String {
    let mut out = format!("{kind}-");
    for (at, byte) in uuid.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            out.push('-');
        }
        out += &format!("{byte:02x}");
    }
    out
}
