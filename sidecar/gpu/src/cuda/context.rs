//! One context per device and process. It takes about 0.5 GiB of device memory, whatever the number of windows.
#![allow(unsafe_code)]

use super::api::{
    Api, Compute, DEVICE_UNAVAILABLE, Failed, NO_DEVICE, NOT_FOUND, OUT_OF_MEMORY, done,
};
use super::library::Library;
use super::management::Management;
use crate::device::NoWindow;
use cudarc::driver::sys::{CUcomputemode, CUcontext, CUdevice, CUdevice_attribute, CUuuid};
use kvcachepool_protocol::window::Unavailable;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Allows any number of processes.
const ANY_PROCESS: c_int = CUcomputemode::CU_COMPUTEMODE_DEFAULT as c_int;
/// Major and minor.
const CAPABILITY: [CUdevice_attribute; 2] = [
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
];
/// Longest device name in bytes.
const NAME_BYTES: usize = 256;

/// Upper bound of a context's device memory. Published measurements on data-centre GPUs are 520 to 616 MiB.
pub const CONTEXT_BYTES: u64 = 640 << 20;
/// Device memory always left to vLLM on the same device. vLLM has sized its KV cache before and allocates little more while it serves, but
/// fails if nothing is left.
const MARGIN_BYTES: u64 = 256 << 20;

/// A device with its primary context. The context is released when its last user, such as a window, is gone.
pub struct Context {
    pub(super) api: &'static Api,
    /// Functions that windows do not need; or the name of the missing one.
    compute: Result<&'static Compute, &'static str>,
    pub(super) device: CUdevice,
    /// The driver's name of the device.
    pub name: String,
    context: CUcontext,
    /// Copies whose end is unknown.
    pub(super) doubts: AtomicU32,
    /// Held between the check of free memory and the allocation.
    taking: Mutex<()>,
}

// SAFETY: a context may be current on any number of threads; all other fields are plain data.
unsafe impl Send for Context {}
// SAFETY: as above; the fields do not change.
unsafe impl Sync for Context {}

impl Context {
    /// Functions for kernels and measurements. Fails if the driver lacks one.
    pub(super) fn compute(&self) -> Result<&'static Compute, Failed> {
        self.compute.map_err(|call| Failed {
            call,
            result: NOT_FOUND,
        })
    }

    /// Compute capability times ten, like PTX targets; 0 if unknown.
    pub(super) fn capability(&self) -> c_int {
        let [major, minor] = CAPABILITY.map(|attribute| {
            let mut value = 0;
            // SAFETY: a pointer to a local int, and this context's device.
            unsafe { (self.api.device_attribute)(&mut value, attribute, self.device) };
            value
        });
        major * 10 + minor
    }

    /// Fails if a copy in this context is in doubt, because a new window would be lost as well.
    pub(super) fn trusted(&self) -> Result<(), NoWindow> {
        match self.doubts.load(Ordering::Relaxed) {
            0 => Ok(()),
            copies => Err(NoWindow::new(
                Unavailable::DriverFailed,
                format!("copies that failed or hang, and may not have ended: {copies}"),
            )),
        }
    }

    /// Allocates memory with `take` if the device has this many bytes to spare. The context is current.
    pub(super) fn spare<T>(
        &self,
        bytes: u64,
        take: impl FnOnce() -> Result<T, NoWindow>,
    ) -> Result<T, NoWindow> {
        let _taking = self.taking.lock();
        let (free, _) = self.memory().map_err(refused)?;
        spared(free, bytes)?;
        take()
    }

    /// Free and total device memory in bytes.
    pub fn memory(&self) -> Result<(u64, u64), Failed> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers to two local sizes; the context is current.
        let asked = unsafe { (self.api.memory)(&mut free, &mut total) };
        done("cuMemGetInfo", asked)?;
        Ok((free as u64, total as u64))
    }

    /// CUDA version of the driver: 12080 is 12.8.
    pub fn cuda(&self) -> Result<i32, Failed> {
        let mut version = 0;
        // SAFETY: a pointer to a local int.
        let asked = unsafe { (self.compute()?.version)(&mut version) };
        done("cuDriverGetVersion", asked)?;
        Ok(version)
    }

    /// Waits for all work of the device. Fails if any of it failed.
    pub(super) fn finish(&self) -> Result<(), Failed> {
        self.enter()?;
        // SAFETY: no arguments; the context is current.
        let finished = unsafe { (self.compute()?.context_synchronize)() };
        done("cuCtxSynchronize", finished)
    }

    /// Waits until earlier work of the device has ended. A failure means that the context and all its work are lost.
    pub(super) fn settle(&self) {
        if let Err(failed) = self.finish() {
            tracing::warn!(error = %failed, "work on the GPU failed");
        }
    }

    /// Makes this context current on this thread.
    pub fn enter(&self) -> Result<(), Failed> {
        // SAFETY: the context was retained, and is released with this object.
        done("cuCtxSetCurrent", unsafe {
            (self.api.context_set)(self.context)
        })
    }

    /// Keeps the context for the life of the process, after a window worked: its page locks stay, and later windows use it.
    pub(super) fn keep(self: &Arc<Self>) {
        static KEPT: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());
        let mut kept = KEPT.lock();
        if !kept.iter().any(|known| Arc::ptr_eq(known, self)) {
            kept.push(self.clone());
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nothing that was created in the context is left, because each such object holds it. This thread must not continue with a
        // released context; other threads enter one before each call.
        let released = unsafe {
            (self.api.context_set)(null_mut());
            (self.api.context_release)(self.device)
        };
        if let Err(failed) = done("cuDevicePrimaryCtxRelease", released) {
            tracing::warn!(error = %failed, "cannot release a CUDA context");
        }
    }
}

