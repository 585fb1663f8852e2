//! The listing lease: one sidecar lists a bucket for all. A small object contains the last count, and its age says when that was taken. The
//! sidecar that replaces it first lists next. With a server without conditional puts two may list at once, which is harmless.

use super::census::Sum;
use super::fault::{Answer, failed, found};
use super::request::Requests;
use super::stream::{STALL, stalled};
use crate::{Cause, TierError};
use aws_sdk_s3::primitives::ByteStream;
use std::time::Duration;
use tokio::time::timeout;

/// Name of the object behind the prefix.
pub const COUNTED: &str = ".kvcachepool-counted";
/// Prefix of its text.
const MARK: &str = "kvcachepool counted here:";
/// Longest text that it can contain.
const TEXT_BYTES: usize = 256;

/// Whose turn it is to list.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn {
    /// This process lists, and publishes its count.
    Mine(Claim),
    /// Another sidecar counted recently.
    Counted(Sum),
    /// Another sidecar is counting for the first time.
    Counting,
}

/// The right to list.
#[derive(Debug, PartialEq, Eq)]
pub struct Claim {
    key: String,
}

/// The object as it was found.
#[derive(Debug)]
struct Marker {
    /// `None`: not counted yet, or not written by this build.
    sum: Option<Sum>,
    /// `None`: unknown.
    age: Option<Duration>,
    etag: Option<String>,
}

impl Marker {
    /// The turn, if another sidecar began or finished a count within `young`; `None`: the turn is free.
    fn taken(&self, young: Duration) -> Option<Turn> {
        let taken = self.age.is_some_and(|age| age < young);
        taken.then(|| self.sum.map_or(Turn::Counting, Turn::Counted))
    }
}

impl Requests {
    /// The count that another sidecar finished or began within `young`. Takes no turn: for sidecars that may not write.
    pub async fn counted_lately(&self, young: Duration) -> Result<Option<Turn>, TierError> {
        let marker = self.marker(&self.own_key(COUNTED)).await?;
        Ok(marker.and_then(|marker| marker.taken(young)))
    }

    /// Takes the turn to list, unless another sidecar finished or began a count within `young`.
    pub async fn turn(&self, young: Duration) -> Result<Turn, TierError> {
        let key = self.own_key(COUNTED);
        let marker = self.marker(&key).await?;
        if let Some(taken) = marker.as_ref().and_then(|marker| marker.taken(young)) {
            return Ok(taken);
        }
        let last = marker.as_ref().and_then(|marker| marker.sum);
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&key)
            .body(text(last));
        let sent = match (self.conditional(), marker) {
            (false, _) => sent,
            (true, None) => sent.if_none_match("*"),
            (true, Some(marker)) => sent.set_if_match(marker.etag),
        };
        match self.ask(sent.send()).await {
            Ok(_) => Ok(Turn::Mine(Claim { key })),
            Err(e) => {
                let answer = Answer::of(&e);
                // It was taken or removed since it was read.
                if answer.unmet() || answer.conflicts() || answer.status == 404 {
                    return Ok(last.map_or(Turn::Counting, Turn::Counted));
                }
                let failed = failed(self.asked("s3:PutObject", Some(&key)), &e);
                // A server may support puts that fail if the object exists, but not conditional replacement.
                let unknown = answer.not_supported() || failed.cause == Cause::Protocol;
                match unknown && answer.status > 0 {
                    true => Ok(Turn::Mine(Claim { key })),
                    false => Err(failed),
                }
            }
        }
    }

    /// Publishes a count.
    pub async fn counted(&self, claim: &Claim, sum: Sum) -> Result<(), TierError> {
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&claim.key)
            .body(text(Some(sum)))
            .send();
        let sent = self.ask(sent).await;
        let asked = self.asked("s3:PutObject", Some(&claim.key));
        sent.map(drop).map_err(|e| failed(asked, &e))
    }

    async fn marker(&self, key: &str) -> Result<Option<Marker>, TierError> {
        let asked = self.asked("s3:GetObject", Some(key));
        let _permit = self.bound.question().await;
        let sent = self.client.get_object().bucket(&self.bucket).key(key);
        let answer = match sent.send().await {
            Ok(answer) => answer,
            Err(e) => {
                let failed = failed(asked, &e);
                return match failed.cause {
                    Cause::Missing => Ok(None),
                    _ => Err(failed),
                };
            }
        };
        let written = answer.last_modified.map(|at| at.secs());
        let written = written.and_then(|at| u64::try_from(at).ok());
        let now = self.clock.unix_s();
        let age = now.zip(written).map(|(now, at)| now.saturating_sub(at));
        // An object of a foreign writer may have any length.
        let short = answer
            .content_length
            .is_some_and(|n| n <= TEXT_BYTES as i64);
        let sum = match short {
            true => {
                let read = timeout(STALL, answer.body.collect()).await;
                let read = read.map_err(|_| stalled(asked))?;
                let read = read.map_err(|e| found(asked, Cause::Unreachable, e.to_string()))?;
                read_text(&read.into_bytes())
            }
            false => None,
        };
        Ok(Some(Marker {
            sum,
            age: age.map(Duration::from_secs),
            etag: answer.e_tag,
        }))
    }
}

/// All texts differ, so that a condition can tell the objects apart.
fn text(sum: Option<Sum>) -> ByteStream {
    let one = fastrand::u64(..);
    let text = match sum {
        Some(Sum { objects, bytes }) => {
            format!("{MARK} {objects} objects of {bytes} bytes ({one:016x})\n")
        }
        None => format!("kvcachepool counts here ({one:016x})\n"),
    };
    text.into_bytes().into()
}

fn read_text(text: &[u8]) -> Option<Sum> {
    let text = std::str::from_utf8(text).ok()?.strip_prefix(MARK)?;
    let (objects, rest) = text.trim_start().split_once(" objects of ")?;
    let (bytes, _) = rest.split_once(" bytes ")?;
    Some(Sum {
        objects: objects.parse().ok()?,
        bytes: bytes.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_read_and_nothing_else() {
        let sum = Sum {
            objects: 3,
            bytes: u64::MAX,
        };
        let bytes = async |sum| text(sum).collect().await.unwrap().into_bytes();
        let (one, other) = (bytes(Some(sum)).await, bytes(Some(sum)).await);
        assert!(one.len() <= TEXT_BYTES && one != other);
        assert_eq!((read_text(&one), read_text(&other)), (Some(sum), Some(sum)));
        assert_eq!(read_text(&bytes(None).await), None);
        for none in [
            "",
            "kvcachepool counted here: x objects of 1 bytes\n",
            "a web page",
        ] {
            assert_eq!(read_text(none.as_bytes()), None, "{none}");
        }
    }
}
