//! Windows in CUDA device memory, through the driver's C interface, loaded at run time. Every driver call that moves bytes is in this
//! module. Its tests use a fake driver.

mod api;
pub mod buffer;
pub mod context;
mod device;
pub mod import;
pub mod launch;
pub mod library;
pub mod management;
mod mapped;
pub mod measure;
mod memory;
pub mod peer;
mod pins;
pub mod stream;

#[cfg(test)]
mod device_tests;
#[cfg(test)]
mod tests;

use super::device::{Device, NoWindow};

pub use api::{Failed, NO_DEVICE, Query};
pub use cudarc::driver::sys;
pub use pins::locked_bytes;

/// Opens a window of `bytes` bytes on the device with this UUID, with or without the prefix `GPU-`.
pub fn open(device_uuid: &str, bytes: u64) -> Result<Box<dyn Device>, NoWindow> {
    let context = context::beside_vllm(device_uuid, bytes)?;
    context.trusted()?;
    Ok(Box::new(device::CudaDevice::new(context, bytes)?))
}

/// Like [`open`], for checks and measurements: the caller makes sure that the device has memory to spare.
pub fn open_alone(device_uuid: &str, bytes: u64) -> Result<Box<dyn Device>, NoWindow> {
    let context = context::of(device_uuid)?;
    Ok(Box::new(device::CudaDevice::new(context, bytes)?))
}
