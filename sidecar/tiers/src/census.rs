//! The content of a place that many sidecars share, a bucket or a folder, and its eviction. Puts and removals of this process are counted
//! as they happen. Those of others are found by occasional listings in the background, by one sidecar for all. Above the capacity the oldest
//! objects are removed, except those that a get of this process reads.

mod marker;
mod pass;

pub use marker::{Marker, TEXT_BYTES, read_text, text};

use crate::{Kind, Listed, Operation, Page, Source, TierError, Usage, Writes};
use kvcachepool_protocol::object::ObjectName;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, info, warn};

/// After a look that made no room, this process waits for so many times its duration, but no longer than between two regular ones.
const STUCK_PAUSES: u32 = 10;
/// Ages that are distinguished; with more objects, neighbouring ages are merged.
const AGES_MAX: usize = 16_384;

/// Intervals of the background work.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Interval of the listing if objects may have to be removed.
    pub bounded_every: Duration,
    /// Interval of the listing if objects are only counted.
    pub every: Duration,
    /// A sidecar that may not write, and so cannot share its count, lists only if no other did for this long.
    pub alone_every: Duration,
    /// Minimum pause between two listings.
    pub pause: Duration,
    /// Unfinished writes that began longer ago are removed.
    pub tidy_age: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            bounded_every: Duration::from_secs(600),
            every: Duration::from_secs(3_600),
            alone_every: Duration::from_secs(24 * 3_600),
            pause: Duration::from_secs(30),
            tidy_age: Duration::from_secs(24 * 3_600),
        }
    }
}

/// Objects and their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sum {
    pub objects: u64,
    pub bytes: u64,
}

/// When objects are removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Bounds {
    /// Bytes of all objects; 0: no limit.
    pub capacity_bytes: u64,
    /// Percent of the capacity at which removal begins, and at which it ends.
    pub evict_at_percent: u32,
    pub evict_to_percent: u32,
    /// Age at which objects are removed; zero disables expiry.
    pub expire_after: Duration,
}

/// Whose turn it is to list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// This process lists, and publishes its count.
    Mine,
    /// Another sidecar counted recently.
    Counted(Sum),
    /// Another sidecar is counting for the first time.
    Counting,
}

/// A place with a census. Its [`Source`] lists it and removes from it.
pub trait Shared: Source + Send + 'static {
    fn census(&self) -> &Census;

    /// Time of the clock that dates the objects, Unix seconds; `None`: unknown.
    fn unix_s(&self) -> Option<u64>;

    /// Takes the turn to list, unless another sidecar finished or began a count within `young`.
    fn turn(&self, young: Duration) -> Operation<'_, Turn>;

    /// The count that another sidecar finished or began within `young`. Takes no turn: for sidecars that may not write.
    fn counted_lately(&self, young: Duration) -> Operation<'_, Option<Turn>>;

    /// Publishes the count of a turn.
    fn publish(&self, sum: Sum) -> Operation<'_, ()>;

    /// Removes writes that began at least this long ago and never ended. Returns their number.
    fn tidy(&self, age: Duration) -> Operation<'_, u64>;

    /// Counts the objects by a complete listing.
    fn count(&self) -> impl Future<Output = Result<(), TierError>> + Send {
        pass::count(self)
    }

    /// Counts the objects and removes those that must go.
    fn pass(&self) -> impl Future<Output = Result<(), TierError>> + Send {
        pass::pass(self)
    }

    /// Lists the place and removes what must go, unless another sidecar did recently. False: another one is counting for the first time.
    fn look(
        &self,
        young: Duration,
        tidy_age: Duration,
    ) -> impl Future<Output = Result<bool, TierError>> + Send {
        look(self, young, tidy_age)
    }
}

