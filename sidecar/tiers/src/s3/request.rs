//! The bucket as everything here asks for it: client, names, how much at once, and what was found out about the server.

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

/// What names behind the prefix begin with that are ours and no objects of the cache.
pub const OWN: &str = ".kvcachepool-";
/// What a sidecar puts and removes when it opens the tier is called this and a name of its process.
pub const PROBE: &str = ".kvcachepool-probe";

/// A bucket and a prefix in it.
#[derive(Debug)]
pub struct Requests {
    /// Signs and sends.
    pub client: Client,
    /// The bucket.
    pub bucket: String,
    /// Without slashes around it; may be empty.
    pub prefix: String,
    /// What time it is for the server.
    pub clock: Arc<Clock>,
    /// How many requests run at once.
    pub bound: Bound,
    /// Which objects were read last under their names.
    pub tags: Tags,
    /// What S3 sums up parts of uploads by.
    pub checksum: Option<ChecksumAlgorithm>,
    /// Objects that are being read.
    pub reading: AtomicUsize,
    /// The server refuses to put over an object that is there.
    conditional: AtomicBool,
    /// The server removes many objects at once.
    batches: AtomicBool,
}

impl Requests {
    /// Of a server that knows all that AWS knows, until it says otherwise.
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

    /// How a failure of a request is told.
    pub fn asked<'a>(&'a self, permission: &'static str, object: Option<&'a str>) -> Asked<'a> {
        Asked {
            permission,
            bucket: &self.bucket,
            object,
        }
    }

    /// Sends a request that moves no bytes of objects, when there is room for it.
    pub async fn ask<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.question().await;
        sent.await
    }

    /// Sends a request with bytes of objects, when there is room for it.
    pub async fn write<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.write().await;
        sent.await
    }

    /// An object's whole name.
    pub fn key(&self, name: &ObjectName) -> String {
        name.s3(&self.prefix)
    }

    /// A name that is ours and no object of the cache.
    pub fn own_key(&self, name: &str) -> String {
        format!("{}{name}", self.folder())
    }

    /// Is it such a name?
    pub fn is_own_key(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&self.folder());
        rest.is_some_and(|rest| rest.starts_with(OWN))
    }

    /// What all our names begin with; empty or with a slash at its end.
    pub fn folder(&self) -> String {
        match self.prefix.as_str() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        }
    }

    /// Does the server refuse to put over an object that is there?
    pub fn conditional(&self) -> bool {
        self.conditional.load(Relaxed)
    }

    /// It does not: from now on it is asked first.
    pub fn not_conditional(&self) {
        self.conditional.store(false, Relaxed);
    }

    /// Does the server remove many objects at once?
    pub fn batches(&self) -> bool {
        self.batches.load(Relaxed)
    }

    /// It does not: from now on they are removed one by one.
    pub fn no_batches(&self) {
        self.batches.store(false, Relaxed);
    }
}
