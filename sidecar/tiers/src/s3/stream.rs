//! A range of an object as it arrives, and the response's data about the whole object. Bytes are received into their place, from the
//! connection if it allows that, otherwise from a piece that the SDK has read. Too few, too many or other bytes than requested are errors.

use super::bound::Permit;
use super::connections::Wire;
use super::fault::{Answer, Asked, broken, failed, found};
use super::http::Bypass;
use super::request::Requests;
use crate::{Cause, Span, TierError};
use aws_sdk_s3::primitives::ByteStream;
use bytes::Bytes;
use rustix::io::Errno;
use std::error::Error;
use std::io;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of a connection without received bytes. The layers time out sooner; this bounds streams without them.
pub const STALL: Duration = Duration::from_secs(30);

/// Why a response broke off.
type Broken = Box<dyn Error + Send + Sync>;

/// One version of an object under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Size of the object.
    pub total: u64,
    pub etag: Option<String>,
}

/// Bytes of an object from an offset on.
#[derive(Debug)]
pub struct Stream<'a> {
    asked: Asked<'a>,
    body: Body,
    /// The next bytes, as far as they are in memory.
    ahead: Bytes,
    /// Returned with the last byte.
    permit: Option<Permit>,
    /// Offset of the next byte.
    pub at: u64,
    /// End of the range.
    pub end: u64,
    pub version: Version,
}

/// Source of the bytes behind those in memory.
#[derive(Debug)]
enum Body {
    /// The connection.
    Wire(Wire),
    /// The SDK: with HTTP/2, with a checksum to verify, or with an encoding.
    Sdk(ByteStream),
}

impl Requests {
    /// Requests the bytes `start..end` of an object, or the existing part of them. With a version: only of that version, and
    /// [`Cause::Missing`] if it was replaced.
    pub async fn range<'a>(
        &'a self,
        object: &'a str,
        (start, end): (u64, u64),
        version: Option<&Version>,
    ) -> Result<Stream<'a>, TierError> {
        let asked = self.asked("s3:GetObject", Some(object));
        let replaced = || {
            found(
                asked,
                Cause::Missing,
                "the object was replaced while it was read",
            )
        };
        let permit = self.bound.read().await;
        let (bypass, unchecked) = (Bypass::default(), self.checksum.is_none());
        let along = bypass.clone();
        let sent = self
            .client
            .get_object()
            .bucket(&self.bucket)
            .key(object)
            .range(format!("bytes={start}-{}", end.saturating_sub(1)))
            .set_if_match(version.and_then(|version| version.etag.clone()))
            .customize()
            .mutate_request(move |request| {
                // Otherwise the SDK has checksums to verify.
                if unchecked {
                    request.add_extension(along.clone());
                }
            })
            .send();
        let answer = sent.await.map_err(|e| {
            let answer = Answer::of(&e);
            // Its header claims more bytes than this version has.
            let ends_sooner = version.is_some() && answer.status == 416;
            match answer.unmet() || ends_sooner {
                true => replaced(),
                false => failed(asked, &e),
            }
        })?;
        let length = answer.content_length.and_then(|n| u64::try_from(n).ok());
        let length = length
            .ok_or_else(|| found(asked, Cause::Protocol, "the response has no Content-Length"))?;
        let (from, total) = match answer.content_range.as_deref().map(content_range) {
            Some(Some((from, total))) => (from, total),
            // A server without support for ranges sends everything.
            None => (0, length),
            Some(None) => {
                return Err(found(
                    asked,
                    Cause::Protocol,
                    "the response has an invalid Content-Range",
                ));
            }
        };
        let etag = answer.e_tag;
        // The server may ignore the condition.
        let differs = |v: &Version| match (&v.etag, &etag) {
            (Some(then), Some(now)) if then != now => true,
            _ => v.total != total,
        };
        if version.is_some_and(differs) {
            return Err(replaced());
        }
        if from != start || length != end.min(total).saturating_sub(start) {
            let all = from == 0 && start == 0 && length == total;
            if !all {
                let detail = format!(
                    "requested {start}..{end} of {total} bytes, received {length} bytes from {from} on"
                );
                return Err(found(asked, Cause::Protocol, detail));
            }
        }
        let (ahead, body) = match bypass.taken() {
            Some(mut wire) => (std::mem::take(&mut wire.ahead), Body::Wire(wire)),
            None => (Bytes::new(), Body::Sdk(answer.body)),
        };
        Ok(Stream {
            asked,
            body,
            ahead,
            permit: (length > 0).then_some(permit),
            at: start,
            end: start + length,
            version: Version { total, etag },
        })
    }
}

