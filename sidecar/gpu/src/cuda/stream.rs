//! Queues of work for kernels and measurements. A window has its own streams.
#![allow(unsafe_code)]

use super::api::{Failed, NON_BLOCKING, done};
use super::context::Context;
use cudarc::driver::sys::CUstream;
use std::ptr::null_mut;
use std::sync::Arc;

/// Work done in order, with the lowest priority, which is also the default and torch's.
pub struct Stream {
    stream: CUstream,
    context: Arc<Context>,
}

// SAFETY: a stream may be used from any thread; every call makes its context current first.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders calls from several threads itself.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Self, Failed> {
        context.enter()?;
        let (mut least, mut greatest, mut stream) = (0, 0, null_mut());
        // SAFETY: pointers to local numbers and a local handle; the context is current.
        unsafe {
            done(
                "cuCtxGetStreamPriorityRange",
                (context.api.priorities)(&mut least, &mut greatest),
            )?;
            let made = (context.api.stream_create)(&mut stream, NON_BLOCKING, least);
            done("cuStreamCreateWithPriority", made)?;
        }
        Ok(Self {
            stream,
            context: context.clone(),
        })
    }

    /// Waits for all work of the stream. Fails if any of it failed.
    pub fn synchronize(&self) -> Result<(), Failed> {
        self.context.enter()?;
        // SAFETY: the stream belongs to this object and is alive.
        done("cuStreamSynchronize", unsafe {
            (self.context.api.stream_synchronize)(self.stream)
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The raw handle, for driver calls.
    pub(super) fn raw(&self) -> CUstream {
        self.stream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: nothing uses the stream any more; the driver keeps it until its work is done.
            unsafe { (self.context.api.stream_destroy)(self.stream) };
        }
    }
}
