//! Writes objects: one request for most, multipart uploads for long ones. An object exists completely or not at all, and the first one
//! wins.
//!
//! The parts of an unfinished upload are charged for and invisible. So every path without success aborts the upload, also when the caller
//! stops waiting. The sweep aborts those of processes that died.

use super::body::Source;
use super::bound::Bound;
use super::fault::{Answer, failed, found};
use super::request::Requests;
use crate::{Cause, Kind, Put, Stored, TierError};
use aws_sdk_s3::Client;
use aws_sdk_s3::error::SdkError;
use aws_sdk_s3::types::{CompletedMultipartUpload, CompletedPart};
use futures::stream::{StreamExt, TryStreamExt};
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
enum Placed {
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
    async fn refused(
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

/// Limit of S3.
const PARTS_MAX: u64 = 10_000;

/// An upload that has begun.
#[derive(Debug)]
struct Upload<'a> {
    requests: &'a Requests,
    key: String,
    id: String,
    /// Aborted on drop.
    open: bool,
}

impl<'a> Upload<'a> {
    /// Uploads an object in parts.
    async fn run(
        requests: &'a Requests,
        name: &ObjectName,
        source: &Source,
        uploads: Uploads,
        conditional: bool,
    ) -> Result<Placed, TierError> {
        let mut upload = Self::begin(requests, requests.key(name)).await?;
        let sent = match upload.parts(source, uploads).await {
            Ok(parts) => upload.end(name, parts, conditional).await,
            Err(e) => Err(e),
        };
        if !matches!(sent, Ok(Placed::New)) {
            upload.abort().await;
        }
        sent
    }

    async fn begin(requests: &'a Requests, key: String) -> Result<Self, TierError> {
        let asked = requests.asked("s3:PutObject", Some(&key));
        let sent = requests
            .client
            .create_multipart_upload()
            .bucket(&requests.bucket)
            .key(&key)
            .set_checksum_algorithm(requests.checksum.clone())
            .send();
        let begun = requests.ask(sent).await.map_err(|e| failed(asked, &e))?;
        let id = begun
            .upload_id
            .ok_or_else(|| found(asked, Cause::Protocol, "the response has no upload id"))?;
        Ok(Self {
            requests,
            key,
            id,
            open: true,
        })
    }

    async fn parts(
        &self,
        source: &Source,
        uploads: Uploads,
    ) -> Result<Vec<CompletedPart>, TierError> {
        let part_bytes = uploads
            .part_bytes
            .max(source.length().div_ceil(PARTS_MAX))
            .max(1);
        let count = source.length().div_ceil(part_bytes);
        futures::stream::iter(0..count)
            .map(|index| self.part(source, index, part_bytes))
            .buffered(uploads.at_once.max(1))
            .try_collect()
            .await
    }

    async fn part(
        &self,
        source: &Source,
        index: u64,
        part_bytes: u64,
    ) -> Result<CompletedPart, TierError> {
        let start = index * part_bytes;
        let length = part_bytes.min(source.length() - start);
        let number = i32::try_from(index + 1).unwrap_or(i32::MAX);
        let sent = self
            .requests
            .client
            .upload_part()
            .bucket(&self.requests.bucket)
            .key(&self.key)
            .upload_id(&self.id)
            .part_number(number)
            .content_length(i64::try_from(length).unwrap_or(i64::MAX))
            .body(source.body(start, length))
            .send();
        let asked = self.requests.asked("s3:PutObject", Some(&self.key));
        let sent = self.requests.write(sent).await;
        let part = sent.map_err(|e| failed(asked, &e))?;
        Ok(CompletedPart::builder()
            .part_number(number)
            .set_e_tag(part.e_tag)
            .set_checksum_crc32(part.checksum_crc32)
            .build())
    }

    async fn end(
        &mut self,
        name: &ObjectName,
        parts: Vec<CompletedPart>,
        conditional: bool,
    ) -> Result<Placed, TierError> {
        let parts = CompletedMultipartUpload::builder()
            .set_parts(Some(parts))
            .build();
        let sent = self
            .requests
            .client
            .complete_multipart_upload()
            .bucket(&self.requests.bucket)
            .key(&self.key)
            .upload_id(&self.id)
            .set_if_none_match(conditional.then(|| "*".to_string()))
            .multipart_upload(parts)
            .send();
        match self.requests.ask(sent).await {
            Ok(_) => {
                self.open = false;
                Ok(Placed::New)
            }
            Err(e) => {
                let answer = Answer::of(&e);
                let asked = self.requests.asked("s3:PutObject", Some(&self.key));
                match self.requests.refused(name, &answer, conditional).await? {
                    Some(placed) => Ok(placed),
                    None => Err(failed(asked, &e)),
                }
            }
        }
    }

    async fn abort(&mut self) {
        if self.open {
            // If this is dropped, the upload is aborted twice, which is harmless.
            let (requests, key, id) = (self.requests, &self.key, &self.id);
            let _ = abort(&requests.client, &requests.bound, &requests.bucket, key, id).await;
            self.open = false;
        }
    }
}

impl Drop for Upload<'_> {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            return;
        };
        let (client, bound) = (self.requests.client.clone(), self.requests.bound.clone());
        let (bucket, key, id) = (
            self.requests.bucket.clone(),
            self.key.clone(),
            self.id.clone(),
        );
        runtime.spawn(async move {
            let _ = abort(&client, &bound, &bucket, &key, &id).await;
        });
    }
}

/// Returns whether the abort succeeded. Parts in flight during an abort may remain: the sweep finds them.
async fn abort(client: &Client, bound: &Bound, bucket: &str, key: &str, id: &str) -> bool {
    let _permit = bound.question().await;
    let sent = client
        .abort_multipart_upload()
        .bucket(bucket)
        .key(key)
        .upload_id(id)
        .send();
    sent.await.is_ok()
}

impl Requests {
    /// Aborts uploads under our prefix that began longer ago than this; returns their number.
    pub async fn sweep(&self, age: Duration) -> Result<u64, TierError> {
        let asked = self.asked("s3:ListBucketMultipartUploads", None);
        let (mut swept, mut after) = (0, (None::<String>, None::<String>));
        loop {
            let (key, id) = after.clone();
            let sent = self
                .client
                .list_multipart_uploads()
                .bucket(&self.bucket)
                .prefix(self.folder())
                .set_key_marker(key)
                .set_upload_id_marker(id)
                .send();
            let page = self.ask(sent).await.map_err(|e| failed(asked, &e))?;
            // By the server's clock: this node's may be wrong.
            let Some(now) = self.clock.unix_s() else {
                return Ok(swept);
            };
            let before = now.saturating_sub(age.as_secs());
            for upload in page.uploads() {
                let (Some(key), Some(id), Some(begun)) =
                    (upload.key(), upload.upload_id(), upload.initiated())
                else {
                    continue;
                };
                let old = u64::try_from(begun.secs()).is_ok_and(|begun| begun <= before);
                let ours = ObjectName::from_s3(&self.prefix, key).is_ok();
                let swept_up =
                    old && ours && abort(&self.client, &self.bound, &self.bucket, key, id).await;
                swept += u64::from(swept_up);
            }
            if page.is_truncated() != Some(true) || page.next_key_marker().is_none() {
                return Ok(swept);
            }
            if (page.next_key_marker(), page.next_upload_id_marker())
                == (after.0.as_deref(), after.1.as_deref())
            {
                return Err(found(
                    asked,
                    Cause::Protocol,
                    "a listing whose token does not advance",
                ));
            }
            after = (page.next_key_marker, page.next_upload_id_marker);
        }
    }
}
