//! Clearing a bucket that is far away: what it is asked, and that it ends.

use super::bucket::names;
use crate::clear;
use crate::layers::{Options as LayerOptions, layered};
use crate::testing::faulty::{Faulty, Reply};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::time::Duration;

/// A page of a listing.
const OBJECTS: u64 = 1_000;
/// A server on another continent.
const ROUND_TRIP: Duration = Duration::from_millis(70);

/// A bucket of so many objects, which answers late. `batches`: it knows how to remove many objects at once.
async fn far_away(batches: bool) -> Faulty {
    let keys: BTreeSet<String> = names(OBJECTS).iter().map(|name| name.s3("")).collect();
    let keys = Mutex::new(keys);
    Faulty::start(move |asked| {
        let mut keys = keys.lock();
        let reply = match asked.method.as_str() {
            "GET" => {
                let item = |key| format!("<Contents><Key>{key}</Key><Size>1000</Size></Contents>");
                let items: String = keys.iter().map(item).collect();
                let body = format!("<ListBucketResult>{items}</ListBucketResult>");
                Reply::Full(200, vec![], body.into())
            }
            "POST" if batches => {
                let text = String::from_utf8(asked.body.clone()).unwrap();
                keys.retain(|key| !text.contains(key.as_str()));
                Reply::Full(200, vec![], b"<DeleteResult/>".to_vec())
            }
            "DELETE" => {
                keys.retain(|key| !asked.target.contains(key.as_str()));
                Reply::status(204)
            }
            "HEAD" => {
                let bytes = ("content-length", "1000".to_string());
                Reply::Full(200, vec![bytes], vec![])
            }
            _ => Reply::error(501, "NotImplemented"),
        };
        Reply::Later(ROUND_TRIP, Box::new(reply))
    })
    .await
}

#[tokio::test]
async fn a_bucket_far_away_is_cleared_within_the_deadlines_of_its_requests() {
    for batches in [true, false] {
        let server = far_away(batches).await;
        let tier = server.tier().await;
        let layered = layered(tier, &LayerOptions::default());
        let removed = clear(layered.tier.as_ref(), None).await;
        assert_eq!(removed, Ok(OBJECTS), "{batches}");
        assert_eq!(layered.guarded.retried(), 0, "{batches}");
        assert_eq!(
            server.count("HEAD"),
            0,
            "the listing has said what is there"
        );
    }
}
