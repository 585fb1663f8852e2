//! Removing what a tier holds: all of it, or the objects of some domains.

use super::{Listed, Removal, Tier, TierError};
use futures::stream::{StreamExt, TryStreamExt};
use kvcachepool_protocol::object::ObjectName;

/// Objects that are listed at once.
const PAGE: usize = 1_000;
/// Objects that are removed by one operation: some that fail cost only these another time, and its deadline grows with them.
const BATCH: usize = 125;
/// Such operations at once.
const AT_ONCE: usize = 4;
/// Most times that a tier is listed from the beginning to the end: others may go on writing.
pub const PASSES_MAX: u32 = 16;

/// Whose objects: the names of model and layout, as they stand in object names.
pub type Whose = (String, String);

/// Removes the objects of these domains, or all (`None`). Returns how many were there. What others write meanwhile may stay.
pub async fn clear(tier: &dyn Tier, domains: Option<&[Whose]>) -> Result<u64, TierError> {
    let goes = |name: &ObjectName| {
        let is = |(model, layout): &Whose| *model == name.model && *layout == name.layout;
        domains.is_none_or(|domains| domains.iter().any(is))
    };
    let mut removed = 0;
    for _ in 0..PASSES_MAX {
        let gone = pass(tier, &goes).await?;
        removed += gone;
        if gone == 0 {
            break;
        }
    }
    Ok(removed)
}

/// Lists once from the beginning to the end, and removes. Removing moves the pages of some tiers: what is left out by it goes next time.
async fn pass(tier: &dyn Tier, goes: &impl Fn(&ObjectName) -> bool) -> Result<u64, TierError> {
    let (mut removed, mut from) = (0, None);
    loop {
        let mut page = tier.list(from.as_deref(), PAGE).await?;
        page.objects.retain(|listed| goes(&listed.name));
        removed += remove_all(tier, &page.objects).await?;
        from = page.next;
        if from.is_none() {
            return Ok(removed);
        }
    }
}

/// Removes objects that a listing has just told of, any number of them. Returns how many.
pub async fn remove_all(tier: &dyn Tier, listed: &[Listed]) -> Result<u64, TierError> {
    let batches = listed.chunks(BATCH);
    let each: Vec<_> = batches
        .map(|batch| tier.remove(Removal::Listed(batch)))
        .collect();
    let counts = futures::stream::iter(each).buffer_unordered(AT_ONCE);
    counts
        .try_fold(0, |sum, count| async move { Ok(sum + count) })
        .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::Kind;
    use crate::tiers::shelf::Shelf;
    use crate::tiers::suite::{Memory, Sample};

    #[tokio::test]
    async fn objects_of_the_domains_go_and_others_stay() {
        let (shelf, memory) = (Shelf::new(Kind::Disk, 0), Memory::new(64 << 20));
        let mine: Vec<Sample> = (0..2_500).map(|n| Sample::new(1, n, &[100])).collect();
        let other = Sample::new(2, 0, &[100]);
        for sample in mine.iter().chain([&other]) {
            shelf.put(sample.put(&memory)).await.unwrap();
        }
        let name = mine[0].name();
        let domains = [(name.model.clone(), name.layout.clone())];
        assert_eq!(clear(&shelf, Some(&domains)).await, Ok(2_500));
        assert_eq!(
            shelf.lookup(&[name, other.name()]).await,
            Ok(vec![false, true])
        );
        assert_eq!(clear(&shelf, Some(&[])).await, Ok(0));
        assert_eq!(clear(&shelf, None).await, Ok(1));
        assert_eq!(shelf.usage().await.unwrap().objects, 0);
    }
}
