//! The bucket for all requests: client, names, limits, and the features of the server.

use super::bound::Bound;
use super::clock::Clock;
use super::fault::Asked;
use super::tags::Tags;
use aws_sdk_s3::Client;
use aws_sdk_s3::types::ChecksumAlgorithm;
use kvcachepool_protocol::config::{self, Checksums};
use kvcachepool_protocol::object::ObjectName;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

/// Prefix of our own names that are not objects of the cache.
pub const OWN: &str = ".kvcachepool-";
/// Prefix of the names of probes, which sidecars put and remove when they open the tier.
pub const PROBE: &str = ".kvcachepool-probe";

/// A bucket and a prefix in it.
#[derive(Debug)]
pub struct Requests {
    pub client: Client,
    pub bucket: String,
    /// Without slashes around it; may be empty.
    pub prefix: String,
    /// The server's time.
    pub clock: Arc<Clock>,
    /// The limit of concurrent requests.
    pub bound: Bound,
    /// ETags of the objects read last.
    pub tags: Tags,
    /// Checksum of upload parts.
    pub checksum: Option<ChecksumAlgorithm>,
    /// Number of objects that are being read.
    pub reading: AtomicUsize,
    /// The server supports puts that fail if the object exists.
    conditional: AtomicBool,
    /// The server supports batch removal.
    batches: AtomicBool,
}

impl Requests {
    /// Assumes all features of AWS until the server refuses one.
    pub fn new(client: Client, clock: Arc<Clock>, config: &config::S3) -> Self {
        let summed = config.checksums == Checksums::WhenSupported;
        Self {
            client,
            bucket: config.bucket.clone(),
            prefix: config.prefix.clone(),
            clock,
            bound: Bound::new(config.max_concurrency as usize),
            tags: Tags::default(),
            checksum: summed.then_some(ChecksumAlgorithm::Crc32),
            reading: AtomicUsize::new(0),
            conditional: AtomicBool::new(true),
            batches: AtomicBool::new(true),
        }
    }

    /// Description of a request for its errors.
    pub fn asked<'a>(&'a self, permission: &'static str, object: Option<&'a str>) -> Asked<'a> {
        Asked {
            permission,
            bucket: &self.bucket,
            object,
        }
    }

    /// Sends a request without bytes of objects, within the limit.
    pub async fn ask<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.question().await;
        sent.await
    }

    /// Sends a request with bytes of objects, within the limit.
    pub async fn write<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.write().await;
        sent.await
    }

    /// The full key of an object.
    pub fn key(&self, name: &ObjectName) -> String {
        name.s3(&self.prefix)
    }

    /// The full key of one of our own names that are not objects.
    pub fn own_key(&self, name: &str) -> String {
        format!("{}{name}", self.folder())
    }

    /// Whether a key is one of those.
    pub fn is_own_key(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&self.folder());
        rest.is_some_and(|rest| rest.starts_with(OWN))
    }

    /// Common prefix of all our names; empty or with a final slash.
    pub fn folder(&self) -> String {
        match self.prefix.as_str() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        }
    }

    /// Whether the server supports puts that fail if the object exists.
    pub fn conditional(&self) -> bool {
        self.conditional.load(Relaxed)
    }

    /// Records that it does not: from now on a lookup comes first.
    pub fn not_conditional(&self) {
        self.conditional.store(false, Relaxed);
    }

    /// Whether the server supports batch removal.
    pub fn batches(&self) -> bool {
        self.batches.load(Relaxed)
    }

    /// Records that it does not: from now on objects are removed one by one.
    pub fn no_batches(&self) {
        self.batches.store(false, Relaxed);
    }
}
