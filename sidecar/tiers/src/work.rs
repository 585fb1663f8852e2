//! CPU-bound work: digests of many bytes, packing. It runs on its own threads, so that sockets are not delayed, and at most one job per
//! core runs at once: more threads finish nothing sooner, and each takes memory.

use std::sync::LazyLock;
use std::thread::available_parallelism;
use tokio::sync::Semaphore;
use tokio::task::JoinError;

static TURNS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(available_parallelism().map_or(1, |n| n.get())));

/// Runs a job when its turn comes. An error: it panicked, or the process ends.
pub async fn apart<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    // Never closed. When the caller stops waiting, the job runs on and keeps its turn.
    let turn = TURNS.acquire().await;
    tokio::task::spawn_blocking(move || {
        let _turn = turn;
        work()
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::mpsc::channel;
    use tokio::task::JoinSet;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_more_runs_at_once_than_there_are_processors_and_all_of_it_ends() {
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut all = JoinSet::new();
        for _ in 0..200 {
            let (running, most) = (running.clone(), most.clone());
            all.spawn(apart(move || {
                most.fetch_max(running.fetch_add(1, Relaxed) + 1, Relaxed);
                std::thread::yield_now();
                running.fetch_sub(1, Relaxed);
            }));
        }
        assert!(all.join_all().await.iter().all(Result::is_ok));
        let processors = available_parallelism().unwrap().get();
        assert!((1..=processors).contains(&most.load(Relaxed)));
    }

    #[tokio::test]
    async fn what_nobody_waits_for_any_more_ends_and_gives_its_turn_back() {
        for _ in 0..2 * available_parallelism().unwrap().get() {
            let (begun, begins) = tokio::sync::oneshot::channel();
            let (end, ends) = channel::<()>();
            let waits = tokio::spawn(apart(move || {
                begun.send(()).unwrap();
                let _ = ends.recv();
            }));
            begins.await.unwrap();
            waits.abort();
            drop(end);
        }
        assert_eq!(apart(|| 7).await.unwrap(), 7);
    }
}
