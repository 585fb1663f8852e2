//! An allocation of the virtual-memory API, created here or imported, mapped at an address until it is dropped.
#![allow(unsafe_code)]

use super::api::{Failed, done};
use super::context::Context;
use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationHandleType,
    CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType,
};
use std::sync::Arc;

pub(super) const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Location of a context's device.
pub(super) fn on_device(context: &Context) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: context.device,
    }
}

/// An exclusively owned, mapped allocation.
pub(super) struct Mapped {
    context: Arc<Context>,
    pub(super) allocation: CUmemGenericAllocationHandle,
    /// Mapped address; 0 before an address range is reserved.
    pub(super) address: CUdeviceptr,
    bytes: usize,
}

impl Mapped {
    /// Maps an allocation of this many bytes. Releases it on failure. The context is current.
    pub(super) fn of(
        context: &Arc<Context>,
        allocation: CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> Result<Self, Failed> {
        let api = context.api;
        let mut this = Self {
            context: context.clone(),
            allocation,
            address: 0,
            bytes,
        };
        let access = CUmemAccessDesc {
            location: on_device(context),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
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