/// Checks that a device with `free` bytes of free memory has `bytes` to spare.
fn spared(free: u64, bytes: u64) -> Result<(), NoWindow> {
    let needed = bytes.saturating_add(MARGIN_BYTES);
    if free >= needed {
        return Ok(());
    }
    let mib = |bytes: u64| bytes >> 20;
    let detail = format!(
        "the device has {} MiB of free memory, but needs {} MiB, including {} MiB reserved for vLLM: lower vLLM's --gpu-memory-utilization",
        mib(free),
        mib(needed),
        mib(MARGIN_BYTES)
    );
    Err(NoWindow::new(Unavailable::OutOfMemory, detail))
}

/// Checks that the device has memory for a context and a window. Asks NVML, because the driver reports free memory only within a context,
/// which would already have taken its part.
fn has_room(uuid: &Uuid, window_bytes: u64) -> Result<(), NoWindow> {
    let management =
        Management::open().map_err(|reason| NoWindow::new(Unavailable::NoDriver, reason))?;
    let free = management.free_bytes(uuid).ok_or_else(|| {
        let detail = "NVML does not report the device's free memory";
        NoWindow::new(Unavailable::DriverFailed, detail)
    })?;
    spared(free, CONTEXT_BYTES.saturating_add(window_bytes))
}

/// Free device memory required for a first window of this size. Bytes.
pub fn needed_bytes(window_bytes: u64) -> u64 {
    window_bytes.saturating_add(CONTEXT_BYTES + MARGIN_BYTES)
}

/// Converts a failed driver call to the reason for not making a window.
pub fn refused(failed: Failed) -> NoWindow {
    let why = match failed.result {
        OUT_OF_MEMORY => Unavailable::OutOfMemory,
        DEVICE_UNAVAILABLE => Unavailable::ExclusiveProcess,
        NO_DEVICE => Unavailable::NoDevice,
        _ => Unavailable::DriverFailed,
    };
    NoWindow::new(why, failed)
}

/// The functions of one driver.
pub(super) struct Driver {
    api: Api,
    compute: Result<Compute, &'static str>,
}

impl Driver {
    /// Loads the functions of a library, and initialises it.
    pub(super) fn of(library: &Library) -> Result<Self, String> {
        let api = Api::of(library).map_err(|name| format!("libcuda.so.1 has no {name}"))?;
        // SAFETY: the only argument is the flags, which must be 0.
        match unsafe { (api.init)(0) } {
            0 => Ok(Self {
                api,
                compute: Compute::of(library),
            }),
            result => Err(format!("cuInit failed with {result}")),
        }
    }
}

fn driver() -> Result<&'static Driver, NoWindow> {
    static DRIVER: OnceLock<Result<Driver, String>> = OnceLock::new();
    let opened = DRIVER.get_or_init(|| Driver::of(&Library::open(c"libcuda.so.1")?));
    match opened {
        Ok(driver) => Ok(driver),
        Err(reason) => Err(NoWindow::new(Unavailable::NoDriver, reason)),
    }
}

/// UUIDs of the visible devices, in the driver's order; at least one.
pub fn devices() -> Result<Vec<String>, NoWindow> {
    let found = uuids(&driver()?.api)?;
    match found.is_empty() {
        true => Err(NoWindow::new(
            Unavailable::NoDevice,
            "the driver shows no device to this process",
        )),
        false => Ok(found.iter().map(|(_, uuid)| hex(uuid)).collect()),
    }
}

/// The context of the device with this UUID. Creates one if needed, without a check of free memory.
pub fn of(uuid: &str) -> Result<Arc<Context>, NoWindow> {
    known_or_made(uuid, |_| Ok(()))
}

/// Like [`of`], for a window beside a vLLM: a context is created only if the device has memory to spare for both.
pub fn beside_vllm(uuid: &str, window_bytes: u64) -> Result<Arc<Context>, NoWindow> {
    known_or_made(uuid, |uuid| has_room(uuid, window_bytes))
}

