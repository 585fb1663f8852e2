//! NVML: what the driver API says of a device only within a context. It makes none and takes no memory of the device.
#![allow(unsafe_code)]

use super::library::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

/// Most bytes of a version.
const VERSION_BYTES: usize = 256;

/// `nvmlMemory_t`: total, free, used.
#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// The library, started; every result of its functions is an `nvmlReturn_t`, 0 for success.
pub struct Management {
    version: unsafe extern "C" fn(*mut c_char, c_uint) -> c_int,
    by_uuid: unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int,
    memory: unsafe extern "C" fn(*mut c_void, *mut Memory) -> c_int,
}

impl Management {
    /// Fails with what is missing, or does not start.
    pub fn open() -> Result<Self, String> {
        let library = Library::open(c"libnvidia-ml.so.1")?;
        let lacks = |name: &str| format!("libnvidia-ml.so.1 has no {name}");
        // SAFETY: the types are those of nvml.h: nvmlDevice_t is a pointer.
        let (this, started) = unsafe {
            let init: unsafe extern "C" fn() -> c_int =
                library.function(c"nvmlInit_v2").map_err(lacks)?;
            let this = Self {
                version: library
                    .function(c"nvmlSystemGetDriverVersion")
                    .map_err(lacks)?,
                by_uuid: library
                    .function(c"nvmlDeviceGetHandleByUUID")
                    .map_err(lacks)?,
                memory: library
                    .function(c"nvmlDeviceGetMemoryInfo")
                    .map_err(lacks)?,
            };
            (this, init())
        };
        match started {
            0 => Ok(this),
            result => Err(format!("nvmlInit failed with {result}")),
        }
    }

    /// Version of the driver; empty where it is not said.
    pub fn driver_version(&self) -> String {
        let mut version = [0u8; VERSION_BYTES];
        // SAFETY: the pointer is to as many bytes as are said beside it.
        unsafe { (self.version)(version.as_mut_ptr().cast(), VERSION_BYTES as c_uint) };
        let text = CStr::from_bytes_until_nul(&version).unwrap_or_default();
        text.to_string_lossy().into_owned()
    }

    /// Bytes of memory of the device of this UUID that nobody has; none where it is not said.
    pub fn free_bytes(&self, uuid: &[u8; 16]) -> Option<u64> {
        let uuid = CString::new(uuid_text("GPU", uuid)).ok()?;
        let (mut device, mut memory) = (null_mut(), Memory::default());
        // SAFETY: a C string, and pointers to a handle and a structure of ours; the handle is used only when it was given.
        let found = unsafe {
            (self.by_uuid)(uuid.as_ptr(), &mut device) == 0
                && (self.memory)(device, &mut memory) == 0
        };
        (found && memory.free.saturating_add(memory.used) > 0).then_some(memory.free)
    }
}

/// A UUID as NVIDIA's tools write it; `kind` is `GPU`, or `MIG` for an instance.
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
