//! A device without memory: whoever makes it decides how its copies end. For tests and the simulation.

use super::device::{Device, DeviceError, Export, Part, Progress, Ticket};
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::Direction;
use parking_lot::Mutex;
use std::sync::Arc;

/// The copies of a stand-in.
pub trait Copies: Send {
    /// See [`Device::begin`].
    fn begin(&mut self, direction: Direction, parts: Vec<Part>) -> Result<Ticket, DeviceError>;
    /// See [`Device::progress`].
    fn progress(&mut self, ticket: Ticket) -> Progress;
}

/// Every copy is where the maker says.
impl Copies for Progress {
    fn begin(&mut self, _: Direction, _: Vec<Part>) -> Result<Ticket, DeviceError> {
        Ok(Ticket(1))
    }

    fn progress(&mut self, _: Ticket) -> Progress {
        self.clone()
    }
}

/// A device over copies that its maker shares.
#[derive(Debug)]
pub struct StandIn<C>(pub Arc<Mutex<C>>);

impl<C: Copies> Device for StandIn<C> {
    fn memory(&self) -> String {
        String::new()
    }

    fn export(&self) -> Export {
        Export {
            kind: WindowKind::Host,
            fd: None,
            handle: Vec::new(),
        }
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn read(&mut self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        Ok(())
    }

    fn begin(
        &mut self,
        direction: Direction,
        _: &Arc<Mapping>,
        parts: Vec<Part>,
    ) -> Result<Ticket, DeviceError> {
        self.0.lock().begin(direction, parts)
    }

    fn progress(&mut self, ticket: Ticket) -> Progress {
        self.0.lock().progress(ticket)
    }

    fn tells_ends(&self) -> bool {
        true
    }
}
