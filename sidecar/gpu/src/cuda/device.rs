//! A window in device memory. Each direction has a stream of lowest priority, with an event after each copy that is polled.
//! No kernel runs in this context: on a serving GPU, kernels of a second context would compete with the engine's.
#![allow(unsafe_code)]

use super::api::{Failed, NON_BLOCKING, NOT_READY, done};
use super::context::{Context, refused};
use super::memory::Memory;
use super::pins;
use crate::device::{Device, DeviceError, Export, NoWindow, Part, Progress, Ticket};
use cudarc::driver::sys::{CUevent, CUevent_flags, CUstream};
use kvcachepool_memory::arena::Arena;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::{Direction, Unavailable};
use std::collections::HashMap;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

const NO_TIMING: u32 = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;

struct Running {
    direction: Direction,
    /// Recorded after the copy; null if that failed.
    event: CUevent,
    /// The failure, if any. From then on the stream is queried instead of the event.
    failed: Option<DeviceError>,
    /// The context counts this copy as one whose end is unknown.
    doubted: bool,
    /// Kept until the copy has ended.
    _arena: Arc<Mapping>,
}

/// Memory, streams and events of one window.
pub struct CudaDevice {
    running: HashMap<Ticket, Running>,
    next: u64,
    store: CUstream,
    load: CUstream,
    memory: Memory,
    context: Arc<Context>,
}

// SAFETY: streams and events may be used from any thread; every call makes its context current first.
unsafe impl Send for CudaDevice {}

impl CudaDevice {
    /// Allocates this many bytes on the context's device.
    pub fn new(context: Arc<Context>, bytes: u64) -> Result<Self, NoWindow> {
        context.enter().map_err(refused)?;
        let size =
            usize::try_from(bytes).map_err(|e| NoWindow::new(Unavailable::WindowTooLarge, e))?;
        let memory = context.spare(bytes, || Memory::new(context.clone(), size))?;
        let mut this = Self {
            running: HashMap::new(),
            next: 0,
            store: null_mut(),
            load: null_mut(),
            memory,
            context,
        };
        this.make_streams().map_err(refused)?;
        Ok(this)
    }

    fn make_streams(&mut self) -> Result<(), Failed> {
        let (mut least, mut greatest) = (0, 0);
        let api = self.context.api;
        // SAFETY: pointers to local numbers and handles; the context is current.
        unsafe {
            done(
                "cuCtxGetStreamPriorityRange",
                (api.priorities)(&mut least, &mut greatest),
            )?;
            for stream in [&mut self.store, &mut self.load] {
                let made = (api.stream_create)(stream, NON_BLOCKING, least);
                done("cuStreamCreateWithPriority", made)?;
            }
        }
        Ok(())
    }

    fn submit(
        &self,
        direction: Direction,
        arena: &Mapping,
        part: &Part,
    ) -> Result<(), DeviceError> {
        let api = self.context.api;
        let window = self
            .memory
            .at(part.window, part.bytes)
            .ok_or_else(outside)?;
        let host = arena.address(part.arena, part.bytes).ok_or_else(outside)?;
        let (host, bytes) = (host.as_ptr().cast(), part.bytes as usize);
        // SAFETY: both ranges were checked; the arena is kept until the copy's event has completed. The slot table governs concurrent
        // writes of other processes to the arena.
        let submitted = unsafe {
            match direction {
                Direction::Store => done(
                    "cuMemcpyDtoHAsync",
                    (api.copy_out_async)(host, window, bytes, self.store),
                ),
                Direction::Load => done(
                    "cuMemcpyHtoDAsync",
                    (api.copy_in_async)(window, host, bytes, self.load),
                ),
            }
        };
        submitted.map_err(DeviceError::from)
    }

    fn stream(&self, direction: Direction) -> CUstream {
        match direction {
            Direction::Store => self.store,
            Direction::Load => self.load,
        }
    }

    /// Records an event after the submitted copies.
    fn mark(&self, direction: Direction) -> Result<CUevent, Failed> {
        let (api, mut event) = (self.context.api, null_mut());
        // SAFETY: a pointer to a local handle, then a stream and an event of the driver.
        unsafe {
            done("cuEventCreate", (api.event_create)(&mut event, NO_TIMING))?;
            if let Err(failed) = done(
                "cuEventRecord",
                (api.event_record)(event, self.stream(direction)),
            ) {
                (api.event_destroy)(event);
                return Err(failed);
            }
        }
        Ok(event)
    }

    /// Whether the event has completed. A failure may concern the query, the copy, or the whole context.
    fn query(&self, event: CUevent) -> Result<bool, Failed> {
        self.context.enter()?;
        // SAFETY: the event was recorded, and is destroyed only after its last query.
        match unsafe { (self.context.api.event_query)(event) } {
            NOT_READY => Ok(false),
            result => done("cuEventQuery", result).map(|()| true),
        }
    }

    fn forget(&self, event: CUevent) {
        if !event.is_null() {
            // SAFETY: the event is not queried any more.
            unsafe { (self.context.api.event_destroy)(event) };
        }
    }

