//! Writes objects: one request for most, multipart uploads for long ones. An object exists completely or not at all, and the first one
//! wins.

use super::body::Source;
use super::fault::{Answer, failed, found};
use super::multipart::Upload;
use super::request::Requests;
use crate::{Cause, Kind, Put, Stored, TierError};
use aws_sdk_s3::error::SdkError;
use kvcachepool_protocol::object::ObjectName;
use std::time::Duration;

/// How large objects are written.
#[derive(Debug, Clone, Copy)]
pub struct Uploads {
    /// Larger objects are sent in parts.
    pub from_bytes: u64,
    /// Bytes of a part; the minimum of S3 is 5 MiB.
    pub part_bytes: u64,
    /// Concurrent parts of an object.
    pub at_once: usize,
}

/// Result of a put that must not replace an object.
pub enum Placed {
    New,
    /// The object existed before.
    Already,
    /// Another request about the name was in the way.
    Conflict,
    /// The server does not support the condition.
    NotConditional,
}

/// Attempts of a put while other requests about its name are in the way, and the pause before each.
const CONFLICTS: u32 = 6;
const PAUSE: Duration = Duration::from_millis(20);

impl Requests {
    pub async fn put(&self, put: &Put, uploads: Uploads) -> Result<Stored, TierError> {
        let name = put.object.name();
        let shape = |why: String| TierError::new(Kind::S3, Cause::Shape, why).about(name.s3(""));
        let lengths = put.object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            return Err(shape("spans and sections differ in length".into()));
        }
        let source = Source::new(put).map_err(|e| shape(e.to_string()))?;
        let long = source.length() > uploads.from_bytes;
        // A lookup is worth its cost for a long object, whatever the server supports.
        if (long || !self.conditional()) && self.size(&name).await?.is_some() {
            return Ok(Stored::Already);
        }
        let (mut conditional, mut conflicts) = (self.conditional(), 0);
        loop {
            let placed = match long {
                true => Upload::run(self, &name, &source, uploads, conditional).await?,
                false => self.place(&name, &source, conditional).await?,
            };
            match placed {
                Placed::New => return Ok(Stored::New),
                Placed::Already => return Ok(Stored::Already),
                Placed::Conflict if conflicts == CONFLICTS => {
                    let asked = self.asked("s3:PutObject", None);
                    let detail = "conflicting requests about this object";
                    return Err(found(asked, Cause::Busy, detail).about(self.key(&name)));
                }
                Placed::Conflict => {
                    conflicts += 1;
                    tokio::time::sleep(PAUSE * conflicts).await;
                }
                // For this object only: opening found out what the server supports, and a proxy may refuse temporarily.
                Placed::NotConditional => {
                    conditional = false;
                    if self.size(&name).await?.is_some() {
                        return Ok(Stored::Already);
                    }
                }
            }
        }
    }

    async fn place(
        &self,
        name: &ObjectName,
        source: &Source,
        conditional: bool,
    ) -> Result<Placed, TierError> {
        let key = self.key(name);
        let length = i64::try_from(source.length()).unwrap_or(i64::MAX);
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(&key)
            .set_if_none_match(conditional.then(|| "*".to_string()))
            .content_length(length)
            .body(source.body(0, source.length()))
            .send();
        match self.write(sent).await {
            Ok(_) => Ok(Placed::New),
            Err(e) => {
                let answer = Answer::of(&e);
                let asked = self.asked("s3:PutObject", Some(&key));
                if let Some(placed) = self.refused(name, &answer, conditional).await? {
                    return Ok(placed);
                }
                // A server may refuse before it has read everything, and close the connection: the refusal is then lost.
                let hung_up = matches!(e, SdkError::DispatchFailure(_)) && conditional;
                if hung_up && self.size(name).await.is_ok_and(|size| size.is_some()) {
                    return Ok(Placed::Already);
                }
                Err(failed(asked, &e))
            }
        }
    }

    /// Result of a conditional request that was refused, if it is one of these.
    pub async fn refused(
        &self,
        name: &ObjectName,
        answer: &Answer,
        conditional: bool,
    ) -> Result<Option<Placed>, TierError> {
        if answer.unmet() {
            return Ok(Some(Placed::Already));
        }
        if answer.conflicts() {
            // Another writer of the name is active, or was faster.
            return Ok(Some(match self.size(name).await? {
                Some(_) => Placed::Already,
                None => Placed::Conflict,
            }));
        }
        let unknown = conditional && answer.not_supported();
        Ok(unknown.then_some(Placed::NotConditional))
    }

    /// Bytes of an object; `None` if it does not exist.
    pub async fn size(&self, name: &ObjectName) -> Result<Option<u64>, TierError> {
        let key = self.key(name);
        let asked = self.asked("s3:GetObject", Some(&key));
        let sent = self
            .client
            .head_object()
            .bucket(&self.bucket)
            .key(&key)
            .send();
        match self.ask(sent).await {
            Ok(head) => {
                let bytes = head.content_length.and_then(|n| u64::try_from(n).ok());
                bytes.map(Some).ok_or_else(|| {
                    found(asked, Cause::Protocol, "the response has no Content-Length")
                })
            }
            Err(e) => match Answer::of(&e).status {
                404 => Ok(None),
                // A response to HEAD has no body with a reason.
                400 | 403 => match self.range(&key, (0, 1), None).await {
                    Ok(stream) => Ok(Some(stream.version.total)),
                    Err(e) if e.cause == Cause::Missing => Ok(None),
                    Err(e) => Err(e),
                },
                _ => Err(failed(asked, &e)),
            },
        }
    }
}
