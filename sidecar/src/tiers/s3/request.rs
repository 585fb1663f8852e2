//! The bucket as everything here asks for it: client, names, and what was found out about the server.

use super::fault::Asked;
use aws_sdk_s3::Client;
use kvcachepool_protocol::object::ObjectName;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// Part of a name behind the prefix, of objects that a sidecar puts and removes when it opens the tier.
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
    /// The server refuses to put over an object that is there.
    conditional: AtomicBool,
    /// The server removes many objects at once.
    batches: AtomicBool,
}

impl Requests {
    /// Of a server that knows all that AWS knows, until it says otherwise.
    pub fn new(client: Client, bucket: String, prefix: String) -> Self {
        Self {
            client,
            bucket,
            prefix,
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

    /// An object's whole name.
    pub fn key(&self, name: &ObjectName) -> String {
        name.s3(&self.prefix)
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
