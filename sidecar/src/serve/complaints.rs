//! Logs errors of tiers once: a tier that fails in every operation gives one line, and its recovery another.

use kvcachepool_tiers::{Cause, Kind, TierError};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tracing::{info, warn};

/// After this long without a failure, the next failure is logged again.
const FORGET: Duration = Duration::from_secs(30);
/// Status shows an object that could not be used for this long: a day.
const OBJECTS_FOR: Duration = Duration::from_secs(24 * 3600);
/// Log interval of unusable objects, per tier and cause. Metrics count all.
const OBJECTS_EVERY: Duration = Duration::from_secs(10);

/// Objects of a tier that could not be used, for one cause.
#[derive(Debug)]
struct Objects {
    count: u64,
    /// Attempts since the last logged one.
    unlogged: u64,
    logged: Instant,
    last: Instant,
    /// Error of the last one.
    detail: String,
}

/// The last failure of each tier for each cause.
#[derive(Debug, Default)]
pub struct Complaints {
    tiers: Mutex<BTreeMap<(Kind, &'static str), Instant>>,
    objects: Mutex<BTreeMap<(Kind, &'static str), Objects>>,
}

impl Complaints {
    /// Records a failed operation or a tier that cannot be opened. Logs it if it is worth a line. True: it was logged.
    pub fn heard(&self, e: &TierError) -> bool {
        let (tier, reason) = (e.tier.name(), e.cause.name());
        match e.cause {
            Cause::Missing | Cause::Busy | Cause::BreakerOpen => false,
            cause if cause.of_the_tier() => {
                let last = self.tiers.lock().insert((e.tier, reason), Instant::now());
                let known = last.is_some_and(|at| at.elapsed() < FORGET);
                if !known {
                    warn!(tier, reason, error = %e, "tier failing; retrying");
                }
                !known
            }
            _ => self.object(e),
        }
    }

    fn object(&self, e: &TierError) -> bool {
        let (tier, reason, now) = (e.tier.name(), e.cause.name(), Instant::now());
        let mut all = self.objects.lock();
        let objects = all.entry((e.tier, reason)).or_insert_with(|| Objects {
            count: 0,
            unlogged: 0,
            logged: now,
            last: now,
            detail: String::new(),
        });
        objects.count += 1;
        objects.last = now;
        objects.detail.clone_from(&e.detail);
        if objects.count > 1 && now.duration_since(objects.logged) < OBJECTS_EVERY {
            objects.unlogged += 1;
            return false;
        }
        let suppressed = std::mem::take(&mut objects.unlogged);
        objects.logged = now;
        warn!(tier, reason, suppressed, error = %e, "unusable object in a tier");
        true
    }

    /// The tier's recently unusable objects, for status: one sentence per cause.
    pub fn of_objects(&self, tier: Kind) -> Vec<String> {
        let all = self.objects.lock();
        let of_tier = all
            .iter()
            .filter(|((kind, _), objects)| *kind == tier && objects.last.elapsed() < OBJECTS_FOR);
        let sentence = |((_, reason), objects): (&(Kind, &str), &Objects)| {
            let ago_s = objects.last.elapsed().as_secs();
            let (count, detail) = (objects.count, &objects.detail);
            format!("{reason}: {count} unusable objects, the last {ago_s} s ago: {detail}")
        };
        of_tier.map(sentence).collect()
    }

    /// Records that a tier is up again.
    pub fn up_again(&self, tier: Kind) {
        let mut all = self.tiers.lock();
        let failures = all.len();
        all.retain(|(kind, _), _| *kind != tier);
        if all.len() < failures {
            info!(tier = tier.name(), "tier up again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_that_fails_all_the_time_is_told_once_for_each_cause_until_it_is_back() {
        let complaints = Complaints::default();
        let failed = |kind, cause| complaints.heard(&TierError::new(kind, cause, "no"));
        assert!(failed(Kind::Disk, Cause::Io));
        assert!(!failed(Kind::Disk, Cause::Io));
        assert!(failed(Kind::S3, Cause::Io), "another tier");
        assert!(failed(Kind::Disk, Cause::Gone), "another cause");
        assert!(!failed(Kind::Disk, Cause::BreakerOpen));
        assert!(!failed(Kind::Disk, Cause::Gone));
        assert!(!failed(Kind::Disk, Cause::Io), "causes may take turns");
        complaints.up_again(Kind::Disk);
        assert!(failed(Kind::Disk, Cause::Gone));
        assert!(failed(Kind::Disk, Cause::Io));
        assert!(!failed(Kind::S3, Cause::Io), "the other one still fails");
        for cause in [Cause::Corrupt, Cause::Foreign] {
            assert!(failed(Kind::Disk, cause), "for each cause");
            assert!(!failed(Kind::Disk, cause), "not for each object");
        }
        assert!(failed(Kind::S3, Cause::Corrupt), "of each tier");
        let of_disk = ["Corrupt", "Foreign"]
            .map(|reason| format!("{reason}: 2 unusable objects, the last 0 s ago: no"));
        assert_eq!(complaints.of_objects(Kind::Disk), of_disk);
        assert_eq!(complaints.of_objects(Kind::Redis), [""; 0]);
    }
}