/// What is known of the whole place.
#[derive(Debug)]
pub struct Census {
    kind: Kind,
    writes: Writes,
    capacity_bytes: u64,
    evict_at_bytes: u64,
    evict_to_bytes: u64,
    expire_after: Option<Duration>,
    /// The sum is based on a complete listing.
    whole: bool,
    sum: Mutex<Sum>,
    /// Time of this process's last listing.
    listed: Mutex<Option<Instant>>,
    held: Arc<Mutex<HashMap<ObjectName, usize>>>,
    over: Notify,
    /// Objects that had to be removed and could not be; each attempt counts.
    refused: AtomicU64,
    /// Bytes that this process has removed to make room.
    freed_bytes: AtomicU64,
}

/// Counts gets that read an object.
#[derive(Debug)]
pub struct Held {
    name: ObjectName,
    held: Arc<Mutex<HashMap<ObjectName, usize>>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = self.held.lock();
        if let Some(count) = held.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                held.remove(&self.name);
            }
        }
    }
}

impl Census {
    /// For a place whose listing begins with this page. `writes` says whether this process may change it.
    pub fn new(kind: Kind, writes: Writes, bounds: Bounds, first: &Page) -> Self {
        let capacity_bytes = bounds.capacity_bytes;
        let percent = |n: u32| (u128::from(capacity_bytes) * u128::from(n) / 100) as u64;
        let mut sum = Sum::default();
        for listed in &first.objects {
            sum.add(listed);
        }
        Self {
            kind,
            writes,
            capacity_bytes,
            evict_at_bytes: percent(bounds.evict_at_percent),
            evict_to_bytes: percent(bounds.evict_to_percent),
            expire_after: (!bounds.expire_after.is_zero()).then_some(bounds.expire_after),
            whole: first.next.is_none(),
            sum: Mutex::new(sum),
            listed: Mutex::default(),
            held: Arc::default(),
            over: Notify::new(),
            refused: AtomicU64::new(0),
            freed_bytes: AtomicU64::new(0),
        }
    }

    /// Name of the tier.
    fn tier(&self) -> &'static str {
        self.kind.name()
    }

    fn may_write(&self) -> bool {
        self.writes.get()
    }

    /// Content of the place, as far as it is known.
    pub fn usage(&self) -> Usage {
        let sum = *self.sum.lock();
        Usage {
            objects: sum.objects,
            bytes: sum.bytes,
            capacity_bytes: self.capacity_bytes,
        }
    }

    /// Counts objects that had to be removed and could not be.
    pub fn could_not_remove(&self, objects: usize) {
        self.refused.fetch_add(objects as u64, Relaxed);
    }

    /// Number of such objects so far.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    /// Counts bytes that were removed to make room.
    fn freed(&self, bytes: u64) {
        self.freed_bytes.fetch_add(bytes, Relaxed);
    }

    /// Counts an object that was put here.
    pub fn came(&self, bytes: u64) {
        let bytes = {
            let mut sum = self.sum.lock();
            sum.objects += 1;
            sum.bytes = sum.bytes.saturating_add(bytes);
            sum.bytes
        };
        if self.is_over(bytes) {
            self.over.notify_one();
        }
    }

    /// Counts an object that was removed here.
    pub fn went(&self, bytes: u64) {
        let mut sum = self.sum.lock();
        sum.objects = sum.objects.saturating_sub(1);
        sum.bytes = sum.bytes.saturating_sub(bytes);
    }

    /// Protects an object from eviction while the returned value lives.
    pub fn hold(&self, name: &ObjectName) -> Held {
        *self.held.lock().entry(name.clone()).or_default() += 1;
        Held {
            name: name.clone(),
            held: self.held.clone(),
        }
    }

    /// Whether a get of this process reads the object.
    pub fn is_held(&self, name: &ObjectName) -> bool {
        self.held.lock().contains_key(name)
    }

    /// Sets the sum from a listing of any sidecar.
    pub fn is_now(&self, sum: Sum) {
        *self.sum.lock() = sum;
    }

    /// Sets the sum from a listing of this process.
    pub fn was_listed(&self, sum: Sum) {
        self.is_now(sum);
        *self.listed.lock() = Some(Instant::now());
    }

    /// Whether this process has listed the place since then.
    fn listed_since(&self, then: Instant) -> bool {
        self.listed.lock().is_some_and(|at| at >= then)
    }

    /// Whether this process listed the place within `young`.
    fn listed_lately(&self, young: Duration) -> bool {
        let listed = *self.listed.lock();
        listed.is_some_and(|at| at.elapsed() < young)
    }

    pub fn sum(&self) -> Sum {
        *self.sum.lock()
    }

    /// Bytes to remove when the place contains `bytes`.
    pub fn excess(&self, bytes: u64) -> u64 {
        match self.is_over(bytes) {
            true => bytes.saturating_sub(self.evict_to_bytes),
            false => 0,
        }
    }

    /// Objects written before this time are too old, Unix seconds by the clock that dates them.
    pub fn expired_s(&self, now_s: u64) -> u64 {
        let after = self.expire_after;
        after.map_or(0, |after| now_s.saturating_sub(after.as_secs().max(1)))
    }

    fn is_over(&self, bytes: u64) -> bool {
        self.capacity_bytes > 0 && bytes > self.evict_at_bytes
    }

    fn is_bounded(&self) -> bool {
        self.capacity_bytes > 0 || self.expire_after.is_some()
    }
}

