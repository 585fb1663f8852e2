//! Changes of a pool within a moment of the first one are one item of the queue. The moment begins with the first change, not anew with
//! each: a pool whose pods change without end is reconciled all the same.

use futures::stream::unfold;
use futures::{Stream, StreamExt};
use std::collections::{HashSet, VecDeque};
use std::hash::Hash;
use std::pin::Pin;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// Yields the items of `changes` a moment later, and each once, however often it came within the moment.
pub fn gathered<T: Clone + Eq + Hash, S: Stream<Item = T>>(
    changes: S,
    moment: Duration,
) -> impl Stream<Item = T> {
    let gather = Gather {
        changes: Box::pin(changes),
        moment,
        waiting: VecDeque::new(),
        known: HashSet::new(),
    };
    unfold(gather, |mut gather| async move {
        let change = gather.next().await?;
        Some((change, gather))
    })
}

struct Gather<T, S> {
    changes: Pin<Box<S>>,
    moment: Duration,
    /// In the order in which they are due, each once.
    waiting: VecDeque<(Instant, T)>,
    known: HashSet<T>,
}

impl<T: Clone + Eq + Hash, S: Stream<Item = T>> Gather<T, S> {
    async fn next(&mut self) -> Option<T> {
        loop {
            let due = self.waiting.front().map(|(at, _)| *at);
            if due.is_some_and(|at| at <= Instant::now()) {
                let (_, change) = self.waiting.pop_front()?;
                self.known.remove(&change);
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
                    Some(change) if self.known.insert(change.clone()) => {
                        self.waiting.push_back((Instant::now() + self.moment, change));
                    }
                    Some(_) => {}
                    // The queue ends with its triggers.
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

    const MOMENT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn what_comes_together_comes_once_in_its_order() {
        let changes = iter(["a", "b", "a", "a"]).chain(pending());
        let mut gathered = Box::pin(gathered(changes, MOMENT));
        assert_eq!(gathered.next().await, Some("a"));
        assert_eq!(gathered.next().await, Some("b"));
        assert!(timeout(10 * MOMENT, gathered.next()).await.is_err());
    }

    #[tokio::test]
    async fn a_pool_that_changes_without_end_is_looked_at_again_and_again() {
        let changes = unfold((), async |()| {
            sleep(MOMENT / 50).await;
            Some(("a", ()))
        });
        let mut gathered = Box::pin(gathered(changes, MOMENT));
        for _ in 0..3 {
            let began = Instant::now();
            assert_eq!(timeout(LONG, gathered.next()).await, Ok(Some("a")));
            assert!(began.elapsed() >= MOMENT);
        }
    }
}
