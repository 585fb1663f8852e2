//! A range of an object as it comes in: pieces with their offsets, and what the answer says of the whole. Too few bytes, too many, or
//! others than were asked for are errors here.

use super::bound::Permit;
use super::direct::{Direct, Way};
use super::fault::{Answer, Asked, broken, failed, found};
use super::request::Requests;
use crate::{Cause, Span, TierError};
use aws_sdk_s3::primitives::ByteStream;
use bytes::Bytes;
use std::error::Error;
use std::time::Duration;

/// A connection that brings nothing for this long is given up. The layers give up sooner; this bounds what runs without them.
pub const STALL: Duration = Duration::from_secs(30);

/// Why an answer broke off.
type Broken = Box<dyn Error + Send + Sync>;

/// One object among those that have or had its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its bytes.
    pub total: u64,
    /// The server's name for it.
    pub etag: Option<String>,
}

/// Bytes of an object, from an offset on.
#[derive(Debug)]
pub struct Stream<'a> {
    asked: Asked<'a>,
    body: Coming,
    kept: Option<Bytes>,
    /// Given back with the last byte.
    permit: Option<Permit>,
    /// Offset of the next byte.
    pub at: u64,
    /// Where the range ends.
    pub end: u64,
    /// Which object it is.
    pub version: Version,
}

/// How bytes come.
#[derive(Debug)]
enum Coming {
    /// In pieces, through the SDK.
    Pieces(ByteStream),
    /// From the socket.
    Direct(Direct),
}

impl Requests {
    /// Asks for the bytes `start..end` of an object, or what there is of them. With a version: of that very object only, and
    /// [`Cause::Missing`] where another one has its name now.
    pub async fn range<'a>(
        &'a self,
        object: &'a str,
        (start, end): (u64, u64),
        version: Option<&Version>,
    ) -> Result<Stream<'a>, TierError> {
        let asked = self.asked("s3:GetObject", Some(object));
        let replaced = || found(asked, Cause::Missing, "it was replaced while it was read");
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
                // Else the SDK has sums to check.
                if taken {
                    request.add_extension(along.clone());
                }
            })
            .send();
        let answer = sent.await.map_err(|e| {
            let answer = Answer::of(&e);
            // Its head said that there is more than this one has.
            let ends_sooner = version.is_some() && answer.status == 416;
            match answer.unmet() || ends_sooner {
                true => replaced(),
                false => failed(asked, &e),
            }
        })?;
        let length = answer.content_length.and_then(|n| u64::try_from(n).ok());
        let length =
            length.ok_or_else(|| found(asked, Cause::Protocol, "an answer without a length"))?;
        let (from, total) = match answer.content_range.as_deref().map(content_range) {
            Some(Some((from, total))) => (from, total),
            // A server that knows no ranges sends all.
            None => (0, length),
            Some(None) => {
                return Err(found(
                    asked,
                    Cause::Protocol,
                    "an answer with a strange range",
                ));
            }
        };
        let etag = answer.e_tag;
        // A server may not know the condition.
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
                    "asked for {start}..{end} of {total} bytes, {length} from {from} on came"
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
    /// The next bytes and the offset of the first; none at the end of the range.
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
                let detail = format!("the answer ended at byte {} of {}", self.at, self.end);
                Err(found(self.asked, Cause::Unreachable, detail))
            }
        }
    }

    /// Receives bytes of the range into a span, `bytes` at most, from `at` of the span on; none where they come by [`Self::next`].
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

    /// Gives bytes back that came last: they come again.
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
            let detail = "the answer is longer than it says";
            return Err(found(self.asked, Cause::Protocol, detail));
        }
        if self.at == self.end {
            self.permit = None;
        }
        Ok(())
    }
}

/// Nothing came for [`STALL`].
pub fn stalled(asked: Asked<'_>) -> TierError {
    let detail = format!("nothing came for {} s", STALL.as_secs());
    found(asked, Cause::Timeout, detail)
}

/// First byte and bytes of the whole, of `bytes 0-99/1234`.
fn content_range(text: &str) -> Option<(u64, u64)> {
    let (range, total) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (from, _) = range.split_once('-')?;
    Some((from.parse().ok()?, total.parse().ok()?))
}