impl Sum {
    pub fn add(&mut self, listed: &Listed) {
        self.objects += 1;
        self.bytes = self.bytes.saturating_add(listed.bytes);
    }
}

/// Bytes by write time.
#[derive(Debug)]
pub struct Ages {
    width_s: u64,
    bytes: BTreeMap<u64, u64>,
}

/// Selection of the objects to remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cut {
    /// All objects written before this time, Unix seconds.
    before_s: u64,
    /// In addition this many bytes of the objects written from then to `until_s`.
    until_s: u64,
    bytes: u64,
}

impl Default for Ages {
    fn default() -> Self {
        Self {
            width_s: 1,
            bytes: BTreeMap::new(),
        }
    }
}

impl Ages {
    /// Adds an object that may be removed.
    pub fn add(&mut self, listed: &Listed) {
        let bytes = self
            .bytes
            .entry(listed.written_unix_s / self.width_s)
            .or_default();
        *bytes = bytes.saturating_add(listed.bytes);
        if self.bytes.len() > AGES_MAX {
            self.width_s *= 2;
            for (age, bytes) in std::mem::take(&mut self.bytes) {
                *self.bytes.entry(age / 2).or_default() += bytes;
            }
        }
    }

    /// Write time of the newest object, Unix seconds; `None` without objects.
    pub fn youngest_s(&self) -> Option<u64> {
        let youngest = self.bytes.keys().next_back();
        youngest.map(|age| age * self.width_s)
    }

    /// Selects the oldest objects with together `excess` bytes, and all that were written before `expired_s`.
    pub fn cut(&self, excess: u64, expired_s: u64) -> Option<Cut> {
        let mut left = excess;
        let mut cut = Cut {
            before_s: expired_s,
            until_s: expired_s,
            bytes: 0,
        };
        for (age, bytes) in &self.bytes {
            if left == 0 {
                break;
            }
            let (start, end) = (age * self.width_s, (age + 1) * self.width_s);
            cut.before_s = start.max(expired_s);
            cut.until_s = end.max(expired_s);
            cut.bytes = left.min(*bytes);
            left = left.saturating_sub(*bytes);
        }
        let oldest = self.bytes.keys().next().map(|age| age * self.width_s);
        let any = oldest.is_some_and(|oldest| excess > 0 || oldest < expired_s);
        any.then_some(cut)
    }
}

impl Cut {
    /// Whether this object is selected.
    pub fn takes(&mut self, listed: &Listed) -> bool {
        if listed.written_unix_s < self.before_s {
            return true;
        }
        let takes = listed.written_unix_s < self.until_s && self.bytes > 0;
        if takes {
            self.bytes = self.bytes.saturating_sub(listed.bytes);
        }
        takes
    }
}

