//! A range of an object as it arrives: pieces with their offsets, and the response's data about the whole object. Too few, too many or
//! other bytes than requested are errors.

use super::bound::Permit;
use super::direct::{Direct, Way};
use super::fault::{Answer, Asked, broken, failed, found};
use super::request::Requests;
use crate::{Cause, Span, TierError};
use aws_sdk_s3::primitives::ByteStream;
use bytes::Bytes;
use std::error::Error;
use std::time::Duration;

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
    body: Coming,
    kept: Option<Bytes>,
    /// Returned with the last byte.
    permit: Option<Permit>,
    /// Offset of the next byte.
    pub at: u64,
    /// End of the range.
    pub end: u64,
    pub version: Version,
}

#[derive(Debug)]
enum Coming {
    /// In pieces through the SDK.
    Pieces(ByteStream),
    /// From the socket.
    Direct(Direct),
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
        let (way, taken) = (Way::default(), self.checksum.is_none());
        let along = way.clone();
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
                if taken {
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
        Ok(Stream {
            asked,
            body: match way.taken() {
                Some(direct) => Coming::Direct(direct),
                None => Coming::Pieces(answer.body),
            },
            kept: None,
            permit: (length > 0).then_some(permit),
            at: start,
            end: start + length,
            version: Version { total, etag },
        })
    }
}

impl Stream<'_> {
    /// The next bytes and the offset of the first; `None` at the end of the range.
    pub async fn next(&mut self) -> Result<Option<(u64, Bytes)>, TierError> {
        if let Some(kept) = self.kept.take() {
            return self.came(kept).map(Some);
        }
        let next = async {
            match &mut self.body {
                Coming::Pieces(body) => body.next().await.transpose().map_err(Broken::from),
                Coming::Direct(body) => body.next().await.map_err(Broken::from),
            }
        };
        let next = tokio::time::timeout(STALL, next).await;
        let next = next.map_err(|_| self.stalled())?;
        match next.map_err(|e| broken(self.asked, &*e))? {
            Some(bytes) => self.came(bytes).map(Some),
            None if self.at == self.end => Ok(None),
            None => {
                let detail = format!("the response ended at byte {} of {}", self.at, self.end);
                Err(found(self.asked, Cause::Unreachable, detail))
            }
        }
    }

    /// Receives at most `bytes` bytes of the range into a span, from `at` of the span on; `None` if they must be read by [`Self::next`].
    pub async fn receive(
        &mut self,
        span: &Span,
        at: u64,
        bytes: u64,
    ) -> Result<Option<u64>, TierError> {
        let (Coming::Direct(body), None) = (&mut self.body, &self.kept) else {
            return Ok(None);
        };
        let bytes = bytes.min(self.end - self.at);
        let received = tokio::time::timeout(STALL, body.receive(span, at, bytes)).await;
        let received = received.map_err(|_| self.stalled())?;
        let received = received.map_err(|e| broken(self.asked, &e))?;
        if let Some(bytes) = received {
            self.passed(bytes)?;
        }
        Ok(received)
    }

    fn stalled(&self) -> TierError {
        stalled(self.asked)
    }

    /// Returns the bytes that came last; they are delivered again.
    pub fn keep(&mut self, bytes: Bytes) {
        self.at -= bytes.len() as u64;
        self.kept = (!bytes.is_empty()).then_some(bytes);
    }

    fn came(&mut self, bytes: Bytes) -> Result<(u64, Bytes), TierError> {
        let at = self.at;
        self.passed(bytes.len() as u64)?;
        Ok((at, bytes))
    }

    fn passed(&mut self, bytes: u64) -> Result<(), TierError> {
        self.at += bytes;
        if self.at > self.end {
            let detail = "the response is longer than its Content-Length";
            return Err(found(self.asked, Cause::Protocol, detail));
        }
        if self.at == self.end {
            self.permit = None;
        }
        Ok(())
    }
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
