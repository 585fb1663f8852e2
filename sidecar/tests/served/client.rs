//! One connection that speaks frames, right or wrong ones.

use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_FDS, HEADER_BYTES, Header, Op, frame};
use kvcachepool_protocol::message::{ErrorBody, ErrorCode, decode, encode};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Serialize, de::DeserializeOwned};
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::wait::DEADLINE;

pub struct Answer {
    pub header: Header,
    pub body: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Answer {
    /// The body of a good answer.
    pub fn read<T: DeserializeOwned>(&self) -> T {
        if let Some(error) = self.error() {
            panic!("refused: {error:?}");
        }
        decode(&self.body).unwrap()
    }

    pub fn error(&self) -> Option<ErrorBody> {
        (self.header.flags & FLAG_ERROR != 0).then(|| decode(&self.body).unwrap())
    }

    pub fn code(&self) -> Option<ErrorCode> {
        self.error().map(|e| e.code)
    }
}

pub struct Connection {
    stream: UnixStream,
    tag: u64,
}

impl Connection {
    pub fn open(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        Self { stream, tag: 0 }
    }

    pub fn send_raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
        }
        let mut sent = 0;
        while sent < bytes.len() {
            sent += sendmsg(
                self.stream.as_fd(),
                &[IoSlice::new(&bytes[sent..])],
                &mut ancillary,
                SendFlags::NOSIGNAL,
            )
            .unwrap();
            ancillary.clear();
        }
    }

    /// Sends a frame and returns its tag.
    pub fn send<T: Serialize>(&mut self, op: Op, body: &T, fds: &[BorrowedFd<'_>]) -> u64 {
        self.tag += 1;
        let flags = if fds.is_empty() { 0 } else { FLAG_FDS };
        self.send_raw(&frame(op, flags, self.tag, &encode(body).unwrap()), fds);
        self.tag
    }

    pub fn ask<T: Serialize>(&mut self, op: Op, body: &T) -> Answer {
        self.ask_with(op, body, &[])
    }

    pub fn ask_with<T: Serialize>(&mut self, op: Op, body: &T, fds: &[BorrowedFd<'_>]) -> Answer {
        let tag = self.send(op, body, fds);
        self.answer(tag).expect("the connection was closed")
    }

    /// The next answer with this tag; `None` when the sidecar closed the connection.
    pub fn answer(&mut self, tag: u64) -> Option<Answer> {
        loop {
            let answer = self.next()?;
            if answer.header.tag == tag {
                return Some(answer);
            }
        }
    }

    /// The next frame; `None` when the sidecar closed the connection.
    pub fn next(&mut self) -> Option<Answer> {
        let mut head = [0u8; HEADER_BYTES];
        let mut fds = Vec::new();
        let mut got = 0;
        while got < HEADER_BYTES {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let read = recvmsg(
                self.stream.as_fd(),
                &mut [IoSliceMut::new(&mut head[got..])],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            );
            for message in ancillary.drain() {
                if let RecvAncillaryMessage::ScmRights(passed) = message {
                    fds.extend(passed);
                }
            }
            match read {
                Ok(read) if read.bytes > 0 => got += read.bytes,
                Ok(_) | Err(Errno::CONNRESET) => return None,
                Err(Errno::INTR) => {} // a process that was stopped and goes on sees it where a read has a deadline
                Err(e) => panic!("no frame: {e}"),
            }
        }
        let header = Header::decode(&head).unwrap();
        let mut body = vec![0u8; header.length as usize];
        self.stream.read_exact(&mut body).unwrap();
        Some(Answer { header, body, fds })
    }

    /// Reads until the sidecar closes; frames on the way are returned.
    pub fn until_closed(&mut self) -> Vec<Answer> {
        std::iter::from_fn(|| self.next()).collect()
    }
}
