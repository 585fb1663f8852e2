//! The listing lease: one sidecar lists a bucket for all. A small object contains the last count, and its age says when that was taken. The
//! sidecar that replaces it first lists next. With a server without conditional puts two may list at once, which is harmless.

use super::fault::{Answer, failed, found};
use super::request::Requests;
use super::stream::{STALL, stalled};
use crate::census::{Marker, Sum, TEXT_BYTES, Turn, read_text, text};
use crate::{Cause, TierError};
use std::time::Duration;
use tokio::time::timeout;

/// Name of the object behind the prefix.
pub const COUNTED: &str = ".kvcachepool-counted";

impl Requests {
    /// The count that another sidecar finished or began within `young`. Takes no turn: for sidecars that may not write.
    pub async fn counted_lately(&self, young: Duration) -> Result<Option<Turn>, TierError> {
        let found = self.marker(&self.own_key(COUNTED)).await?;
        Ok(found.and_then(|(marker, _)| marker.taken(young)))
    }

    /// Takes the turn to list, unless another sidecar finished or began a count within `young`.
    pub async fn turn(&self, young: Duration) -> Result<Turn, TierError> {
        let key = self.own_key(COUNTED);
        let found = self.marker(&key).await?;
        let marker = found.as_ref().map(|(marker, _)| marker);
        if let Some(taken) = marker.and_then(|marker| marker.taken(young)) {
            return Ok(taken);
        }
        let last = marker.and_then(|marker| marker.sum);
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&key)
            .body(text(last).into_bytes().into());
        let sent = match (self.conditional(), found) {
            (false, _) => sent,
            (true, None) => sent.if_none_match("*"),
            (true, Some((_, etag))) => sent.set_if_match(etag),
        };
        match self.ask(sent.send()).await {
            Ok(_) => Ok(Turn::Mine),
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
                    true => Ok(Turn::Mine),
                    false => Err(failed),
                }
            }
        }
    }

    /// Publishes a count.
    pub async fn counted(&self, sum: Sum) -> Result<(), TierError> {
        let key = self.own_key(COUNTED);
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&key)
            .body(text(Some(sum)).into_bytes().into())
            .send();
        let sent = self.ask(sent).await;
        let asked = self.asked("s3:PutObject", Some(&key));
        sent.map(drop).map_err(|e| failed(asked, &e))
    }

    /// The object, and its ETag.
    async fn marker(&self, key: &str) -> Result<Option<(Marker, Option<String>)>, TierError> {
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
        let marker = Marker::new(sum, written, self.clock.unix_s());
        Ok(Some((marker, answer.e_tag)))
    }
}
