//! The tier against a real server, and against one that answers what a test tells it to.

mod addresses;
mod bucket;
mod cleared;
mod direct;
mod errors;
mod express;
mod listed;
mod readers;
mod removal;
mod room;
mod shared;
mod stalled;
mod suite;
mod tls;
mod uploads;

use super::request::Requests;
use super::{Options, Parts, S3, Uploads};
use crate::testing::faulty::Faulty;
use crate::testing::s3_server::Server;
use crate::{Page, Tier};
use kvcachepool_protocol::config;
use std::sync::Arc;

/// A bucket, without looking whether it is there.
async fn requests(config: &config::S3) -> Requests {
    Requests::open(config).await.unwrap()
}

impl Faulty {
    /// The bucket, without looking whether it is there.
    async fn requests(&self) -> Requests {
        requests(&self.config()).await
    }

    /// A tier over the bucket, without looking whether it is there.
    async fn tier(&self) -> Arc<dyn Tier> {
        let (requests, first) = (self.requests().await, Page::default());
        Arc::new(S3::over(
            requests,
            &self.config(),
            Options::default(),
            &first,
        ))
    }
}

fn parts() -> Parts {
    Options::default().parts
}

fn uploads() -> Uploads {
    Options::default().uploads
}

/// An object of a few MiB is uploaded and read in several parts; nobody counts the bucket.
fn small_parts() -> Options {
    Options {
        parts: Parts {
            bytes: 1 << 20,
            at_once: 3,
        },
        uploads: Uploads {
            from_bytes: 6 << 20,
            part_bytes: 5 << 20,
            at_once: 2,
        },
        census: None,
        ..Options::default()
    }
}
