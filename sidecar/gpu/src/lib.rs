//! Windows: staging memory that a worker maps, and the copies between it and the arena. Here lives how bytes move and in what order a
//! stage changes hands; whose slots they may touch is asked of `sessions`, sockets and threads are in `serve`.

pub mod course;
pub mod cuda;
pub mod device;
pub mod host;
pub mod mover;
pub mod page;
pub mod room;

#[cfg(test)]
mod tests;

use device::{Device, NoWindow};
use kvcachepool_protocol::window::Unavailable;
use rustix::fd::OwnedFd;
use std::sync::Arc;

pub const STAGES: u32 = 8;
/// A stage is a multiple of this: larger than the pages of any device's memory.
const STAGE_UNIT: u64 = 2 << 20;

/// Bytes of a stage of a window of at most so many bytes.
pub fn stage_bytes(window_bytes: u64) -> Result<u64, NoWindow> {
    match window_bytes / u64::from(STAGES) / STAGE_UNIT * STAGE_UNIT {
        0 => Err(NoWindow::new(
            Unavailable::WindowTooLarge,
            format!("{window_bytes} bytes are less than {STAGES} stages of {STAGE_UNIT}"),
        )),
        bytes => Ok(bytes),
    }
}

/// Memory for a window of `bytes` bytes on the device of this UUID, in host memory where it is empty. `ended` is an eventfd that the device adds to when a copy has
/// ended, where it can.
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
