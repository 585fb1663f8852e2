//! One listing of the bucket from begin to end, and the removal of what has to go. A page that fails is asked for again, and what cannot be
//! removed holds up nothing else.

use super::Live;
use super::census::{Ages, Cut, Sum};
use super::listing::PAGE_MAX;
use crate::tiers::{Page, Status, TierError, directory};
use kvcachepool_protocol::object::ObjectName;
use std::collections::HashSet;
use std::time::Duration;
use tokio::time::timeout;
use tracing::{info, warn};

/// How often a request is sent that fails for a moment, and the pause before the second time; it doubles.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// How often the oldest objects are chosen anew because some of them cannot be removed.
const ROUNDS: usize = 4;

/// What was removed, and what was not.
#[derive(Debug, Default)]
struct Removed {
    went: Sum,
    kept: Vec<ObjectName>,
    why: Option<TierError>,
}

impl Live {
    /// Counts what is there and removes what must go.
    pub(super) async fn pass(&self) -> Result<(), TierError> {
        let (mut kept, mut went, mut why) = (HashSet::new(), Sum::default(), None);
        for _ in 0..ROUNDS {
            let (bytes, ages) = self.count_without(&kept).await?;
            // By the server's clock, or by what it wrote last: that of this node may be wrong.
            let now = self.requests.clock.unix_s().or(ages.youngest_s());
            let expired = self.census.expired_s(now.unwrap_or_default());
            let Some(cut) = ages.cut(self.census.excess(bytes), expired) else {
                break;
            };
            let removed = self.evict(cut, &kept).await?;
            went.objects += removed.went.objects;
            went.bytes += removed.went.bytes;
            if removed.kept.is_empty() {
                break;
            }
            // Others go instead of them.
            kept.extend(removed.kept);
            why = removed.why;
        }
        self.census.could_not_remove(kept.len());
        let Sum { objects, bytes } = went;
        if objects > 0 {
            info!(
                tier = "s3",
                objects, bytes, "the oldest objects are removed"
            );
        }
        match why {
            None => Ok(()),
            Some(why) if objects == 0 => Err(why),
            Some(why) => {
                let (reason, objects) = (why.cause.name(), kept.len());
                warn!(tier = "s3", reason, objects, error = %why, "objects cannot be removed; others went");
                Ok(())
            }
        }
    }

    /// Counts what is there, from begin to end.
    pub(super) async fn count(&self) -> Result<(), TierError> {
        self.count_without(&HashSet::new()).await.map(drop)
    }

    /// Counts what is there; returns its bytes, and the ages of all but those that cannot be removed.
    async fn count_without(&self, kept: &HashSet<ObjectName>) -> Result<(u64, Ages), TierError> {
        let (mut sum, mut ages, mut from) = (Sum::default(), Ages::default(), None);
        loop {
            let page = self.page(from.as_deref()).await?;
            for listed in &page.objects {
                sum.add(listed);
                if !kept.contains(&listed.name) {
                    ages.add(listed);
                }
            }
            from = page.next;
            if from.is_none() {
                self.census.was_listed(sum);
                return Ok((sum.bytes, ages));
            }
        }
    }

    async fn evict(&self, mut cut: Cut, kept: &HashSet<ObjectName>) -> Result<Removed, TierError> {
        let mut removed = Removed::default();
        let mut from = None;
        loop {
            let mut page = self.page(from.as_deref()).await?;
            page.objects.retain(|listed| {
                let spared = self.census.is_held(&listed.name) || kept.contains(&listed.name);
                !spared && cut.takes(listed)
            });
            let key = |name: &ObjectName| self.requests.key(name);
            let keys: Vec<String> = page.objects.iter().map(|l| key(&l.name)).collect();
            for listed in &page.objects {
                self.known.forget(&listed.name);
            }
            let refused = again(|| self.requests.delete_some(&keys)).await?;
            let stay: HashSet<&str> = refused.iter().map(|(key, _)| key.as_str()).collect();
            let mut gone = Vec::new();
            for listed in &page.objects {
                if stay.contains(key(&listed.name).as_str()) {
                    removed.kept.push(listed.name.clone());
                    continue;
                }
                gone.push(listed.name.clone());
                // Once more: somebody may have looked meanwhile.
                self.known.forget(&listed.name);
                self.census.went(listed.bytes);
                removed.went.add(listed);
            }
            self.unmark(&gone).await;
            let why = refused.into_iter().next().map(|(_, why)| why);
            removed.why = removed.why.or(why);
            from = page.next;
            if from.is_none() {
                return Ok(removed);
            }
        }
    }

    /// Takes the marks away of what is gone. Where that fails, each is believed once.
    async fn unmark(&self, gone: &[ObjectName]) {
        if let Some(marks) = self.marks.as_ref().filter(|_| !gone.is_empty()) {
            let _ = timeout(directory::CHANGE, marks.unmark(gone)).await;
        }
    }

    async fn page(&self, from: Option<&str>) -> Result<Page, TierError> {
        again(|| self.requests.list(from, PAGE_MAX)).await
    }
}

/// Sends what may succeed in a moment several times.
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