fn known_or_made(
    uuid: &str,
    may: impl FnOnce(&Uuid) -> Result<(), NoWindow>,
) -> Result<Arc<Context>, NoWindow> {
    static CONTEXTS: Contexts = Contexts::new();
    CONTEXTS.of(driver()?, &digits(uuid), may)
}

/// The context of each device that has one. A driver call that hangs for one device does not block the others.
pub(super) struct Contexts(Mutex<BTreeMap<CUdevice, Arc<Mutex<Weak<Context>>>>>);

impl Contexts {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    /// The context of the device with these UUID digits: the existing one, or a new one if `may` permits.
    pub(super) fn of(
        &self,
        driver: &'static Driver,
        wanted: &str,
        may: impl FnOnce(&Uuid) -> Result<(), NoWindow>,
    ) -> Result<Arc<Context>, NoWindow> {
        let (device, uuid) = find(&driver.api, wanted)?;
        let place = self.0.lock().entry(device).or_default().clone();
        let mut known = place.lock();
        if let Some(context) = known.upgrade() {
            return Ok(context);
        }
        let context = Arc::new(make(driver, device, || may(&uuid))?);
        *known = Arc::downgrade(&context);
        Ok(context)
    }
}

/// A UUID in canonical form, without prefix, dashes and case.
fn digits(uuid: &str) -> String {
    let bare = uuid.trim_start_matches("GPU-").trim_start_matches("MIG-");
    let hex = bare.chars().filter(char::is_ascii_hexdigit);
    hex.collect::<String>().to_ascii_lowercase()
}

type Uuid = [u8; 16];

fn hex(uuid: &Uuid) -> String {
    uuid.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn uuids(api: &Api) -> Result<Vec<(CUdevice, Uuid)>, NoWindow> {
    let mut count = 0;
    // SAFETY: the pointer is to a local int; cuInit has succeeded.
    done("cuDeviceGetCount", unsafe {
        (api.device_count)(&mut count)
    })
    .map_err(refused)?;
    let uuid = |ordinal| {
        let (mut device, mut uuid) = (0, CUuuid { bytes: [0; 16] });
        // SAFETY: pointers to a local int and a local structure.
        let answered = unsafe {
            (api.device_get)(&mut device, ordinal) == 0 && (api.device_uuid)(&mut uuid, device) == 0
        };
        answered.then_some((device, uuid.bytes.map(|byte| byte as u8)))
    };
    Ok((0..count).filter_map(uuid).collect())
}

fn find(api: &Api, wanted: &str) -> Result<(CUdevice, Uuid), NoWindow> {
    let known = uuids(api)?;
    let found = known.iter().find(|(_, uuid)| hex(uuid) == wanted);
    found.copied().ok_or_else(|| {
        let detail = format!("none of {} devices has UUID {wanted}", known.len());
        NoWindow::new(Unavailable::NoDevice, detail)
    })
}

fn make(
    driver: &'static Driver,
    device: CUdevice,
    may: impl FnOnce() -> Result<(), NoWindow>,
) -> Result<Context, NoWindow> {
    let api = &driver.api;
    let (mut name, mut mode, mut context) = ([0u8; NAME_BYTES], 0, null_mut());
    // SAFETY: pointers to NAME_BYTES local bytes, with their length, and to a local int.
    unsafe {
        (api.device_name)(name.as_mut_ptr().cast(), NAME_BYTES as c_int, device);
        (api.device_attribute)(
            &mut mode,
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE,
            device,
        );
    }
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    let name = name.to_string_lossy().into_owned();
    if name.split(' ').any(|word| word == "MIG") {
        return Err(NoWindow::new(Unavailable::MigEnabled, name));
    }
    if mode != ANY_PROCESS {
        let detail = format!("{name} has compute mode {mode}, expected {ANY_PROCESS} (default)");
        return Err(NoWindow::new(Unavailable::ExclusiveProcess, detail));
    }
    may()?;
    // SAFETY: the pointer is to a local handle; the driver listed the device.
    let retained = unsafe { (api.context_retain)(&mut context, device) };
    done("cuDevicePrimaryCtxRetain", retained).map_err(refused)?;
    Ok(Context {
        api,
        compute: driver.compute.as_ref().map_err(|name| *name),
        device,
        name,
        context,
        doubts: AtomicU32::new(0),
        taking: Mutex::new(()),
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
    fn what_is_taken_leaves_the_margin() {
        assert_eq!(spared((100 << 20) + MARGIN_BYTES, 100 << 20), Ok(()));
        let none = spared((100 << 20) + MARGIN_BYTES - 1, 100 << 20).unwrap_err();
        assert_eq!(none.why, Unavailable::OutOfMemory);
        assert!(none.detail.starts_with("the device has 355 MiB"), "{none}");
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
