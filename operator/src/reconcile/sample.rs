//! Requests the status of sidecars: of some pods of every pool in every round (a minute), each pool at its own second of it.

use super::backoff::spread;
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

/// Requests in flight, over all pools.
const AT_ONCE: usize = 64;
/// Requests in flight of one pool: a pool that does not answer must not hold the others up.
const AT_ONCE_OF_POOL: usize = 8;
/// Longest time between two rounds of a pool until every pod was asked once.
const FIRST_ROUNDS: Duration = Duration::from_secs(6);
/// Time between two checks which pools are due.
const TICK: Duration = Duration::from_secs(1);

/// Samples all pools without end. Calls `sampled` with each pool whose round is over.
pub async fn run(context: &Context, caches: &Caches, sampled: impl Fn(PoolRef)) {
    let places = Semaphore::new(AT_ONCE);
    let mut due: HashMap<PoolRef, Instant> = HashMap::new();
    let mut rounds = FuturesUnordered::new();
    let mut under_way: HashSet<PoolRef> = HashSet::new();
    let length = Duration::try_from(context.status_interval).unwrap_or(Duration::MAX);
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            Some(pool) = rounds.next() => {
                under_way.remove(&pool);
                sampled(pool);
            }
            _ = tick.tick() => {
                let pools = caches.pods.pools();
                let pools = pools.into_iter().filter(|p| exists(caches, p)).collect();
                let known = |pool: &PoolRef| caches.usage.with(pool, |u| u.is_known());
                for pool in next(&pools, &mut due, &under_way, known, length, Instant::now()) {
                    under_way.insert(pool.clone());
                    rounds.push(round(context, caches, pool, &places));
                }
            }
        }
    }
}

/// The pools that are due; sets the next time of each. A new pool is due within a few seconds, and its rounds follow each other within
/// seconds until every pod was asked once. A pool whose round is under way waits for its end.
fn next(
    pools: &HashSet<PoolRef>,
    due: &mut HashMap<PoolRef, Instant>,
    under_way: &HashSet<PoolRef>,
    known: impl Fn(&PoolRef) -> bool,
    round: Duration,
    now: Instant,
) -> Vec<PoolRef> {
    due.retain(|pool, _| pools.contains(pool));
    let mut ready = Vec::new();
    for pool in pools {
        let at = due
            .entry(pool.clone())
            .or_insert_with(|| now + spread(FIRST_ROUNDS));
        if *at <= now && !under_way.contains(pool) {
            *at = match known(pool) {
                // Of a minute: from 54 to 66 seconds.
                true => now + round * 42 / 60 + spread(round * 24 / 60),
                false => now + spread(FIRST_ROUNDS.min(round)),
            };
            ready.push(pool.clone());
        }
    }
    ready
}

/// Pods can name a pool that is gone, or never was.
fn exists(caches: &Caches, pool: &PoolRef) -> bool {
    let reference = ObjectRef::new(&pool.name).within(&pool.namespace);
    caches.pools.get(&reference).is_some()
}

async fn round(context: &Context, caches: &Caches, pool: PoolRef, places: &Semaphore) -> PoolRef {
    let pods = caches.pods.of(&pool);
    let chosen = caches.usage.with(&pool, |usage| usage.round(&pods));
    futures::stream::iter(&chosen)
        .for_each_concurrent(AT_ONCE_OF_POOL, |pod| {
            ask(context, caches, &pool, pod, places)
        })
        .await;
    caches.usage.with(&pool, PoolUsage::round_ended);
    pool
}

async fn ask(
    context: &Context,
    caches: &Caches,
    pool: &PoolRef,
    pod: &Arc<Pod>,
    places: &Semaphore,
) {
    let Some(ip) = pod.address() else { return };
    let Ok(_place) = places.acquire().await else {
        return;
    };
    let answer = fetch(ip).await;
    let result = if answer.is_ok() { "answered" } else { "failed" };
    context.metrics.add("sidecar_questions_total", &[result], 1);
    caches
        .usage
        .with(pool, |usage| usage.take(pod, answer, Timestamp::now()));
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

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
            let now = start + Duration::from_secs(second);
            let ready = next(&pools, &mut due, &HashSet::new(), |_| true, MINUTE, now);
            busiest = busiest.max(ready.len());
            for pool in ready {
                *counts.entry(pool).or_default() += 1;
            }
        }
        assert_eq!(counts.len(), 200);
        assert!(counts.values().all(|n| (9..=11).contains(n)), "{counts:?}");
        assert!(busiest < 120, "{busiest}");
        let one = pools.into_iter().take(1).collect();
        next(&one, &mut due, &HashSet::new(), |_| true, MINUTE, start);
        assert_eq!(due.len(), 1, "pools without pods are forgotten");
    }

    #[test]
    fn a_pool_whose_round_is_under_way_waits_and_a_new_one_is_asked_often() {
        let pools: HashSet<PoolRef> = [PoolRef::new("n", "a")].into();
        let start = Instant::now();
        let rounds = |under_way: &HashSet<PoolRef>, known: bool| {
            let mut due = HashMap::new();
            let seconds = (0..60).map(|s| start + Duration::from_secs(s));
            seconds
                .filter(|now| {
                    !next(&pools, &mut due, under_way, |_| known, MINUTE, *now).is_empty()
                })
                .count()
        };
        assert_eq!(rounds(&pools, true), 0);
        let often = rounds(&HashSet::new(), false);
        assert!((10..=20).contains(&often), "{often}");
        assert!(rounds(&HashSet::new(), true) <= 2);
    }
}
