//! The bucket as its census sees it: pages and removals that are retried, and the turn to list.

use super::listing::PAGE_MAX;
use super::{Live, sizes};
use crate::census::{Census, Shared, Sum, Turn};
use crate::{Listed, Operation, Page, Source, Status, Swept, TierError, directory};
use kvcachepool_protocol::object::ObjectName;
use std::time::Duration;
use tokio::time::timeout;

/// Attempts of a request with transient failures, and the pause before the second one; it doubles.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

impl Live {
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

impl Shared for Live {
    fn census(&self) -> &Census {
        &self.census
    }

    fn unix_s(&self) -> Option<u64> {
        self.requests.clock.unix_s()
    }

    fn turn(&self, young: Duration) -> Operation<'_, Turn> {
        Box::pin(self.requests.turn(young))
    }

    fn counted_lately(&self, young: Duration) -> Operation<'_, Option<Turn>> {
        Box::pin(self.requests.counted_lately(young))
    }

    fn publish(&self, sum: Sum) -> Operation<'_, ()> {
        Box::pin(self.requests.counted(sum))
    }

    fn tidy(&self, age: Duration) -> Operation<'_, u64> {
        Box::pin(self.requests.sweep(age))
    }
}
