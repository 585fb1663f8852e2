//! Memory for kernels and measurements: on the device, and page-locked on the host. Both are freed only when the device is idle, so that
//! running work never outlives its memory.
#![allow(unsafe_code)]

use super::api::{Failed, INVALID_VALUE, done};
use super::context::Context;
use super::stream::Stream;
use cudarc::driver::sys::{CU_MEMHOSTREGISTER_PORTABLE, CUdeviceptr, CUipcMemHandle};
use kvcachepool_memory::mapping::Mapping;
use std::sync::Arc;

pub struct Buffer {
    address: CUdeviceptr,
    bytes: u64,
    context: Arc<Context>,
}

impl Buffer {
    /// Allocates this many bytes, uninitialised.
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Failed> {
        context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is to a local address; the context is current. The driver rejects allocations of 0 bytes.
        let allocated = unsafe { (context.api.alloc)(&mut address, bytes.max(1) as usize) };
        done("cuMemAlloc", allocated)?;
        Ok(Self {
            address,
            bytes,
            context: context.clone(),
        })
    }

    pub fn of(context: &Arc<Context>, bytes: &[u8]) -> Result<Self, Failed> {
        let this = Self::new(context, bytes.len() as u64)?;
        this.write(0, bytes)?;
        Ok(this)
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// A legacy IPC handle, by which another process can map the memory.
    pub fn ipc_handle(&self) -> Result<Vec<u8>, Failed> {
        self.context.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; _] };
        // SAFETY: the pointer is to a local handle; the address is the start of an allocation.
        let named = unsafe { (self.context.api.ipc_handle)(&mut handle, self.address) };
        done("cuIpcGetMemHandle", named)?;
        Ok(handle.reserved.map(|byte| byte as u8).to_vec())
    }

    /// Writes bytes at `at`, and returns after they have arrived. Does not wait for streams.
    pub fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Failed> {
        self.context.enter()?;
        let to = self.at(at, bytes.len() as u64)?;
        // SAFETY: the range was checked; the call returns after the bytes were taken.
        let copied = unsafe { (self.context.api.copy_in)(to, bytes.as_ptr().cast(), bytes.len()) };
        done("cuMemcpyHtoD", copied)?;
        // The driver may still hold the bytes in its buffers, and its streams are not ordered with them.
        self.context.finish()
    }

    /// Reads bytes at `at`. Does not wait for streams.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Failed> {
        self.context.enter()?;
        let from = self.at(at, into.len() as u64)?;
        // SAFETY: the range was checked; the call returns after the bytes have arrived.
        let copied =
            unsafe { (self.context.api.copy_out)(into.as_mut_ptr().cast(), from, into.len()) };
        done("cuMemcpyDtoH", copied)
    }

    pub fn content(&self) -> Result<Vec<u8>, Failed> {
        let mut content = vec![0; self.bytes as usize];
        self.read(0, &mut content)?;
        Ok(content)
    }

    /// Device address of a range.
    pub(super) fn at(&self, offset: u64, bytes: u64) -> Result<CUdeviceptr, Failed> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.address + offset),
            _ => Err(Failed {
                call: "a range of device memory",
                result: INVALID_VALUE,
            }),
        }
    }

    /// Starts a copy from page-locked host memory.
    pub fn copy_in(
        &self,
        stream: &Stream,
        at: u64,
        host: &Pinned,
        from: u64,
        bytes: u64,
    ) -> Result<(), Failed> {
        self.context.enter()?;
        let (to, from) = (self.at(at, bytes)?, host.at(from, bytes)?);
        // SAFETY: both ranges were checked, and neither memory is freed before the device is done.
        done("cuMemcpyHtoDAsync", unsafe {
            (self.context.api.copy_in_async)(to, from.cast_const(), bytes as usize, stream.raw())
        })
    }

    /// Starts a copy to page-locked host memory.
    pub fn copy_out(
        &self,
        stream: &Stream,
        at: u64,
        host: &Pinned,
        to: u64,
        bytes: u64,
    ) -> Result<(), Failed> {
        self.context.enter()?;
        let (from, to) = (self.at(at, bytes)?, host.at(to, bytes)?);
        // SAFETY: as above.
        done("cuMemcpyDtoHAsync", unsafe {
            (self.context.api.copy_out_async)(to, from, bytes as usize, stream.raw())
        })
    }

    /// Starts a copy from another buffer.
    pub fn copy_from(&self, stream: &Stream, other: &Self, bytes: u64) -> Result<(), Failed> {
        self.context.enter()?;
        let (to, from) = (self.at(0, bytes)?, other.at(0, bytes)?);
        // SAFETY: as above.
        done("cuMemcpyDtoDAsync", unsafe {
            (self.context.compute()?.copy_within_async)(to, from, bytes as usize, stream.raw())
        })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.context.settle();
        // SAFETY: the address is this buffer's, and nothing uses it any more.
        unsafe { (self.context.api.free)(self.address) };
    }
}

/// Host memory that the device reads and writes directly.
pub struct Pinned {
    mapping: Arc<Mapping>,
    context: Arc<Context>,
}

impl Pinned {
    /// Page-locks all of a mapping.
    pub fn new(context: &Arc<Context>, mapping: Arc<Mapping>) -> Result<Self, Failed> {
        context.enter()?;
        // Checked first, because locked pages must be unlocked again.
        context.compute()?;
        let bytes = mapping.length();
        let invalid = Failed {
            call: "cuMemHostRegister",
            result: INVALID_VALUE,
        };
        let start = mapping.address(0, bytes).ok_or(invalid)?;
        // Portable: valid in all contexts of this process.
        // SAFETY: the range is the mapping, which is kept until it is unlocked.
        done("cuMemHostRegister", unsafe {
            (context.api.register)(
                start.as_ptr().cast(),
                bytes as usize,
                CU_MEMHOSTREGISTER_PORTABLE,
            )
        })?;
        Ok(Self {
            mapping,
            context: context.clone(),
        })
    }

    pub fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    fn at(&self, offset: u64, bytes: u64) -> Result<*mut std::ffi::c_void, Failed> {
        let found = self.mapping.address(offset, bytes);
        found.map(|address| address.as_ptr().cast()).ok_or(Failed {
            call: "a range of page-locked memory",
            result: INVALID_VALUE,
        })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.context.settle();
        if let (Ok(compute), Ok(start)) = (self.context.compute(), self.at(0, 1)) {
            // SAFETY: this range is locked, and no copy of it runs any more.
            unsafe { (compute.unregister)(start) };
        }
    }
}
