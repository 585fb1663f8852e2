//! One context per device and process: it costs some 0.5 GiB of the device's memory, whatever the number of windows.
#![allow(unsafe_code)]

use super::api::{Api, DEVICE_UNAVAILABLE, Failed, NO_DEVICE, OUT_OF_MEMORY, Opaque, done};
use super::library::Library;
use crate::gpu::device::NoWindow;
use kvcachepool_protocol::window::Unavailable;
use parking_lot::Mutex;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::{Arc, OnceLock};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`; 0 is for any number of processes.
const COMPUTE_MODE: c_int = 20;
/// Most bytes of a name.
const NAME_BYTES: usize = 256;

/// A device with its primary context. It lives as long as the process.
pub struct Context {
    pub api: &'static Api,
    pub device: c_int,
    pub name: String,
    context: Opaque,
}

// SAFETY: a context may be current on any thread, and on several; all other fields are plain.
unsafe impl Send for Context {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Context {}

impl Context {
    /// What the calls of this thread go to from now on.
    pub fn enter(&self) -> Result<(), Failed> {
        // SAFETY: the context was retained and is never released.
        done("cuCtxSetCurrent", unsafe {
            (self.api.context_set)(self.context)
        })
    }
}

/// Why there is no window where a call of the driver failed.
pub fn refused(failed: Failed) -> NoWindow {
    let why = match failed.result {
        OUT_OF_MEMORY => Unavailable::OutOfMemory,
        DEVICE_UNAVAILABLE => Unavailable::ExclusiveProcess,
        NO_DEVICE => Unavailable::NoDevice,
        _ => Unavailable::DriverFailed,
    };
    NoWindow::new(
        why,
        format!("{} failed with {}", failed.call, failed.result),
    )
}

fn api() -> Result<&'static Api, NoWindow> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let opened = API.get_or_init(|| {
        let library = Library::open(c"libcuda.so.1")?;
        let api = Api::of(&library).map_err(|name| format!("libcuda.so.1 has no {name}"))?;
        // SAFETY: no argument but the flags, which must be 0.
        match unsafe { (api.init)(0) } {
            0 => Ok(api),
            result => Err(format!("cuInit failed with {result}")),
        }
    });
    match opened {
        Ok(api) => Ok(api),
        Err(reason) => Err(NoWindow::new(Unavailable::NoDriver, reason)),
    }
}

/// The context of the device of this UUID, made where there is none yet.
pub fn of(uuid: &str) -> Result<Arc<Context>, NoWindow> {
    static MADE: Mutex<Vec<(String, Arc<Context>)>> = Mutex::new(Vec::new());
    let wanted = digits(uuid);
    let mut made = MADE.lock();
    if let Some((_, context)) = made.iter().find(|(known, _)| *known == wanted) {
        return Ok(context.clone());
    }
    let context = Arc::new(make(api()?, &wanted)?);
    made.push((wanted, context.clone()));
    Ok(context)
}

/// A UUID without what differs between those who write it: prefix, dashes, case.
fn digits(uuid: &str) -> String {
    let bare = uuid.trim_start_matches("GPU-").trim_start_matches("MIG-");
    let hex = bare.chars().filter(char::is_ascii_hexdigit);
    hex.collect::<String>().to_ascii_lowercase()
}

fn make(api: &'static Api, wanted: &str) -> Result<Context, NoWindow> {
    let mut count = 0;
    // SAFETY: the pointer is to an int of ours; cuInit has succeeded.
    done("cuDeviceGetCount", unsafe {
        (api.device_count)(&mut count)
    })
    .map_err(refused)?;
    let found = (0..count).find_map(|ordinal| {
        let (mut device, mut uuid) = (0, [0u8; 16]);
        // SAFETY: pointers to an int and to 16 bytes of ours.
        let answered = unsafe {
            (api.device_get)(&mut device, ordinal) == 0
                && (api.device_uuid)(uuid.as_mut_ptr(), device) == 0
        };
        let text: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        (answered && text == wanted).then_some(device)
    });
    let Some(device) = found else {
        let said = format!("none of {count} devices has UUID {wanted}");
        return Err(NoWindow::new(Unavailable::NoDevice, said));
    };
    let (mut name, mut mode, mut context) = ([0u8; NAME_BYTES], 0, null_mut());
    // SAFETY: pointers to NAME_BYTES bytes, with their number beside them, and to an int of ours.
    unsafe {
        (api.device_name)(name.as_mut_ptr().cast(), NAME_BYTES as c_int, device);
        (api.device_attribute)(&mut mode, COMPUTE_MODE, device);
    }
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    if name.split(' ').any(|word| word == "MIG") {
        return Err(NoWindow::new(Unavailable::MigEnabled, name));
    }
    if mode != 0 {
        let said = format!("{name} has compute mode {mode}");
        return Err(NoWindow::new(Unavailable::ExclusiveProcess, said));
    }
    // SAFETY: the pointer is to a handle of ours, the device is one that the driver named.
    let retained = unsafe { (api.context_retain)(&mut context, device) };
    done("cuDevicePrimaryCtxRetain", retained).map_err(refused)?;
    Ok(Context {
        api,
        device,
        name,
        context,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_the_same_however_it_is_written() {
        let wanted = "00112233445566778899aabbccddeeff";
        for uuid in [
            "GPU-00112233-4455-6677-8899-aabbccddeeff",
            "00112233-4455-6677-8899-AABBCCDDEEFF",
            wanted,
        ] {
            assert_eq!(digits(uuid), wanted);
        }
    }

    #[test]
    fn what_a_driver_refuses_has_a_name() {
        for (result, why) in [
            (OUT_OF_MEMORY, Unavailable::OutOfMemory),
            (DEVICE_UNAVAILABLE, Unavailable::ExclusiveProcess),
            (NO_DEVICE, Unavailable::NoDevice),
            (999, Unavailable::DriverFailed),
        ] {
            let failed = Failed {
                call: "cuX",
                result,
            };
            assert_eq!(refused(failed).why, why);
        }
    }
}
