//! Device memory that another process can map: through a descriptor of the virtual-memory API, or else a legacy IPC handle.
#![allow(unsafe_code)]

use super::api::{Failed, INVALID_VALUE, done};
use super::context::{Context, refused};
use super::mapped::{Mapped, POSIX_FD, on_device};
use crate::device::{Export, NoWindow};
use cudarc::driver::sys::{
    CUdeviceptr, CUipcMemHandle, CUmemAllocationGranularity_flags, CUmemAllocationProp,
    CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType,
};
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::Unavailable;
use rustix::fd::{FromRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;

enum Kind {
    /// An allocation, mapped at the address.
    Mapped(#[expect(dead_code, reason = "it is given back with this")] Mapped),
    /// Memory of `cuMemAlloc`.
    Plain,
}

pub struct Memory {
    context: Arc<Context>,
    kind: Kind,
    export: Export,
    address: CUdeviceptr,
    bytes: usize,
}

impl Memory {
    /// Allocates `bytes` bytes. The context is current.
    pub fn new(context: Arc<Context>, bytes: usize) -> Result<Self, NoWindow> {
        match Self::mapped(context.clone(), bytes) {
            Ok(memory) => Ok(memory),
            Err(failed) if refused(failed).why == Unavailable::OutOfMemory => Err(refused(failed)),
            Err(failed) => {
                tracing::info!(
                    error = %failed,
                    "device memory has no shareable descriptor; trying an IPC handle"
                );
                Self::plain(context, bytes)
            }
        }
    }

    fn mapped(context: Arc<Context>, bytes: usize) -> Result<Self, Failed> {
        let api = context.api;
        let prop = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: POSIX_FD,
            location: on_device(&context),
            win32HandleMetaData: null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; _],
            },
        };
        let least = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let (mut unit, mut allocation, mut fd) = (0, 0, -1i32);
        // SAFETY: pointers to a local size and structure.
        let asked = unsafe { (api.granularity)(&mut unit, &prop, least) };
        done("cuMemGetAllocationGranularity", asked)?;
        if unit == 0 || !bytes.is_multiple_of(unit) {
            // The device's pages are larger than a stage unit.
            done("cuMemCreate", INVALID_VALUE)?;
        }
        // SAFETY: pointers to a local handle and structure.
        let created = unsafe { (api.create)(&mut allocation, bytes, &prop, 0) };
        done("cuMemCreate", created)?;
        let mapped = Mapped::of(&context, allocation, bytes)?;
        // SAFETY: the handle is the allocation's; a descriptor is an int.
        done("cuMemExportToShareableHandle", unsafe {
            (api.export)((&raw mut fd).cast(), allocation, POSIX_FD, 0)
        })?;
        // SAFETY: the driver has created this descriptor for this process; it has no other owner.
        let fd = (fd >= 0).then(|| Arc::new(unsafe { OwnedFd::from_raw_fd(fd) }));
        let address = mapped.address;
        Ok(Self {
            context,
            kind: Kind::Mapped(mapped),
            export: Export {
                kind: WindowKind::PosixFd,
                fd,
                handle: Vec::new(),
            },
            address,
            bytes,
        })
    }

    fn plain(context: Arc<Context>, bytes: usize) -> Result<Self, NoWindow> {
        let api = context.api;
        let mut address = 0;
        let mut handle = CUipcMemHandle { reserved: [0; _] };
        // SAFETY: the pointer is to a local address.
        let allocated = unsafe { (api.alloc)(&mut address, bytes) };
        done("cuMemAlloc", allocated).map_err(refused)?;
        // SAFETY: the pointer is to a local handle; the address is the start of an allocation.
        let named = unsafe { (api.ipc_handle)(&mut handle, address) };
        // Dropped with the memory if the call failed.
        let this = Self {
            context,
            kind: Kind::Plain,
            export: Export {
                kind: WindowKind::IpcHandle,
                fd: None,
                handle: handle.reserved.map(|byte| byte as u8).to_vec(),
            },
            address,
            bytes,
        };
        done("cuIpcGetMemHandle", named).map_err(refused)?;
        Ok(this)
    }

    /// The descriptor or handle by which a worker maps the memory.
    pub fn export(&self) -> Export {
        self.export.clone()
    }

    /// Device address of a range; none if out of range.
    pub fn at(&self, offset: u64, bytes: u64) -> Option<CUdeviceptr> {
        let end = offset.checked_add(bytes)?;
        (end <= self.bytes as u64).then(|| self.address + offset)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // `Mapped` frees itself.
        if matches!(self.kind, Kind::Plain) && self.context.enter().is_ok() {
            // SAFETY: the address is this memory's, and no copy uses it any more. A worker's mapping stays until it unmaps it.
            unsafe { (self.context.api.free)(self.address) };
        }
    }
}
