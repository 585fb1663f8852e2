//! One complete listing of a place, and the removal of objects that must go. Objects that cannot be removed do not block others.

use super::{Ages, Shared, Sum};
use crate::TierError;
use crate::sweep::sweep_most;
use kvcachepool_protocol::object::ObjectName;
use std::collections::HashSet;
use tracing::{info, warn};

/// Most rounds in which the oldest objects are selected again because some of them cannot be removed.
const ROUNDS: usize = 4;

/// Counts the objects and removes those that must go.
pub(super) async fn pass<S: Shared + ?Sized>(place: &S) -> Result<(), TierError> {
    let (mut kept, mut went, mut why) = (HashSet::new(), Sum::default(), None);
    for _ in 0..ROUNDS {
        let (bytes, ages) = count_without(place, &kept).await?;
        // By the clock that dates the objects, or by the newest of them: this node's clock may be wrong.
        let now = place.unix_s().or(ages.youngest_s());
        let expired = place.census().expired_s(now.unwrap_or_default());
        let Some(mut cut) = ages.cut(place.census().excess(bytes), expired) else {
            break;
        };
        let swept = sweep_most(place, |listed| {
            let spared = place.census().is_held(&listed.name) || kept.contains(&listed.name);
            !spared && cut.takes(listed)
        });
        let swept = swept.await?;
        went.objects += swept.objects;
        went.bytes += swept.bytes;
        if swept.kept.is_empty() {
            break;
        }
        // Others are selected in their place.
        kept.extend(swept.kept);
        why = swept.why;
    }
    place.census().could_not_remove(kept.len());
    place.census().freed(went.bytes);
    let (tier, Sum { objects, bytes }) = (place.census().tier(), went);
    if objects > 0 {
        info!(tier, objects, bytes, "evicted the oldest objects");
    }
    match why {
        None => Ok(()),
        Some(why) if objects == 0 => Err(why),
        Some(why) => {
            let (reason, objects) = (why.cause.name(), kept.len());
            warn!(tier, reason, objects, error = %why, "cannot remove some objects; evicting others instead");
            Ok(())
        }
    }
}

/// Counts the objects by a complete listing.
pub(super) async fn count<S: Shared + ?Sized>(place: &S) -> Result<(), TierError> {
    count_without(place, &HashSet::new()).await.map(drop)
}

/// Counts the objects; returns their bytes, and the ages of all except `kept`.
async fn count_without<S: Shared + ?Sized>(
    place: &S,
    kept: &HashSet<ObjectName>,
) -> Result<(u64, Ages), TierError> {
    let (mut sum, mut ages) = (Sum::default(), Ages::default());
    let looked = sweep_most(place, |listed| {
        sum.add(listed);
        if !kept.contains(&listed.name) {
            ages.add(listed);
        }
        false
    });
    if let Some(e) = looked.await?.unread {
        let (tier, reason) = (place.census().tier(), e.cause.name());
        warn!(tier, reason, error = %e, "cannot read some names in the tier; they are neither counted nor removed");
    }
    place.census().was_listed(sum);
    Ok((sum.bytes, ages))
}
