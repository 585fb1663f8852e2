//! Windows: staging memory that a worker maps, and the copies between it and the arena. This crate decides how bytes move and in which
//! order a stage changes hands. `sessions` decides which slots may be touched; sockets and threads are in `serve`.

pub mod copy_engine;
pub mod cuda;
pub mod device;
pub mod host;
pub mod lifecycle;
pub mod page;
pub mod room;
pub mod stand_in;

#[cfg(test)]
mod tests;

use device::{Device, NoWindow};
use kvcachepool_protocol::window::Unavailable;
use rustix::fd::OwnedFd;
use std::sync::Arc;

pub const STAGES: u32 = 8;
/// Stages are a multiple of this, which is larger than any device's memory pages.
const STAGE_UNIT: u64 = 2 << 20;

/// Bytes per stage of a window of at most this size.
pub fn stage_bytes(window_bytes: u64) -> Result<u64, NoWindow> {
    match window_bytes / u64::from(STAGES) / STAGE_UNIT * STAGE_UNIT {
        0 => Err(NoWindow::new(
            Unavailable::WindowTooLarge,
            format!(
                "a window of {window_bytes} bytes is smaller than {STAGES} stages of {STAGE_UNIT} bytes"
            ),
        )),
        bytes => Ok(bytes),
    }
}

/// Opens a window of `bytes` bytes on the device with this UUID, or in host memory if the UUID is empty. `ended` is an eventfd that the
/// device adds to when a copy ends, if it can.
pub fn open(
    device_uuid: &str,
    bytes: u64,
    ended: Arc<OwnedFd>,
) -> Result<Box<dyn Device>, NoWindow> {
    if device_uuid.is_empty() {
        return Ok(Box::new(host::HostDevice::new(bytes, ended)?));
    }
    cuda::open(device_uuid, bytes)
}
