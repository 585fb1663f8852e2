//! An object's bytes on their way out: read from the arena a small piece at a time, when the connection takes it. What is not sent yet is
//! nowhere but in the arena; a body that is dropped reads nothing more.

use crate::tiers::{Put, Span};
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use kvcachepool_protocol::object::{BadObject, Object};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Bytes of a piece.
const PIECE_BYTES: u64 = 128 << 10;

/// A whole object: its head, and where its sections lie.
#[derive(Debug, Clone)]
pub struct Source {
    runs: Vec<Run>,
    length: u64,
}

/// Bytes that lie together, and where in the object they begin. What lies between two runs is zero.
#[derive(Debug, Clone)]
struct Run {
    start: u64,
    length: u64,
    bytes: Bytes,
    span: Option<Span>,
}

impl Source {
    /// Of a put, whose spans are as long as its sections.
    pub fn new(put: &Put) -> Result<Self, BadObject> {
        let object: &Object = &put.object;
        let head = Bytes::from(object.encode()?);
        let head = Run {
            start: 0,
            length: head.len() as u64,
            bytes: head,
            span: None,
        };
        let section = |(start, span): (u64, &Span)| Run {
            start,
            length: span.length,
            bytes: Bytes::new(),
            span: Some(span.clone()),
        };
        let sections = object.offsets().into_iter().zip(&put.spans).map(section);
        Ok(Self {
            runs: std::iter::once(head).chain(sections).collect(),
            length: object.total_bytes(),
        })
    }

    /// Bytes of the object.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// A part of it as a body of a request.
    pub fn body(&self, start: u64, length: u64) -> ByteStream {
        let end = start.saturating_add(length).min(self.length);
        let touched = |run: &&Run| run.start < end && run.start + run.length > start;
        // Holds no span that it does not send.
        let runs = self.runs.iter().filter(touched).cloned().collect();
        ByteStream::new(SdkBody::from_body_1_x(Sending {
            runs,
            at: start,
            end,
        }))
    }
}

#[derive(Debug)]
struct Sending {
    runs: Vec<Run>,
    at: u64,
    end: u64,
}

impl Sending {
    /// The next piece; none where a span does not lie in its arena.
    fn piece(&self) -> Option<Bytes> {
        let run = self
            .runs
            .iter()
            .find(|run| run.start + run.length > self.at);
        let most = self.end - self.at;
        let Some(run) = run else {
            return Some(zeros(most));
        };
        if self.at < run.start {
            return Some(zeros(most.min(run.start - self.at)));
        }
        let from = self.at - run.start;
        let bytes = most.min(run.length - from).min(PIECE_BYTES) as usize;
        match &run.span {
            None => Some(run.bytes.slice(from as usize..from as usize + bytes)),
            Some(span) => {
                let mut piece = vec![0; bytes];
                span.read(from, &mut piece).then(|| piece.into())
            }
        }
    }
}

fn zeros(bytes: u64) -> Bytes {
    static ZEROS: [u8; 4096] = [0; 4096];
    let bytes = bytes.min(ZEROS.len() as u64) as usize;
    Bytes::from_static(ZEROS.get(..bytes).unwrap_or_default())
}

impl Body for Sending {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if self.at >= self.end {
            return Poll::Ready(None);
        }
        let Some(piece) = self.piece() else {
            let gone = io::Error::other("the memory that it was read from is gone");
            return Poll::Ready(Some(Err(gone)));
        };
        self.at += piece.len() as u64;
        let at = self.at;
        // Its hold ends with its last byte.
        self.runs.retain(|run| run.start + run.length > at);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.at >= self.end
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.end - self.at)
    }
}
