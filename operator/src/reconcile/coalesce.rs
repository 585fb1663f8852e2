//! Coalesces changes of a pool within a short time after the first one into one item of the queue. Later changes do not restart the time,
//! so a pool whose pods change continuously is still reconciled.

use futures::stream::unfold;
use futures::{Stream, StreamExt};
use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Yields the items of `changes` after `delay`, each once, however often it occurs within that time.
pub fn coalesced<T: Clone + Eq + Hash, S: Stream<Item = T>>(
    changes: S,
    delay: Duration,
) -> impl Stream<Item = T> {
    let coalesce = Coalesce {
        changes: Box::pin(changes),
        delay,
        waiting: VecDeque::new(),
        queued: HashSet::new(),
    };
    unfold(coalesce, |mut coalesce| async move {
        let change = coalesce.next().await?;
        Some((change, coalesce))
    })
}

struct Coalesce<T, S> {
    changes: Pin<Box<S>>,
    delay: Duration,
    /// In the order in which they are due, each once.
    waiting: VecDeque<(Instant, T)>,
    queued: HashSet<T>,
}

impl<T: Clone + Eq + Hash, S: Stream<Item = T>> Coalesce<T, S> {
    async fn next(&mut self) -> Option<T> {
        loop {
            let due = self.waiting.front().map(|(at, _)| *at);
            if due.is_some_and(|at| at <= Instant::now()) {
                let (_, change) = self.waiting.pop_front()?;
                self.queued.remove(&change);
                return Some(change);
            }
            let wait = async {
                match due {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                change = self.changes.next() => match change {
                    Some(change) if self.queued.insert(change.clone()) => {
                        self.waiting.push_back((Instant::now() + self.delay, change));
                    }
                    Some(_) => {}
                    // The queue ends when its sources end.
                    None => return None,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream::{iter, pending};
    use tokio::time::{sleep, timeout};

    const DELAY: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn concurrent_changes_are_yielded_once_in_order() {
        let changes = iter(["a", "b", "a", "a"]).chain(pending());
        let mut coalesced = Box::pin(coalesced(changes, DELAY));
        assert_eq!(coalesced.next().await, Some("a"));
        assert_eq!(coalesced.next().await, Some("b"));
        assert!(timeout(10 * DELAY, coalesced.next()).await.is_err());
    }

    #[tokio::test]
    async fn a_pool_that_changes_continuously_is_yielded_repeatedly() {
        let changes = unfold((), async |()| {
            sleep(DELAY / 50).await;
            Some(("a", ()))
        });
        let mut coalesced = Box::pin(coalesced(changes, DELAY));
        for _ in 0..3 {
            let started = Instant::now();
            assert_eq!(timeout(LONG, coalesced.next()).await, Ok(Some("a")));
            assert!(started.elapsed() >= DELAY);
        }
    }
}
