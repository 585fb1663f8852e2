//! Listing and removing.

use super::fault::{Answer, failed, found};
use super::request::{PROBE, Requests};
use crate::tiers::{Cause, Listed, Page, TierError};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use futures::stream::{StreamExt, TryStreamExt};
use kvcachepool_protocol::object::ObjectName;

/// Most names of a page, and of a request that removes.
pub const PAGE_MAX: usize = 1_000;
/// Requests about single objects at once.
const AT_ONCE: usize = 32;

impl Requests {
    /// A page of names.
    pub async fn list(&self, from: Option<&str>, limit: usize) -> Result<Page, TierError> {
        let asked = self.asked("s3:ListBucket", None);
        let limit = limit.clamp(1, PAGE_MAX);
        // A place in the listing that the server gave: not all have an order of names that could be gone on with.
        let sent = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .prefix(self.folder())
            .max_keys(i32::try_from(limit).unwrap_or(1))
            .set_continuation_token(from.map(str::to_string))
            .send();
        let answer = sent.await.map_err(|e| match (&e, from) {
            (SdkError::ServiceError(_), Some(_)) if Answer::of(&e).code == "InvalidArgument" => {
                found(asked, Cause::Shape, "no page ended there")
            }
            _ => failed(asked, &e),
        })?;
        let mut page = Page {
            next: answer.next_continuation_token.clone(),
            ..Page::default()
        };
        if page.next.is_none() && answer.is_truncated == Some(true) {
            return Err(found(
                asked,
                Cause::Protocol,
                "a listing that ends in the middle",
            ));
        }
        for object in answer.contents() {
            let key = object.key().unwrap_or_default();
            let name = ObjectName::from_s3(&self.prefix, key);
            let bytes = object.size().and_then(|n| u64::try_from(n).ok());
            let written = object
                .last_modified()
                .and_then(|at| u64::try_from(at.secs()).ok());
            match (name, bytes) {
                (Ok(name), Some(bytes)) => page.objects.push(Listed {
                    name,
                    bytes,
                    written_unix_s: written.unwrap_or_default(),
                }),
                _ if self.is_probe(key) => {}
                _ => page.foreign += 1,
            }
        }
        Ok(page)
    }

    /// Is it a name by which a sidecar tries what it may do?
    fn is_probe(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&self.folder());
        rest.is_some_and(|rest| rest.starts_with(PROBE))
    }

    /// Which of these are there, with their bytes.
    pub async fn sizes(&self, names: &[ObjectName]) -> Result<Vec<(ObjectName, u64)>, TierError> {
        futures::stream::iter(names.to_vec())
            .map(|name| async move {
                let size = self.size(&name).await?;
                Ok(size.map(|bytes| (name, bytes)))
            })
            .buffered(AT_ONCE)
            .try_filter_map(|found| async move { Ok(found) })
            .try_collect()
            .await
    }

    /// Removes names, whether they are there or not.
    pub async fn delete(&self, keys: &[String]) -> Result<(), TierError> {
        for batch in keys.chunks(PAGE_MAX) {
            if !self.batches() || !self.delete_batch(batch).await? {
                self.delete_each(batch).await?;
            }
        }
        Ok(())
    }

    /// False: the server knows no such request.
    async fn delete_batch(&self, keys: &[String]) -> Result<bool, TierError> {
        let asked = self.asked("s3:DeleteObject", None);
        let wrong = |e: aws_sdk_s3::error::BuildError| found(asked, Cause::Shape, e.to_string());
        let names = keys
            .iter()
            .map(|key| ObjectIdentifier::builder().key(key).build().map_err(wrong))
            .collect::<Result<Vec<_>, _>>()?;
        let delete = Delete::builder()
            .set_objects(Some(names))
            .quiet(true)
            .build()
            .map_err(wrong)?;
        let sent = self
            .client
            .delete_objects()
            .bucket(&self.bucket)
            .delete(delete)
            .send();
        let answer = match sent.await {
            Ok(answer) => answer,
            Err(e) => {
                let answer = Answer::of(&e);
                // Some know it with a digest only that was given up long ago.
                if answer.not_supported() || answer.code == "MissingContentMD5" {
                    self.no_batches();
                    return Ok(false);
                }
                return Err(failed(asked, &e));
            }
        };
        match answer
            .errors()
            .iter()
            .find(|e| e.code() != Some("NoSuchKey"))
        {
            None => Ok(true),
            Some(refused) => {
                let (code, key) = (refused.code(), refused.key());
                let answer = Answer {
                    status: if code == Some("InternalError") {
                        500
                    } else {
                        403
                    },
                    code: code.unwrap_or_default().to_string(),
                    message: refused.message().unwrap_or_default().to_string(),
                    region: None,
                };
                Err(answer.failed(self.asked("s3:DeleteObject", key)))
            }
        }
    }

    async fn delete_each(&self, keys: &[String]) -> Result<(), TierError> {
        futures::stream::iter(keys.to_vec())
            .map(|key| async move {
                let asked = self.asked("s3:DeleteObject", Some(&key));
                let sent = self
                    .client
                    .delete_object()
                    .bucket(&self.bucket)
                    .key(&key)
                    .send();
                match sent.await {
                    Ok(_) => Ok(()),
                    Err(e) if e.code() == Some("NoSuchKey") => Ok(()),
                    Err(e) => Err(failed(asked, &e)),
                }
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await
    }
}
