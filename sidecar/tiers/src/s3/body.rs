//! An object's bytes as a request body: read from the arena in small pieces when the connection accepts them. Unsent bytes exist only in
//! the arena. A body reads nothing more once it is dropped or its operation has ended.

use crate::{Put, Span};
use aws_sdk_s3::primitives::{ByteStream, SdkBody};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use kvcachepool_protocol::object::{BadObject, Object};
use parking_lot::RwLock;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

const PIECE_BYTES: u64 = 128 << 10;

/// A whole object: its header, and the places of its sections. Connections may keep bodies for any time; after the drop of this value
/// those read nothing more and hold no span.
#[derive(Debug)]
pub struct Source {
    runs: Arc<RwLock<Option<Vec<Run>>>>,
    length: u64,
}

/// Contiguous bytes, and their offset in the object. Bytes between two runs are zero.
#[derive(Debug)]
struct Run {
    start: u64,
    length: u64,
    bytes: Bytes,
    span: Option<Span>,
}

impl Run {
    fn end(&self) -> u64 {
        self.start + self.length
    }
}

impl Source {
    /// For a put whose spans are as long as its sections.
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
        let runs = std::iter::once(head).chain(sections).collect();
        Ok(Self {
            runs: Arc::new(RwLock::new(Some(runs))),
            length: object.total_bytes(),
        })
    }

    pub fn length(&self) -> u64 {
        self.length
    }

    /// A part of it as a request body.
    pub fn body(&self, start: u64, length: u64) -> ByteStream {
        ByteStream::new(SdkBody::from_body_1_x(Sending {
            runs: self.runs.clone(),
            at: start,
            end: start.saturating_add(length).min(self.length),
        }))
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        // Waits for a piece that is being copied.
        let runs = self.runs.write().take();
        drop(runs);
    }
}

#[derive(Debug)]
struct Sending {
    runs: Arc<RwLock<Option<Vec<Run>>>>,
    at: u64,
    end: u64,
}

impl Sending {
    fn piece(&self) -> io::Result<Bytes> {
        let runs = self.runs.read();
        let Some(runs) = &*runs else {
            return Err(io::Error::other("the operation has ended"));
        };
        let most = self.end - self.at;
        let Some(run) = runs.get(runs.partition_point(|run| run.end() <= self.at)) else {
            return Ok(zeros(most));
        };
        if self.at < run.start {
            return Ok(zeros(most.min(run.start - self.at)));
        }
        let from = self.at - run.start;
        let bytes = most.min(run.length - from).min(PIECE_BYTES) as usize;
        let Some(span) = &run.span else {
            return Ok(run.bytes.slice(from as usize..from as usize + bytes));
        };
        let mut piece = vec![0; bytes];
        match span.read(from, &mut piece) {
            true => Ok(piece.into()),
            false => Err(io::Error::other("the arena of the object no longer exists")),
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
        let piece = self.piece()?;
        self.at += piece.len() as u64;
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.at >= self.end
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.end - self.at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::suite::{Memory, Sample};

    /// An object with one held section, and its bytes as they are stored.
    fn put(hold: &Arc<()>, bytes: u64) -> (Put, Vec<u8>) {
        let (memory, sample) = (Memory::new(8 << 20), Sample::new(1, 0, &[bytes]));
        let mut put = sample.put(&memory);
        put.spans[0] = memory.held(bytes, hold.clone());
        assert!(put.spans[0].write(0, &sample.bytes[0]));
        let mut stored = sample.object.encode().unwrap();
        stored.extend(&sample.bytes[0]);
        (put, stored)
    }

    #[tokio::test]
    async fn every_part_of_an_object_has_its_bytes() {
        let (put, stored) = put(&Arc::new(()), 300_000);
        let source = Source::new(&put).unwrap();
        assert_eq!(source.length(), stored.len() as u64);
        for (start, length) in [(0, 400_000), (0, 10), (4_000, 200), (5_000, 290_001)] {
            let sent = source.body(start, length).collect().await.unwrap();
            let end = stored.len().min((start + length) as usize);
            assert!(sent.into_bytes() == stored[start as usize..end], "{start}");
        }
    }

    #[tokio::test]
    async fn a_body_that_outlives_its_operation_holds_no_span_and_sends_no_more() {
        let hold = Arc::new(());
        let (put, _) = put(&hold, 1 << 20);
        let source = Source::new(&put).unwrap();
        let mut body = source.body(0, source.length());
        assert!(body.next().await.unwrap().is_ok());
        drop((source, put));
        assert_eq!(Arc::strong_count(&hold), 1);
        assert!(body.next().await.unwrap().is_err());
    }
}
