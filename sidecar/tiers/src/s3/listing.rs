//! Lists and removes objects.

use super::fault::{Answer, failed, found};
use super::request::Requests;
use crate::{Cause, Listed, Page, Status, TierError};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::types::{Delete, ObjectIdentifier};
use futures::stream::{StreamExt, TryStreamExt};
use kvcachepool_protocol::object::ObjectName;
use std::time::Duration;
use tokio::time::sleep;

/// Most names of a page, and of a batch removal.
pub const PAGE_MAX: usize = 1_000;
/// Concurrent requests about single objects.
const AT_ONCE: usize = 32;
/// Attempts to remove a key that the server refuses for a moment, and the pause before the second one; it doubles.
const TRIES: u32 = 4;
const PAUSE: Duration = Duration::from_millis(200);

/// A name that could not be removed, and the error.
pub type Refused = (String, TierError);

impl Requests {
    /// A page of names.
    pub async fn list(&self, from: Option<&str>, limit: usize) -> Result<Page, TierError> {
        let asked = self.asked("s3:ListBucket", None);
        let limit = limit.clamp(1, PAGE_MAX);
        // Continues by the server's token: not all servers list in an order of names.
        let sent = self
            .client
            .list_objects_v2()
            .bucket(&self.bucket)
            .prefix(self.folder())
            .max_keys(i32::try_from(limit).unwrap_or(1))
            .set_continuation_token(from.map(str::to_string))
            .send();
        let answer = self.ask(sent).await.map_err(|e| match (&e, from) {
            (SdkError::ServiceError(_), Some(_)) if Answer::of(&e).code == "InvalidArgument" => {
                found(asked, Cause::Shape, "invalid page token")
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
                "a truncated listing without a continuation token",
            ));
        }
        if page.next.is_some() && page.next.as_deref() == from {
            return Err(found(
                asked,
                Cause::Protocol,
                "a listing whose token does not advance",
            ));
        }
        // An object without a date counts as new.
        let now = self.clock.unix_s_or_own();
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
                    written_unix_s: written.unwrap_or(now),
                }),
                _ if self.is_own_key(key) => {}
                _ => page.foreign += 1,
            }
        }
        Ok(page)
    }

    /// Those of these objects that exist, with their bytes.
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

    /// Removes names, whether they exist or not.
    pub async fn delete(&self, keys: &[String]) -> Result<(), TierError> {
        let refused = self.delete_some(keys).await?;
        refused.into_iter().next().map_or(Ok(()), |(_, e)| Err(e))
    }

    /// The same; returns the names that the server refuses to remove, with the error.
    pub async fn delete_some(&self, keys: &[String]) -> Result<Vec<Refused>, TierError> {
        let mut refused = Vec::new();
        for batch in keys.chunks(PAGE_MAX) {
            let (mut left, mut tries, mut pause) = (batch.to_vec(), 1, PAUSE);
            loop {
                let failed = self.delete_once(&left).await?;
                // A refusal without a key cannot be sent again.
                let temporary =
                    |(key, e): &Refused| !key.is_empty() && e.cause.status() == Status::Temporary;
                let (again, stay): (Vec<_>, Vec<_>) = failed.into_iter().partition(temporary);
                refused.extend(stay);
                if again.is_empty() || tries == TRIES {
                    refused.extend(again);
                    break;
                }
                left = again.into_iter().map(|(key, _)| key).collect();
                sleep(pause).await;
                (tries, pause) = (tries + 1, pause * 2);
            }
        }
        Ok(refused)
    }

    /// The names of a batch that the server refuses to remove, perhaps only for a moment.
    async fn delete_once(&self, keys: &[String]) -> Result<Vec<Refused>, TierError> {
        let at_once = match self.batches() {
            true => self.delete_batch(keys).await?,
            false => None,
        };
        match at_once {
            Some(refused) => Ok(refused),
            None => self.delete_each(keys).await,
        }
    }

    /// Removes the object with this name and ETag. False: the name now belongs to another object, which is kept.
    pub async fn delete_version(&self, key: &str, etag: &str) -> Result<bool, TierError> {
        let asked = self.asked("s3:DeleteObject", Some(key));
        let sent = self
            .client
            .delete_object()
            .bucket(&self.bucket)
            .key(key)
            .if_match(etag)
            .send();
        match self.ask(sent).await {
            Ok(_) => Ok(true),
            Err(e) => {
                let answer = Answer::of(&e);
                match answer.unmet() || answer.status == 404 {
                    true => Ok(false),
                    false if answer.not_supported() => {
                        self.delete(&[key.to_string()]).await.map(|()| true)
                    }
                    false => Err(failed(asked, &e)),
                }
            }
        }
    }

    /// The refused names. `None`: the server does not support batch removal.
    async fn delete_batch(&self, keys: &[String]) -> Result<Option<Vec<Refused>>, TierError> {
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
        let answer = match self.ask(sent).await {
            Ok(answer) => answer,
            Err(e) => {
                let answer = Answer::of(&e);
                // Some servers support it only with a deprecated digest.
                if answer.not_supported() || answer.code == "MissingContentMD5" {
                    self.no_batches();
                    return Ok(None);
                }
                return Err(failed(asked, &e));
            }
        };
        let refused = answer
            .errors()
            .iter()
            .filter(|e| e.code() != Some("NoSuchKey"));
        let refused = refused.map(|refused| {
            let key = refused.key().unwrap_or_default();
            let answer = Answer {
                // Most errors with a code of their own are classified by it.
                status: 403,
                code: refused.code().unwrap_or_default().to_string(),
                message: refused.message().unwrap_or_default().to_string(),
                ..Answer::default()
            };
            let asked = self.asked("s3:DeleteObject", Some(key));
            (key.to_string(), answer.failed(asked))
        });
        Ok(Some(refused.collect()))
    }

    async fn delete_each(&self, keys: &[String]) -> Result<Vec<Refused>, TierError> {
        futures::stream::iter(keys.to_vec())
            .map(|key| async move {
                let asked = self.asked("s3:DeleteObject", Some(&key));
                let sent = self
                    .client
                    .delete_object()
                    .bucket(&self.bucket)
                    .key(&key)
                    .send();
                let failed = match self.ask(sent).await {
                    Ok(_) => return Ok(None),
                    Err(e) if e.code() == Some("NoSuchKey") => return Ok(None),
                    Err(e) => failed(asked, &e),
                };
                match failed.cause {
                    // This object may be locked while others are not.
                    Cause::Denied => Ok(Some((key, failed))),
                    _ => Err(failed),
                }
            })
            .buffer_unordered(AT_ONCE)
            .try_filter_map(|refused| async move { Ok(refused) })
            .try_collect()
            .await
    }
}
