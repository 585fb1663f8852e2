//! Queries the status of sidecars. Each round (a minute by default) covers some pods of every pool, and the rounds of pools are spread
//! over that time.

use super::backoff::jitter;
use super::caches::Caches;
use super::context::Context;
use crate::pods::{Pod, PoolRef, PoolUsage, fetch};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use kube::runtime::reflector::ObjectRef;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, MissedTickBehavior, interval};

/// Maximum requests in flight.
const CONCURRENCY: usize = 64;
/// Maximum requests in flight per pool, so that a pool that does not answer does not block others.
const CONCURRENCY_PER_POOL: usize = 8;
/// Maximum time between two rounds of a pool until every pod was queried once.
const FIRST_ROUNDS: Duration = Duration::from_secs(6);
/// Interval between checks for due pools.
const TICK: Duration = Duration::from_secs(1);

/// Samples all pools forever. Calls `sampled` with each pool whose round has ended.
pub async fn run(context: &Context, caches: &Caches, sampled: impl Fn(PoolRef)) {
    let permits = Semaphore::new(CONCURRENCY);
    let mut due: HashMap<PoolRef, Instant> = HashMap::new();
    let mut rounds = FuturesUnordered::new();
    let mut in_flight: HashSet<PoolRef> = HashSet::new();
    let length = Duration::try_from(context.status_interval).unwrap_or(Duration::MAX);
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(pool) = rounds.next() => {
                in_flight.remove(&pool);
                sampled(pool);
            }
            _ = tick.tick() => {
                let pools = caches.pods.pools();
                let pools = pools.into_iter().filter(|p| exists(caches, p)).collect();
                let known = |pool: &PoolRef| caches.usage.with(pool, |u| u.is_known());
                for pool in take_due(&pools, &mut due, &in_flight, known, length, Instant::now()) {
                    in_flight.insert(pool.clone());
                    rounds.push(round(context, caches, pool, &permits));
                }
            }
        }
    }
}

/// Returns the pools that are due, and schedules their next rounds. A new pool is due within a few seconds, and its rounds follow each
/// other within seconds until every pod was queried once. A pool whose round is in flight waits for its end.
fn take_due(
    pools: &HashSet<PoolRef>,
    due: &mut HashMap<PoolRef, Instant>,
    in_flight: &HashSet<PoolRef>,
    known: impl Fn(&PoolRef) -> bool,
    round: Duration,
    now: Instant,
) -> Vec<PoolRef> {
    due.retain(|pool, _| pools.contains(pool));
    let mut ready = Vec::new();
    for pool in pools {
        let at = due
            .entry(pool.clone())
            .or_insert_with(|| now + jitter(FIRST_ROUNDS));
        if *at <= now && !in_flight.contains(pool) {
            *at = match known(pool) {
                // From 54 to 66 seconds for a round of a minute.
                true => now + round * 42 / 60 + jitter(round * 24 / 60),
                false => now + jitter(FIRST_ROUNDS.min(round)),
            };
            ready.push(pool.clone());
        }
    }
    ready
}

/// Pods can name a pool that was deleted or never existed.
fn exists(caches: &Caches, pool: &PoolRef) -> bool {
    let reference = ObjectRef::new(&pool.name).within(&pool.namespace);
    caches.pools.get(&reference).is_some()
}

async fn round(context: &Context, caches: &Caches, pool: PoolRef, permits: &Semaphore) -> PoolRef {
    let pods = caches.pods.of(&pool);
    let chosen = caches.usage.with(&pool, |usage| usage.round(&pods));
    futures::stream::iter(&chosen)
        .for_each_concurrent(CONCURRENCY_PER_POOL, |pod| {
            query(context, caches, &pool, pod, permits)
        })
        .await;
    caches.usage.with(&pool, PoolUsage::round_ended);
    pool
}

async fn query(
    context: &Context,
    caches: &Caches,
    pool: &PoolRef,
    pod: &Arc<Pod>,
    permits: &Semaphore,
) {
    let Some(ip) = pod.address() else { return };
    let Ok(_permit) = permits.acquire().await else {
        return;
    };
    let response = fetch(ip).await;
    let result = if response.is_ok() {
        "answered"
    } else {
        "failed"
    };
    context.metrics.add("sidecar_questions_total", &[result], 1);
    caches
        .usage
        .with(pool, |usage| usage.take(pod, response, Timestamp::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    #[test]
    fn every_pool_is_due_once_a_minute_at_different_times() {
        let pools: HashSet<PoolRef> = (0..200)
            .map(|i| PoolRef::new("n", &i.to_string()))
            .collect();
        let mut due = HashMap::new();
        let start = Instant::now();
        let mut counts: HashMap<PoolRef, u32> = HashMap::new();
        let mut busiest = 0;
        for second in 0..600 {
            let now = start + Duration::from_secs(second);
            let ready = take_due(&pools, &mut due, &HashSet::new(), |_| true, MINUTE, now);
            busiest = busiest.max(ready.len());
            for pool in ready {
                *counts.entry(pool).or_default() += 1;
            }
        }
        assert_eq!(counts.len(), 200);
        assert!(counts.values().all(|n| (9..=11).contains(n)), "{counts:?}");
        assert!(busiest < 120, "{busiest}");
        let one = pools.into_iter().take(1).collect();
        take_due(&one, &mut due, &HashSet::new(), |_| true, MINUTE, start);
        assert_eq!(due.len(), 1, "pools without pods are forgotten");
    }

    #[test]
    fn a_pool_with_a_round_in_flight_waits_and_a_new_pool_is_queried_often() {
        let pools: HashSet<PoolRef> = [PoolRef::new("n", "a")].into();
        let start = Instant::now();
        let rounds = |in_flight: &HashSet<PoolRef>, known: bool| {
            let mut due = HashMap::new();
            let seconds = (0..60).map(|s| start + Duration::from_secs(s));
            seconds
                .filter(|now| {
                    !take_due(&pools, &mut due, in_flight, |_| known, MINUTE, *now).is_empty()
                })
                .count()
        };
        assert_eq!(rounds(&pools, true), 0);
        let count = rounds(&HashSet::new(), false);
        assert!((10..=20).contains(&count), "{count}");
        assert!(rounds(&HashSet::new(), true) <= 2);
    }
}
