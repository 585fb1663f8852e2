//! Writing: one request for most objects, parts for long ones. An object is there whole or not at all, and the first one of a name stays.

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
    /// Objects of more bytes are sent in parts.
    pub from_bytes: u64,
    /// Bytes of a part; S3 takes no fewer than 5 MiB.
    pub part_bytes: u64,
    /// Parts of an object at once.
    pub at_once: usize,
}

/// What became of a request that puts an object where none may be.
pub enum Placed {
    /// It is there now.
    New,
    /// One was there before.
    Already,
    /// Another request about the name was in the way.
    Conflict,
    /// The server does not know how to put only where nothing is.
    NotConditional,
}

/// How often an object is sent where requests about its name are in each other's way, and the pause before each time.
const CONFLICTS: u32 = 6;
const PAUSE: Duration = Duration::from_millis(20);

impl Requests {
    /// Writes an object.
    pub async fn put(&self, put: &Put, uploads: Uploads) -> Result<Stored, TierError> {
        let name = put.object.name();
        let shape = |why: String| TierError::new(Kind::S3, Cause::Shape, why).about(name.s3(""));
        let lengths = put.object.sections.iter().map(|s| s.stored_bytes);
        if !lengths.eq(put.spans.iter().map(|span| span.length)) {
            return Err(shape("the spans are not as long as the sections".into()));
        }
        let source = Source::new(put).map_err(|e| shape(e.to_string()))?;
        let long = source.length() > uploads.from_bytes;
        // The bytes of a long object are worth a question, whatever the server knows.
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
                    let detail = "other requests about this name are in the way";
                    return Err(found(asked, Cause::Busy, detail).about(self.key(&name)));
                }
                Placed::Conflict => {
                    conflicts += 1;
                    tokio::time::sleep(PAUSE * conflicts).await;
                }
                // For this object only: opening found out what the server knows, and what stands before it may refuse for a while.
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
                // A server may refuse before it has read all, and hang up: the refusal is lost then.
                let hung_up = matches!(e, SdkError::DispatchFailure(_)) && conditional;
                if hung_up && self.size(name).await.is_ok_and(|size| size.is_some()) {
                    return Ok(Placed::Already);
                }
                Err(failed(asked, &e))
            }
        }
    }

    /// What the refusal of a conditional request means, where it means one of these.
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
            // Another writer of the name is at it, or was faster.
            return Ok(Some(match self.size(name).await? {
                Some(_) => Placed::Already,
                None => Placed::Conflict,
            }));
        }
        let unknown = conditional && answer.not_supported();
        Ok(unknown.then_some(Placed::NotConditional))
    }

    /// Bytes of an object, none where it is not there.
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
                bytes
                    .map(Some)
                    .ok_or_else(|| found(asked, Cause::Protocol, "an answer without a length"))
            }
            Err(e) => match Answer::of(&e).status {
                404 => Ok(None),
                // An answer to HEAD has no body that would say why.
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
