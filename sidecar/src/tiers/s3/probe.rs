//! What the credentials may do, tried when the tier is opened, so that a permission that is missing is named before anything depends on
//! it; and whether the bucket can still be reached, asked for now and then.

use super::fault::{Answer, failed, found};
use super::request::{PROBE, Requests};
use crate::tiers::{Cause, Page, TierError};
use aws_sdk_s3::primitives::ByteStream;
use std::time::{SystemTime, UNIX_EPOCH};

/// What a probe object holds.
const TEXT: &[u8] = b"kvcachepool tries here what it may do. This object can be removed.\n";

impl Requests {
    /// Puts, gets and removes an object, and lists; finds out what the server knows. Returns the first page of the listing.
    pub async fn probe(&self) -> Result<Page, TierError> {
        let since = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let own = format!("{:x}-{:x}", since.as_nanos(), std::process::id());
        let key = format!("{}{PROBE}-{own}", self.folder());
        if !self.put_probe(&key).await? {
            self.not_conditional();
            self.put_probe(&key).await?;
        } else if self.conditional() && self.put_probe(&key).await? {
            // It took the condition and did not keep it.
            self.not_conditional();
        }
        let got = self.get_probe(&key).await;
        let removed = self.delete(std::slice::from_ref(&key)).await;
        let asked = self.asked("s3:GetObject", Some(&key));
        if !got? {
            return Err(found(
                asked,
                Cause::Gone,
                "what was just written is not there",
            ));
        }
        removed?;
        match self.get_probe(&key).await {
            Ok(false) => {}
            Ok(true) => {
                return Err(found(
                    asked,
                    Cause::Protocol,
                    "what was just removed is there",
                ));
            }
            // Who may not list is not told that something is not there.
            Err(e) if e.cause == Cause::Denied => {
                return Err(found(
                    self.asked("s3:ListBucket", None),
                    Cause::Denied,
                    e.detail.replace("s3:GetObject", "s3:ListBucket"),
                ));
            }
            Err(e) => return Err(e),
        }
        self.list(None, super::listing::PAGE_MAX).await
    }

    /// Can objects be read? An absent one is asked for.
    pub async fn reach(&self) -> Result<(), TierError> {
        self.get_probe(&format!("{}{PROBE}", self.folder()))
            .await
            .map(drop)
    }

    /// Puts it where nothing is; false: a condition is not known, or was not met.
    async fn put_probe(&self, key: &str) -> Result<bool, TierError> {
        let condition = self.conditional().then(|| "*".to_string());
        let conditional = condition.is_some();
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(key)
            .set_if_none_match(condition)
            .body(ByteStream::from_static(TEXT))
            .send();
        match sent.await {
            Ok(_) => Ok(true),
            Err(e) => {
                let answer = Answer::of(&e);
                match conditional && (answer.status == 412 || answer.not_supported()) {
                    true => Ok(false),
                    false => Err(failed(self.asked("s3:PutObject", Some(key)), &e)),
                }
            }
        }
    }

    /// Is it there, with its bytes?
    async fn get_probe(&self, key: &str) -> Result<bool, TierError> {
        let mut stream = match self.range(key, (0, TEXT.len() as u64), None).await {
            Ok(stream) => stream,
            Err(e) if e.cause == Cause::Missing => return Ok(false),
            Err(e) => return Err(e),
        };
        let mut got = Vec::new();
        while let Some((_, bytes)) = stream.next().await? {
            got.extend_from_slice(&bytes);
        }
        if got != TEXT {
            let asked = self.asked("s3:GetObject", Some(key));
            return Err(found(
                asked,
                Cause::Protocol,
                "other bytes came back than were written",
            ));
        }
        Ok(true)
    }
}
