//! One connection: reads bytes and splits them into frames, writes bytes from a bounded queue. Non-blocking throughout.

use kvcachepool_protocol::frame::{FrameError, FrameReader, HEADER_BYTES, Header};
use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use kvcachepool_engine::sessions::ConnId;

/// Descriptors per read; the kernel closes further ones.
const FDS_PER_READ_MAX: usize = 8;
/// Sets of descriptors that may wait for their frame: one frame can be incomplete while the next begins. Further sets are closed.
const FD_SETS_MAX: usize = 2;
const READ_BYTES: usize = 32 << 10;
/// Bytes that one drain reads from one connection before others get their turn.
const DRAIN_BYTES_MAX: usize = 1 << 20;

/// Result of one read.
pub enum Event {
    /// A complete frame with its descriptors.
    Frame(Header, Vec<u8>, Vec<OwnedFd>),
    /// Descriptors that no frame claims; they were closed.
    SurplusFds(usize),
    /// Nothing more to read now.
    Empty,
    /// The peer closed; true: in the middle of a frame.
    Ended(bool),
    /// The peer sent an invalid frame: raw opcode, tag and error.
    Refused(u8, u64, FrameError),
    Failed(Errno),
}

struct Reader {
    frames: FrameReader,
    /// Descriptors per read, until the frame that names them is complete.
    fds: VecDeque<Vec<OwnedFd>>,
    input: Vec<u8>,
    at: usize,
    over: bool,
}

struct Outgoing {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<Arc<OwnedFd>>,
}

#[derive(Default)]
struct Writer {
    queue: VecDeque<Outgoing>,
    queued_bytes: usize,
    close_when_sent: bool,
}

/// A send failed; the connection must be closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendError {
    /// The peer does not read and the queue is full.
    SlowReader,
    Gone,
}

pub struct Connection {
    /// Never reused.
    pub id: ConnId,
    /// The stream, used for readiness only: all I/O is recvmsg and sendmsg.
    pub stream: UnixStream,
    /// Wakes the connection's task after data was queued or the connection was closed.
    pub wake: Notify,
    reader: Mutex<Reader>,
    writer: Mutex<Writer>,
    closed: AtomicBool,
    greeted: AtomicBool,
    queue_bytes_max: usize,
}

impl Connection {
    pub fn new(
        id: ConnId,
        stream: UnixStream,
        frame_bytes_max: usize,
        queue_bytes_max: usize,
    ) -> Self {
        Self {
            id,
            stream,
            wake: Notify::new(),
            reader: Mutex::new(Reader {
                frames: FrameReader::new(frame_bytes_max),
                fds: VecDeque::new(),
                input: Vec::new(),
                at: 0,
                over: false,
            }),
            writer: Mutex::new(Writer::default()),
            closed: AtomicBool::new(false),
            greeted: AtomicBool::new(false),
            queue_bytes_max,
        }
    }

    /// Reads and passes events to `handle` until nothing is left, `handle` returns false, or the connection is closed. Concurrent callers
    /// take turns; each frame is passed once and in order. Returns false when more may be available.
    pub fn drain(&self, mut handle: impl FnMut(Event) -> bool) -> bool {
        let mut reader = self.reader.lock();
        let mut taken = 0;
        loop {
            if self.is_closed() || reader.over {
                return true;
            }
            let event = reader.next(&self.stream, &mut taken);
            let last = matches!(
                event,
                Event::Empty | Event::Ended(_) | Event::Refused(..) | Event::Failed(_)
            );
            reader.over |= last && !matches!(event, Event::Empty);
            if !handle(event) || last {
                return true;
            }
            if taken > DRAIN_BYTES_MAX {
                return false;
            }
        }
    }

    /// Queues a frame and sends what fits now. False: the connection is closed, or closes after its queue is sent.
    pub fn send(&self, bytes: Vec<u8>, fds: Vec<Arc<OwnedFd>>) -> Result<bool, SendError> {
        let mut writer = self.writer.lock();
        if writer.close_when_sent || self.is_closed() {
            return Ok(false);
        }
        if writer.queued_bytes + bytes.len() > self.queue_bytes_max {
            return Err(SendError::SlowReader);
        }
        writer.queued_bytes += bytes.len();
        let waits = !writer.queue.is_empty();
        writer.queue.push_back(Outgoing {
            bytes,
            sent: 0,
            fds,
        });
        if waits {
            return Ok(true);
        }
        self.write_queue(&mut writer)?;
        if !writer.queue.is_empty() {
            self.wake.notify_one();
        }
        Ok(true)
    }

