//! Asks sidecars for their status, some of every pool in every minute, each pool at its own second of it.

use super::backoff::spread;
use super::term::Term;
use crate::pods::{Pod, PoolRef, PoolUsage, ROUND, fetch};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

/// Questions at once, over all pools.
const AT_ONCE: usize = 64;
/// Between two looks at who is due.
const TICK: Duration = Duration::from_secs(1);

/// Goes round without end; `asked` hears of every pool whose round is over.
pub async fn run(term: Arc<Term>, asked: impl Fn(PoolRef)) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    let mut due: HashMap<PoolRef, Instant> = HashMap::new();
    let mut rounds = FuturesUnordered::new();
    loop {
        tokio::select! {
            Some(pool) = rounds.next() => asked(pool),
            () = sleep(TICK) => {
                let pools = term.pods.pools().into_iter().filter(|p| exists(&term, p)).collect();
                for pool in next(&pools, &mut due, Instant::now()) {
                    rounds.push(round(term.clone(), pool, places.clone()));
                }
            }
        }
    }
}

/// Pools whose time has come, each with its next time set. A pool that was not there before waits up to a few seconds only: its
/// first numbers are looked for.
fn next(
    pools: &HashSet<PoolRef>,
    due: &mut HashMap<PoolRef, Instant>,
    now: Instant,
) -> Vec<PoolRef> {
    due.retain(|pool, _| pools.contains(pool));
    let mut ready = Vec::new();
    for pool in pools {
        let at = due
            .entry(pool.clone())
            .or_insert_with(|| now + spread(Duration::from_secs(6)));
        if *at <= now {
            let round = Duration::from_secs(ROUND.as_secs().unsigned_abs());
            // From 54 to 66 seconds.
            *at = now + round * 42 / 60 + spread(round * 24 / 60);
            ready.push(pool.clone());
        }
    }
    ready
}

/// Pods can name a pool that is gone, or never was.
fn exists(term: &Term, pool: &PoolRef) -> bool {
    let reference = ObjectRef::new(&pool.name).within(&pool.namespace);
    term.pools.get(&reference).is_some()
}

async fn round(term: Arc<Term>, pool: PoolRef, places: Arc<Semaphore>) -> PoolRef {
    let pods = term.pods.of(&pool);
    let chosen = term.usage.with(&pool, |usage| usage.round(&pods));
    let questions = chosen.iter().map(|pod| ask(&term, &pool, pod, &places));
    futures::future::join_all(questions).await;
    term.usage.with(&pool, PoolUsage::round_ended);
    pool
}

async fn ask(term: &Term, pool: &PoolRef, pod: &Arc<Pod>, places: &Semaphore) {
    let Some(ip) = pod.address() else { return };
    let Ok(_place) = places.acquire().await else {
        return;
    };
    let answer = fetch(ip).await;
    let result = if answer.is_ok() { "answered" } else { "failed" };
    term.metrics.add("sidecar_questions_total", &[result], 1);
    term.usage
        .with(pool, |usage| usage.take(pod, answer, Timestamp::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pool_is_due_once_a_minute_and_not_all_at_once() {
        let pools: HashSet<PoolRef> = (0..200)
            .map(|i| PoolRef::new("n", &i.to_string()))
            .collect();
        let mut due = HashMap::new();
        let start = Instant::now();
        let mut counts: HashMap<PoolRef, u32> = HashMap::new();
        let mut busiest = 0;
        for second in 0..600 {
            let ready = next(&pools, &mut due, start + Duration::from_secs(second));
            busiest = busiest.max(ready.len());
            for pool in ready {
                *counts.entry(pool).or_default() += 1;
            }
        }
        assert_eq!(counts.len(), 200);
        assert!(counts.values().all(|n| (9..=11).contains(n)), "{counts:?}");
        assert!(busiest < 120, "{busiest}");
        next(&pools.into_iter().take(1).collect(), &mut due, start);
        assert_eq!(due.len(), 1, "pools without pods are forgotten");
    }
}