    /// Whether earlier work of the stream still runs; unknown after a failure. Polls instead of waiting, because an earlier copy may hang.
    fn runs(&self, direction: Direction) -> Result<bool, Failed> {
        self.context.enter()?;
        // SAFETY: the stream belongs to this object.
        match unsafe { (self.context.api.stream_query)(self.stream(direction)) } {
            NOT_READY => Ok(true),
            result => done("cuStreamQuery", result).map(|()| false),
        }
    }

    fn settle(&self, running: &Running) {
        self.forget(running.event);
        if running.doubted {
            self.context.doubts.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Counts the copy in the context as one whose end is unknown.
    fn doubts(&self, running: &mut Running) {
        if !running.doubted {
            self.context.doubts.fetch_add(1, Ordering::Relaxed);
            running.doubted = true;
        }
    }
}

impl Device for CudaDevice {
    fn memory(&self) -> String {
        let passed = match self.memory.export().kind {
            WindowKind::IpcHandle => "IPC handle",
            WindowKind::PosixFd | WindowKind::Host => "descriptor",
        };
        format!("memory of {}, by {passed}", self.context.name)
    }

    fn export(&self) -> Export {
        self.memory.export()
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let to = self
            .memory
            .at(offset, bytes.len() as u64)
            .ok_or_else(outside)?;
        let api = self.context.api;
        // A synchronous call may return while the bytes are still in the driver's buffers, and another process reads them next.
        // SAFETY: the range was checked, and the bytes live until the stream is done; the stream belongs to this object. No copy begins
        // before the worker has seen these bytes, so there is nothing else to wait for.
        unsafe {
            let from = bytes.as_ptr().cast();
            let copied = (api.copy_in_async)(to, from, bytes.len(), self.load);
            done("cuMemcpyHtoDAsync", copied)?;
            done("cuStreamSynchronize", (api.stream_synchronize)(self.load))?;
        }
        Ok(())
    }

    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        self.context.enter()?;
        let from = self
            .memory
            .at(offset, into.len() as u64)
            .ok_or_else(outside)?;
        // SAFETY: the range was checked; the call returns after the bytes have arrived.
        let copied =
            unsafe { (self.context.api.copy_out)(into.as_mut_ptr().cast(), from, into.len()) };
        Ok(done("cuMemcpyDtoH", copied)?)
    }

    fn begin(
        &mut self,
        direction: Direction,
        arena: &Arc<Mapping>,
        parts: Vec<Part>,
    ) -> Result<Ticket, DeviceError> {
        self.context.enter()?;
        let submitted = parts
            .into_iter()
            .flat_map(pins::cut)
            .try_for_each(|part| self.submit(direction, arena, &part));
        let marked = submitted.and_then(|()| Ok(self.mark(direction)?));
        // Parts submitted before the failure may be in flight.
        let (event, failed) = match marked {
            Ok(event) => (event, None),
            Err(error) => (null_mut(), Some(error)),
        };
        self.next += 1;
        let ticket = Ticket(self.next);
        let running = Running {
            direction,
            event,
            failed,
            doubted: false,
            _arena: arena.clone(),
        };
        self.running.insert(ticket, running);
        Ok(ticket)
    }

    fn progress(&mut self, ticket: Ticket) -> Progress {
        let Some(mut running) = self.running.remove(&ticket) else {
            return Progress::Failed(DeviceError("unknown ticket".into()));
        };
        if running.failed.is_none() {
            match self.query(running.event) {
                Ok(false) => {
                    self.running.insert(ticket, running);
                    return Progress::Running;
                }
                Ok(true) => {
                    self.settle(&running);
                    return Progress::Done;
                }
                Err(failed) => running.failed = Some(failed.into()),
            }
        }
        let error = running.failed.clone().unwrap_or_else(outside);
        // The query may have failed and not the copy. Only the stream can prove that no byte moves any more.
        let progress = match self.runs(running.direction) {
            Ok(false) => {
                self.settle(&running);
                return Progress::Failed(error);
            }
            Ok(true) => Progress::Running,
            Err(_) => {
                self.doubts(&mut running);
                Progress::Unknown(error)
            }
        };
        self.running.insert(ticket, running);
        progress
    }

    fn works(&mut self, arena: &Arena) {
        self.context.keep();
        pins::begin(&self.context, arena);
    }

    fn doubt(&mut self, ticket: Ticket) {
        if let Some(mut running) = self.running.remove(&ticket) {
            self.doubts(&mut running);
            self.running.insert(ticket, running);
        }
    }

    fn tells_ends(&self) -> bool {
        false
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if self.context.enter().is_err() {
            return;
        }
        for stream in [self.store, self.load] {
            if !stream.is_null() {
                // SAFETY: the stream belongs to this object. Every copy has ended, otherwise its window would still wait for it.
                unsafe { (self.context.api.stream_destroy)(stream) };
            }
        }
    }
}

fn outside() -> DeviceError {
    DeviceError("a part is outside of the window or the arena".into())
}
