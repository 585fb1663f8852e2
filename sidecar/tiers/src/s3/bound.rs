//! Limits concurrent requests of all kinds. No task waits for a second permit while it holds one: each keeps its permit until its response
//! was read or dropped.

use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The limit. Transfers leave room for other requests, and writes for reads, so that many stores cannot delay a lookup.
#[derive(Debug, Clone)]
pub struct Bound {
    all: Arc<Semaphore>,
    transfers: Arc<Semaphore>,
    writes: Arc<Semaphore>,
}

/// The right to run a request.
#[derive(Debug)]
pub struct Permit {
    _held: [Option<OwnedSemaphorePermit>; 3],
}

impl Bound {
    /// At most `requests` at once; at most three quarters of them transfer objects, and half of them write.
    pub fn new(requests: usize) -> Self {
        let of = |places: usize| Arc::new(Semaphore::new(places.clamp(1, Semaphore::MAX_PERMITS)));
        Self {
            all: of(requests),
            transfers: of(requests / 4 * 3 + requests % 4),
            writes: of(requests.div_ceil(2)),
        }
    }

    /// For a request without bytes of objects.
    pub async fn question(&self) -> Permit {
        Permit {
            _held: [None, None, place(&self.all).await],
        }
    }

    /// For a request that receives bytes of objects.
    pub async fn read(&self) -> Permit {
        let transfer = place(&self.transfers).await;
        Permit {
            _held: [None, transfer, place(&self.all).await],
        }
    }

    /// For a request that sends bytes of objects.
    pub async fn write(&self) -> Permit {
        // All acquire the semaphores in this order, so there is no deadlock.
        let write = place(&self.writes).await;
        let transfer = place(&self.transfers).await;
        Permit {
            _held: [write, transfer, place(&self.all).await],
        }
    }
}

/// Never `None`: the semaphores are never closed.
async fn place(places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
    places.clone().acquire_owned().await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[test]
    fn no_more_run_than_the_bound_and_bytes_leave_room_for_questions() {
        let bound = Bound::new(8);
        let writes: Vec<_> = std::iter::from_fn(|| bound.write().now_or_never()).collect();
        assert_eq!(writes.len(), 4);
        let reads: Vec<_> = std::iter::from_fn(|| bound.read().now_or_never()).collect();
        assert_eq!(reads.len(), 2);
        let questions: Vec<_> = std::iter::from_fn(|| bound.question().now_or_never()).collect();
        assert_eq!(questions.len(), 2);
        drop(writes);
        assert!(bound.question().now_or_never().is_some());
    }

    #[test]
    fn a_bound_of_one_lets_one_of_each_kind_run_alone() {
        let bound = Bound::new(1);
        for _ in 0..2 {
            assert!(bound.write().now_or_never().is_some());
            assert!(bound.read().now_or_never().is_some());
            assert!(bound.question().now_or_never().is_some());
        }
        let _one = bound.question().now_or_never();
        assert!(bound.write().now_or_never().is_none());
    }
}
