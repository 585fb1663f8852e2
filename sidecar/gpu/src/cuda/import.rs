//! Maps another process's window, as a worker does. For the doctor, and for the program that checks windows on a device. Engines do the
//! same in Python.
#![allow(unsafe_code)]

use super::api::{Failed, INVALID_VALUE, done};
use super::context::Context;
use super::mapped::{Mapped, POSIX_FD};
use cudarc::driver::sys::{CUdeviceptr, CUipcMem_flags, CUipcMemHandle};
use rustix::fd::{AsRawFd, BorrowedFd};
use std::ffi::{c_char, c_uint};
use std::sync::Arc;

const LAZY_PEER_ACCESS: c_uint = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;

/// Memory of another process.
pub struct Imported {
    context: Arc<Context>,
    /// None: imported by IPC handle.
    mapped: Option<Mapped>,
    address: CUdeviceptr,
    bytes: usize,
}

impl Imported {
    /// Maps this many bytes of the memory behind a descriptor.
    pub fn by_descriptor(
        context: &Arc<Context>,
        fd: BorrowedFd<'_>,
        bytes: usize,
    ) -> Result<Self, Failed> {
        context.enter()?;
        let compute = context.compute()?;
        let mut allocation = 0;
        // The descriptor is passed in place of the pointer.
        let number = fd.as_raw_fd() as usize as *mut std::ffi::c_void;
        // SAFETY: the pointer is to a local handle; the driver does not dereference the other one.
        done("cuMemImportFromShareableHandle", unsafe {
            (compute.import)(&mut allocation, number, POSIX_FD)
        })?;
        let mapped = Mapped::of(context, allocation, bytes)?;
        Ok(Self {
            context: context.clone(),
            address: mapped.address,
            mapped: Some(mapped),
            bytes,
        })
    }

    /// Maps this many bytes of the memory behind a legacy IPC handle.
    pub fn by_handle(context: &Arc<Context>, handle: &[u8], bytes: usize) -> Result<Self, Failed> {
        context.enter()?;
        let whole: Result<[u8; _], _> = handle.try_into();
        let whole = whole.map_err(|_| Failed {
            call: "an IPC handle of another size",
            result: INVALID_VALUE,
        })?;
        let handle = CUipcMemHandle {
            reserved: whole.map(|byte| byte as c_char),
        };
        let mut address = 0;
        // SAFETY: the pointer is to a local address; the handle is passed by value.
        done("cuIpcOpenMemHandle", unsafe {
            (context.compute()?.ipc_open)(&mut address, handle, LAZY_PEER_ACCESS)
        })?;
        Ok(Self {
            context: context.clone(),
            mapped: None,
            address,
            bytes,
        })
    }

    pub fn read(&self, into: &mut [u8]) -> Result<(), Failed> {
        self.context.enter()?;
        let bytes = into.len().min(self.bytes);
        // SAFETY: the length is within both memories.
        done("cuMemcpyDtoH", unsafe {
            (self.context.api.copy_out)(into.as_mut_ptr().cast(), self.address, bytes)
        })
    }

    pub fn write(&self, bytes: &[u8]) -> Result<(), Failed> {
        self.context.enter()?;
        let length = bytes.len().min(self.bytes);
        // SAFETY: the length is within both memories.
        done("cuMemcpyHtoD", unsafe {
            (self.context.api.copy_in)(self.address, bytes.as_ptr().cast(), length)
        })?;
        // The driver may still hold the bytes in its buffers.
        self.context.finish()
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        self.context.settle();
        if self.mapped.is_none()
            && let Ok(compute) = self.context.compute()
        {
            // SAFETY: the address is this memory's, and nothing uses it any more.
            unsafe { (compute.ipc_close)(self.address) };
        }
    }
}