    /// Sends what fits, when the stream is writable.
    pub fn flush(&self) -> Result<(), SendError> {
        let outcome = self.stream.try_io(Interest::WRITABLE, || {
            let mut writer = self.writer.lock();
            match self.write_queue(&mut writer) {
                // Not all was sent: clear the readiness, so that the next wait blocks.
                Ok(()) if !writer.queue.is_empty() => Err(std::io::ErrorKind::WouldBlock.into()),
                other => Ok(other),
            }
        });
        outcome.unwrap_or(Ok(()))
    }

    /// Whether data waits to be sent.
    pub fn has_backlog(&self) -> bool {
        !self.writer.lock().queue.is_empty()
    }

    fn write_queue(&self, writer: &mut Writer) -> Result<(), SendError> {
        while let Some(next) = writer.queue.front_mut() {
            match send_some(&self.stream, next) {
                Ok(sent) => {
                    next.sent += sent;
                    next.fds.clear();
                    if next.sent == next.bytes.len() {
                        writer.queued_bytes -= next.bytes.len();
                        writer.queue.pop_front();
                    }
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(_) => return Err(SendError::Gone),
            }
        }
        if writer.close_when_sent {
            self.close_now();
        }
        Ok(())
    }

    /// Stops reading; the connection ends when its queue is sent.
    pub fn close_when_sent(&self) {
        self.closed.store(true, Ordering::Release);
        let mut writer = self.writer.lock();
        writer.close_when_sent = true;
        if self.write_queue(&mut writer).is_err() {
            self.close_now();
        }
        self.wake.notify_one();
    }

    pub fn close_now(&self) {
        self.closed.store(true, Ordering::Release);
        // An error means that it is already closed.
        let _ = rustix::net::shutdown(self.stream.as_fd(), rustix::net::Shutdown::Both);
        self.wake.notify_one();
    }

    /// Records that a HELLO was read.
    pub fn greeted(&self) {
        self.greeted.store(true, Ordering::Release);
    }

    pub fn has_greeted(&self) -> bool {
        self.greeted.load(Ordering::Acquire)
    }

    /// Whether no more events of it are handled.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl Reader {
    fn next(&mut self, stream: &UnixStream, taken: &mut usize) -> Event {
        loop {
            let mut rest = &self.input[self.at..];
            match self.frames.take(&mut rest) {
                Ok(Some((header, body))) => {
                    self.at = self.input.len() - rest.len();
                    let fds = if header.flags & kvcachepool_protocol::frame::FLAG_FDS != 0 {
                        self.fds.pop_front().unwrap_or_default()
                    } else {
                        Vec::new()
                    };
                    return Event::Frame(header, body, fds);
                }
                Ok(None) => {}
                Err(e) => {
                    let (opcode, tag) = self.frames.refused();
                    return Event::Refused(opcode, tag, e);
                }
            }
            // A read ends after the bytes that carry descriptors, so between two frames no frame can claim them any more.
            if self.frames.pending() == 0 && !self.fds.is_empty() {
                let surplus = self.fds.drain(..).map(|set| set.len()).sum();
                return Event::SurplusFds(surplus);
            }
            self.input.clear();
            self.at = 0;
            match self.read(stream) {
                Ok(0) => return Event::Ended(self.frames.pending() > 0),
                Ok(n) => *taken += n,
                Err(Errno::AGAIN) => return Event::Empty,
                Err(Errno::INTR) => {}
                Err(e) => return Event::Failed(e),
            }
        }
    }

    fn read(&mut self, stream: &UnixStream) -> Result<usize, Errno> {
        let mut bytes = [0u8; READ_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_PER_READ_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let got = recvmsg(
            stream.as_fd(),
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
        )?;
        let fds: Vec<OwnedFd> = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if !fds.is_empty() && self.fds.len() < FD_SETS_MAX {
            self.fds.push_back(fds);
        }
        self.input.extend_from_slice(&bytes[..got.bytes]);
        Ok(got.bytes)
    }
}

fn send_some(stream: &UnixStream, next: &Outgoing) -> Result<usize, Errno> {
    debug_assert!(next.bytes.len() >= HEADER_BYTES);
    let borrowed: Vec<_> = next.fds.iter().map(|fd| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&borrowed)) {
        return Err(Errno::INVAL);
    }
    sendmsg(
        stream.as_fd(),
        &[IoSlice::new(&next.bytes[next.sent..])],
        &mut ancillary,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )
}
