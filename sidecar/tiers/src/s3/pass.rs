//! One complete listing of the bucket, and the removal of objects that must go. A page that fails is requested again, and objects that
//! cannot be removed do not block others.

use super::census::{Ages, Sum};
use super::listing::PAGE_MAX;
use super::{Live, sizes};
use crate::{Listed, Operation, Page, Source, Status, Swept, TierError, directory, sweep};
use kvcachepool_protocol::object::ObjectName;
use std::collections::HashSet;
use std::time::Duration;
use tokio::time::timeout;
use tracing::{info, warn};

/// Attempts of a request with transient failures, and the pause before the second one; it doubles.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// Most rounds in which the oldest objects are selected again because some of them cannot be removed.
const ROUNDS: usize = 4;

impl Live {
    /// Counts the objects and removes those that must go.
    pub(super) async fn pass(&self) -> Result<(), TierError> {
        let (mut kept, mut went, mut why) = (HashSet::new(), Sum::default(), None);
        for _ in 0..ROUNDS {
            let (bytes, ages) = self.count_without(&kept).await?;
            // By the server's clock, or by its newest object: this node's clock may be wrong.
            let now = self.requests.clock.unix_s().or(ages.youngest_s());
            let expired = self.census.expired_s(now.unwrap_or_default());
            let Some(mut cut) = ages.cut(self.census.excess(bytes), expired) else {
                break;
            };
            let swept = sweep(self, |listed| {
                let spared = self.census.is_held(&listed.name) || kept.contains(&listed.name);
                !spared && cut.takes(listed)
            });
            let swept = swept.await?;
            went.objects += swept.objects;
            went.bytes += swept.bytes;
            if swept.kept.is_empty() {
                break;
            }
            // Others are selected in their place.
            kept.extend(swept.kept);
            why = swept.why;
        }
        self.census.could_not_remove(kept.len());
        let Sum { objects, bytes } = went;
        if objects > 0 {
            info!(tier = "s3", objects, bytes, "evicted the oldest objects");
        }
        match why {
            None => Ok(()),
            Some(why) if objects == 0 => Err(why),
            Some(why) => {
                let (reason, objects) = (why.cause.name(), kept.len());
                warn!(tier = "s3", reason, objects, error = %why, "cannot remove some objects; evicting others instead");
                Ok(())
            }
        }
    }

    /// Counts the objects by a complete listing.
    pub(super) async fn count(&self) -> Result<(), TierError> {
        self.count_without(&HashSet::new()).await.map(drop)
    }

    /// Counts the objects; returns their bytes, and the ages of all except `kept`.
    async fn count_without(&self, kept: &HashSet<ObjectName>) -> Result<(u64, Ages), TierError> {
        let (mut sum, mut ages) = (Sum::default(), Ages::default());
        let looked = sweep(self, |listed| {
            sum.add(listed);
            if !kept.contains(&listed.name) {
                ages.add(listed);
            }
            false
        });
        looked.await?;
        self.census.was_listed(sum);
        Ok((sum.bytes, ages))
    }

    /// Removes the markers of removed objects. After a failure each wrong marker costs one miss.
    async fn unmark(&self, gone: &[ObjectName]) {
        if let Some(marks) = self.marks.as_ref().filter(|_| !gone.is_empty()) {
            let _ = timeout(directory::CHANGE, marks.unmark(gone)).await;
        }
    }
}

impl Source for Live {
    fn page<'a>(&'a self, from: Option<&'a str>) -> Operation<'a, Page> {
        Box::pin(again(move || self.requests.list(from, PAGE_MAX)))
    }

    fn remove_chosen<'a>(&'a self, chosen: &'a [Listed]) -> Operation<'a, Swept> {
        Box::pin(async move {
            let there = sizes(chosen);
            let swept = again(|| self.delete(&there)).await?;
            let gone = there.into_iter().map(|(name, _)| name);
            let gone: Vec<_> = gone.filter(|name| !swept.kept.contains(name)).collect();
            self.unmark(&gone).await;
            Ok(swept)
        })
    }
}

/// Retries a request with transient failures.
async fn again<T, F: Future<Output = Result<T, TierError>>>(
    send: impl Fn() -> F,
) -> Result<T, TierError> {
    let mut pause = PAUSE;
    for _ in 1..TRIES {
        match send().await {
            Err(e) if e.cause.status() == Status::Temporary => {}
            ended => return ended,
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    send().await
}
