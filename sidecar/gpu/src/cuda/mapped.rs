//! An allocation of the virtual-memory API, created here or imported, mapped at an address until it is dropped.
#![allow(unsafe_code)]

use super::api::{AccessDesc, Allocation, DevicePtr, Failed, Location, done};
use super::context::Context;
use std::sync::Arc;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(super) const POSIX_FD: i32 = 1;
const ON_DEVICE: i32 = 1;
const READ_WRITE: i32 = 3;

/// Location of a context's device.
pub(super) fn on_device(context: &Context) -> Location {
    Location {
        kind: ON_DEVICE,
        id: context.device,
    }
}

/// An exclusively owned, mapped allocation.
pub(super) struct Mapped {
    context: Arc<Context>,
    pub(super) allocation: Allocation,
    /// Mapped address; 0 before an address range is reserved.
    pub(super) address: DevicePtr,
    bytes: usize,
}

impl Mapped {
    /// Maps an allocation of this many bytes. Releases it on failure. The context is current.
    pub(super) fn of(
        context: &Arc<Context>,
        allocation: Allocation,
        bytes: usize,
    ) -> Result<Self, Failed> {
        let api = context.api;
        let mut this = Self {
            context: context.clone(),
            allocation,
            address: 0,
            bytes,
        };
        let access = AccessDesc {
            location: on_device(context),
            flags: READ_WRITE,
        };
        // SAFETY: pointers to a local address and structure; the reserved range is as large as the mapping.
        unsafe {
            done(
                "cuMemAddressReserve",
                (api.reserve)(&mut this.address, bytes, 0, 0, 0),
            )?;
            done("cuMemMap", (api.map)(this.address, bytes, 0, allocation, 0))?;
            done(
                "cuMemSetAccess",
                (api.set_access)(this.address, bytes, &access, 1),
            )?;
        }
        Ok(this)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let api = self.context.api;
        if self.context.enter().is_err() {
            return;
        }
        // SAFETY: address and allocation belong to this memory, and no copy uses it any more. Mappings in other processes stay until those
        // unmap it.
        unsafe {
            if self.address != 0 {
                (api.unmap)(self.address, self.bytes);
                (api.unreserve)(self.address, self.bytes);
            }
            (api.release)(self.allocation);
        }
    }
}
