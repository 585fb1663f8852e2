//! Windows in a CUDA device's memory, by the driver's C interface, opened at run time. Here lives all that calls the driver to move bytes; what
//! the driver says of devices without a context is asked by the doctor. Never run on a GPU yet: tests run it over a made-up driver.

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

pub use api::Failed;
pub use pins::locked_bytes;

/// A window of `bytes` bytes on the device of this UUID, however it is written (`GPU-...` or bare).
pub fn open(device_uuid: &str, bytes: u64) -> Result<Box<dyn Device>, NoWindow> {
    let context = context::beside_vllm(device_uuid, bytes)?;
    context.trusted()?;
    Ok(Box::new(device::CudaDevice::new(context, bytes)?))
}

/// The same for checks and measurements: that the device has memory to spare is the caller's affair.
pub fn open_alone(device_uuid: &str, bytes: u64) -> Result<Box<dyn Device>, NoWindow> {
    let context = context::of(device_uuid)?;
    Ok(Box::new(device::CudaDevice::new(context, bytes)?))
}