/// Lists the place periodically when no other sidecar does, until the task is aborted.
pub async fn run<S: Shared>(place: Arc<S>, options: Options) {
    let census = place.census();
    // A sidecar that may not write removes nothing.
    let every = || match census.is_bounded() && census.may_write() {
        true => options.bounded_every,
        false => options.every,
    };
    let mut next = match census.whole {
        true => Instant::now() + spread(every()),
        false => Instant::now(),
    };
    loop {
        // Nothing waits for a listing before it is due, unless puts of this process exceed the capacity.
        let over = timeout_at(next, census.over.notified()).await.is_ok();
        // A count younger than this is as good as a new one.
        let young = match census.may_write() {
            _ if over && !is_stuck(&*place, every() / 2).await => options.pause,
            true => every() / 2,
            false => options.alone_every,
        };
        let (began, freed) = (Instant::now(), census.freed_bytes.load(Relaxed));
        let looked = place.look(young, options.tidy_age).await;
        let now = Instant::now();
        // Each put over the capacity asks for room. If a look made none, the next one would not either.
        let made_room =
            freed < census.freed_bytes.load(Relaxed) || !census.is_over(census.sum().bytes);
        let pause = match looked.is_ok() && made_room {
            true => options.pause,
            false => ((now - began) * STUCK_PAUSES)
                .min(every())
                .max(options.pause),
        };
        next = match looked {
            Ok(true) => now + spread(every()),
            // Another sidecar counts for the first time and will publish the result soon.
            Ok(false) => now + options.pause,
            Err(e) => {
                let tier = census.tier();
                warn!(tier, reason = e.cause.name(), error = %e, "cannot list the tier");
                now + spread(every())
            }
        };
        sleep_until(now + pause).await;
    }
}

/// Whether the last count, of any sidecar within `young`, is above the capacity: that sidecar could not make room.
async fn is_stuck<S: Shared>(place: &S, young: Duration) -> bool {
    let counted = place.counted_lately(young).await;
    matches!(counted, Ok(Some(Turn::Counted(sum))) if place.census().is_over(sum.bytes))
}

async fn look<S: Shared + ?Sized>(
    place: &S,
    young: Duration,
    tidy_age: Duration,
) -> Result<bool, TierError> {
    if !place.census().may_write() {
        return look_on(place, young).await;
    }
    match place.turn(young).await? {
        Turn::Mine => {}
        Turn::Counted(sum) => {
            place.census().is_now(sum);
            return Ok(true);
        }
        Turn::Counting => return Ok(false),
    }
    let began = Instant::now();
    let passed = place.pass().await;
    if !place.census().listed_since(began) {
        return passed.map(|()| true);
    }
    // Others need not count again where nothing could be removed.
    let published = place.publish(place.census().sum()).await;
    let tier = place.census().tier();
    match place.tidy(tidy_age).await {
        Ok(0) => {}
        Ok(removed) => info!(tier, removed, "removed unfinished writes"),
        // Not all servers support this, and not all credentials allow it.
        Err(e) => debug!(tier, error = %e, "cannot remove unfinished writes"),
    }
    passed.and(published).map(|()| true)
}

/// The same for a sidecar that may not write: adopts the last count or counts for itself, and removes nothing.
async fn look_on<S: Shared + ?Sized>(place: &S, young: Duration) -> Result<bool, TierError> {
    match place.counted_lately(young).await? {
        Some(Turn::Counted(sum)) => place.census().is_now(sum),
        Some(_) => return Ok(false),
        None if place.census().listed_lately(young) => {}
        None => place.count().await?,
    }
    Ok(true)
}

/// Three quarters to five quarters of a time, so that many sidecars do not list at once.
fn spread(every: Duration) -> Duration {
    every.mul_f64(0.75 + 0.5 * fastrand::f64())
}

#[cfg(test)]
mod tests;