impl Stream<'_> {
    /// At most `most` of the next bytes, in memory of their own; none only at the end of the range.
    pub async fn next(&mut self, most: u64) -> Result<Bytes, TierError> {
        self.fill().await?;
        let bytes = most.min(self.ahead.len() as u64);
        self.passed(bytes);
        Ok(self.ahead.split_to(bytes as usize))
    }

    /// Receives at most `bytes` of the next bytes into a span, from `at` of the span on; 0 only at the end of the range.
    pub async fn receive_into(
        &mut self,
        span: &Span,
        at: u64,
        bytes: u64,
    ) -> Result<u64, TierError> {
        let bytes = bytes.min(self.end - self.at);
        if let Body::Wire(wire) = &mut self.body
            && self.ahead.is_empty()
            && bytes > 0
        {
            let received = in_time(self.asked, wire.receive_into(span, at, bytes)).await?;
            if received == 0 {
                return Err(self.ended());
            }
            self.passed(received);
            return Ok(received);
        }
        let piece = self.next(bytes).await?;
        if !span.write(at, &piece) {
            let error = io::Error::from(Errno::FAULT);
            return Err(broken(self.asked, &error));
        }
        Ok(piece.len() as u64)
    }

    /// Reads the bytes before `to`, or to the end of the range, and drops them.
    pub async fn skip_to(&mut self, to: u64) -> Result<(), TierError> {
        let to = to.min(self.end);
        while self.at < to {
            self.next(to - self.at).await?;
        }
        Ok(())
    }

    /// Reads more bytes if none are in memory and the range has not ended.
    async fn fill(&mut self) -> Result<(), TierError> {
        let (asked, left) = (self.asked, self.end - self.at);
        while self.ahead.is_empty() && left > 0 {
            let (piece, more) = match &mut self.body {
                Body::Wire(wire) => {
                    let piece = in_time(asked, wire.read()).await?;
                    (Some(piece).filter(|piece| !piece.is_empty()), None)
                }
                Body::Sdk(body) => {
                    let piece = in_time(asked, body.try_next()).await?;
                    let last = piece.as_ref().is_some_and(|p| p.len() as u64 >= left);
                    // The SDK compares the checksum at the end of the body.
                    let more = match last {
                        true => in_time(asked, body.try_next()).await?,
                        false => None,
                    };
                    (piece, more)
                }
            };
            self.ahead = piece.ok_or_else(|| self.ended())?;
            if more.is_some() || self.ahead.len() as u64 > left {
                let detail = "the response is longer than its Content-Length";
                return Err(found(asked, Cause::Protocol, detail));
            }
        }
        Ok(())
    }

    fn ended(&self) -> TierError {
        let detail = format!("the response ended at byte {} of {}", self.at, self.end);
        found(self.asked, Cause::Unreachable, detail)
    }

    fn passed(&mut self, bytes: u64) {
        self.at += bytes;
        if self.at == self.end {
            self.permit = None;
        }
    }
}

/// Waits for bytes, at most [`STALL`].
async fn in_time<T, E>(
    asked: Asked<'_>,
    read: impl Future<Output = Result<T, E>>,
) -> Result<T, TierError>
where
    Broken: From<E>,
{
    let read = timeout(STALL, read).await.map_err(|_| stalled(asked))?;
    read.map_err(|e| broken(asked, &*Broken::from(e)))
}

/// The error after [`STALL`] without bytes.
pub fn stalled(asked: Asked<'_>) -> TierError {
    let detail = format!("no bytes received for {} s", STALL.as_secs());
    found(asked, Cause::Timeout, detail)
}

/// First byte and total size in `bytes 0-99/1234`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, _) = range.split_once('-')?;
    Some((from.parse().ok()?, total.parse().ok()?))
}
