//! Tries the permissions of the credentials when the tier is opened, so that a missing one is named early. Also checks from time to time
//! whether the bucket is reachable.

use super::fault::{Answer, failed, found};
use super::request::{PROBE, Requests};
use crate::{Cause, Page, TierError};
use aws_sdk_s3::primitives::ByteStream;
use std::sync::OnceLock;

/// Content of a probe object.
const TEXT: &[u8] = b"kvcachepool tries here what it may do. This object can be removed.\n";

/// Name of this process's probe: a single one, so that at most one remains if objects cannot be removed.
fn own_name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| format!("{PROBE}-{:016x}", fastrand::u64(..)))
}

/// What a probe found.
#[derive(Debug)]
pub struct Probed {
    /// The first page of the listing.
    pub first: Page,
    /// The bucket keeps what is removed, as a version that is not current. Unknown without writes.
    pub keeps_versions: bool,
}

/// Result of putting a probe.
enum Try {
    Placed {
        /// The object is a version of its own. Where versioning is suspended, it is the version `null`, which a removal removes.
        versioned: bool,
    },
    /// The server reports an existing object.
    Refused,
    /// The server does not support the condition.
    Unknown,
}

impl Requests {
    /// Tries reading, and with `writes` also writing and removing.
    pub async fn probe(&self, writes: bool) -> Result<Probed, TierError> {
        let key = self.own_key(own_name());
        let keeps_versions = match writes {
            true => self.probe_writes(&key).await?,
            false => {
                // Unknown: if writes are allowed later, each put looks the object up first.
                self.not_conditional();
                false
            }
        };
        let first = self.list(None, super::listing::PAGE_MAX).await?;
        if !writes {
            // Only credentials that may list get a clear answer about a missing object.
            self.get_probe(&key).await?;
        }
        Ok(Probed {
            first,
            keeps_versions,
        })
    }

    /// Puts, gets and removes an object; finds out what the server supports. Returns whether the bucket keeps versions.
    async fn probe_writes(&self, key: &str) -> Result<bool, TierError> {
        let tried = self.try_object(key).await;
        // On every path: after a missing response the object may exist.
        let removed = self.delete(&[key.to_string()]).await;
        let versioned = tried?;
        removed?;
        match self.get_probe(key).await {
            Ok(false) => Ok(versioned),
            Ok(true) => Err(found(
                self.asked("s3:DeleteObject", Some(key)),
                Cause::Protocol,
                "the object still exists after its removal",
            )),
            // Without the right to list, a missing object is reported as denied.
            Err(e) if e.cause == Cause::Denied => Err(found(
                self.asked("s3:ListBucket", None),
                Cause::Denied,
                e.detail.replace("s3:GetObject", "s3:ListBucket"),
            )),
            Err(e) => Err(e),
        }
    }

    /// Puts an object and gets it. Returns whether it is a version of its own.
    async fn try_object(&self, key: &str) -> Result<bool, TierError> {
        let mut first = self.put_probe(key, true).await?;
        if matches!(first, Try::Refused) {
            // An earlier attempt of this process may have left it.
            self.delete(&[key.to_string()]).await?;
            first = self.put_probe(key, true).await?;
        }
        let (keeps, placed) = match first {
            Try::Placed { .. } => {
                let again = self.put_probe(key, true).await?;
                (!matches!(again, Try::Placed { .. }), first)
            }
            Try::Refused | Try::Unknown => (false, self.put_probe(key, false).await?),
        };
        if !keeps {
            self.not_conditional();
        }
        match self.get_probe(key).await? {
            true => Ok(matches!(placed, Try::Placed { versioned: true })),
            false => Err(found(
                self.asked("s3:GetObject", Some(key)),
                Cause::Gone,
                "the object does not exist after its write",
            )),
        }
    }

    /// Checks reading by a get of an absent object.
    pub async fn reach(&self) -> Result<(), TierError> {
        self.get_probe(&self.own_key(PROBE)).await.map(drop)
    }

    /// Puts the probe, with `conditional` only if no object exists.
    async fn put_probe(&self, key: &str, conditional: bool) -> Result<Try, TierError> {
        let sent = self
            .client
            .put_object()
            .bucket(&self.bucket)
            .key(key)
            .set_if_none_match(conditional.then(|| "*".to_string()))
            .body(ByteStream::from_static(TEXT))
            .send();
        let e = match self.ask(sent).await {
            Ok(placed) => {
                let versioned = placed.version_id().is_some_and(|id| id != "null");
                return Ok(Try::Placed { versioned });
            }
            Err(e) => e,
        };
        let answer = Answer::of(&e);
        match conditional {
            true if answer.unmet() => Ok(Try::Refused),
            true if answer.not_supported() => Ok(Try::Unknown),
            _ => Err(failed(self.asked("s3:PutObject", Some(key)), &e)),
        }
    }

    /// Whether the probe exists with the right bytes.
    async fn get_probe(&self, key: &str) -> Result<bool, TierError> {
        let mut stream = match self.range(key, (0, TEXT.len() as u64), None).await {
            Ok(stream) => stream,
            Err(e) if e.cause == Cause::Missing => return Ok(false),
            Err(e) => return Err(e),
        };
        let mut got = Vec::new();
        while stream.at < stream.end {
            got.extend_from_slice(&stream.next(u64::MAX).await?);
        }
        if got != TEXT {
            let asked = self.asked("s3:GetObject", Some(key));
            return Err(found(
                asked,
                Cause::Protocol,
                "the bytes that were read differ from those written",
            ));
        }
        Ok(true)
    }
}
