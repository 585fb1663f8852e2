//! The only way to remove objects that a listing finds: list a page, let a policy choose, remove the chosen objects, continue with the
//! next page. `clear`, `purge`, `gc` and the eviction of a bucket differ in their policy and in where they list: outside of a tier's
//! layers, or inside the tier.

use super::{Listed, Operation, Page, Removal, Tier, TierError};
use futures::stream::{StreamExt, TryStreamExt};
use kvcachepool_protocol::object::ObjectName;

/// Objects per page.
pub const PAGE: usize = 1_000;
/// Objects per removal: a failure costs only these another attempt, and the deadline grows with their number.
const BATCH: usize = 125;
/// Removals in flight.
const AT_ONCE: usize = 4;
/// Most passes over a tier: other processes may keep writing.
pub const PASSES_MAX: u32 = 16;

/// A domain: the names of model and layout as in object names.
pub type Whose = (String, String);

/// Where a sweep lists and removes.
pub trait Source: Sync {
    /// A page of the listing, after the token of an earlier page.
    fn page<'a>(&'a self, from: Option<&'a str>) -> Operation<'a, Page>;

    /// Removes any number of objects that the listing has just returned.
    fn remove_chosen<'a>(&'a self, chosen: &'a [Listed]) -> Operation<'a, Swept>;
}

/// Result of a sweep.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Swept {
    pub objects: u64,
    /// Their bytes according to the listing.
    pub bytes: u64,
    /// Foreign names in the tier's place, which are kept.
    pub foreign: u64,
    /// Chosen objects that cannot be removed, for a reason that does not concern others, as far as they are known.
    pub kept: Vec<ObjectName>,
    /// The error of the first of them.
    pub why: Option<TierError>,
    /// The error of the first name that could not be inspected. It may be that of many objects, which were not chosen.
    pub unread: Option<TierError>,
}

impl Swept {
    fn add(&mut self, other: Self) {
        self.objects += other.objects;
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.foreign += other.foreign;
        self.kept.extend(other.kept);
        self.why = self.why.take().or(other.why);
        self.unread = self.unread.take().or(other.unread);
    }

    /// Fails if objects that were chosen, or might have been, are still there.
    pub fn whole(mut self) -> Result<Self, TierError> {
        match self.why.take().or(self.unread.take()) {
            Some(why) => Err(why),
            None => Ok(self),
        }
    }
}

impl Source for dyn Tier + '_ {
    fn page<'a>(&'a self, from: Option<&'a str>) -> Operation<'a, Page> {
        self.list(from, PAGE)
    }

    fn remove_chosen<'a>(&'a self, chosen: &'a [Listed]) -> Operation<'a, Swept> {
        let remove = move |batch: &'a [Listed]| async move {
            let mut swept = Swept::default();
            match self.remove(Removal::Listed(batch)).await {
                Ok(objects) => {
                    swept.objects = objects;
                    swept.bytes = batch.iter().map(|listed| listed.bytes).sum();
                }
                // Others of the batch were removed; their number is unknown.
                Err(e) if e.of_one_object() => swept.why = Some(e),
                Err(e) => return Err(e),
            }
            Ok(swept)
        };
        Box::pin(async move {
            let each: Vec<_> = chosen.chunks(BATCH).map(remove).collect();
            let mut batches = futures::stream::iter(each).buffer_unordered(AT_ONCE);
            let mut all = Swept::default();
            while let Some(swept) = batches.try_next().await? {
                all.add(swept);
            }
            Ok(all)
        })
    }
}

/// A listing, page by page.
pub struct Pages<'a, S: ?Sized> {
    source: &'a S,
    /// Token of the next page; `None` after the last.
    next: Option<Option<String>>,
    /// The error of the first name on the pages so far that could not be inspected.
    unread: Option<TierError>,
}

impl<'a, S: Source + ?Sized> Pages<'a, S> {
    /// Starts from the beginning.
    pub fn of(source: &'a S) -> Self {
        Self {
            source,
            next: Some(None),
            unread: None,
        }
    }

    /// The next page; `None` after the last. If names could not be inspected, it fails after the last page.
    pub async fn next(&mut self) -> Result<Option<Page>, TierError> {
        let Some(mut page) = self.page().await? else {
            return self.unread.take().map_or(Ok(None), Err);
        };
        self.unread = self.unread.take().or(page.unread.take());
        Ok(Some(page))
    }

    async fn page(&mut self) -> Result<Option<Page>, TierError> {
        let Some(from) = &self.next else {
            return Ok(None);
        };
        let page = self.source.page(from.as_deref()).await?;
        self.next = page.next.clone().map(Some);
        Ok(Some(page))
    }

    /// Removes the chosen objects of the next page; `None` after the last.
    pub async fn sweep(
        &mut self,
        chooses: impl FnMut(&Listed) -> bool,
    ) -> Result<Option<Swept>, TierError> {
        let Some(mut page) = self.page().await? else {
            return Ok(None);
        };
        page.objects.retain(chooses);
        let mut swept = self.source.remove_chosen(&page.objects).await?;
        swept.foreign += page.foreign;
        swept.unread = swept.unread.take().or(page.unread);
        Ok(Some(swept))
    }
}

/// Lists all objects once and removes the chosen ones. Removing moves the pages of some tiers: the next sweep finds objects that were
/// skipped. A policy that chooses nothing sees every object. Fails in the end if some objects could not be inspected or removed.
pub async fn sweep<S: Source + ?Sized>(
    source: &S,
    chooses: impl FnMut(&Listed) -> bool,
) -> Result<Swept, TierError> {
    sweep_most(source, chooses).await?.whole()
}

/// The same, but objects that could not be inspected or removed are no error.
pub(crate) async fn sweep_most<S: Source + ?Sized>(
    source: &S,
    mut chooses: impl FnMut(&Listed) -> bool,
) -> Result<Swept, TierError> {
    let (mut swept, mut pages) = (Swept::default(), Pages::of(source));
    while let Some(page) = pages.sweep(&mut chooses).await? {
        swept.add(page);
    }
    Ok(swept)
}

/// Sweeps until a sweep removes nothing, at most [`PASSES_MAX`] times. Returns the sum, with the foreign names of the last sweep, and
/// whether the last sweep removed nothing. Fails in the end if some objects could not be inspected or removed.
pub async fn sweep_all<S: Source + ?Sized>(
    source: &S,
    chooses: impl Fn(&Listed) -> bool,
) -> Result<(Swept, bool), TierError> {
    let mut all = Swept::default();
    for _ in 0..PASSES_MAX {
        let swept = sweep_most(source, &chooses).await?;
        let ended = swept.objects == 0;
        // What an earlier sweep could not remove may be gone since.
        (all.foreign, all.why, all.unread) = (0, None, None);
        all.add(swept);
        if ended {
            return Ok((all.whole()?, true));
        }
    }
    Ok((all.whole()?, false))
}

/// Removes the objects of these domains, or all (`None`). Returns their number. Objects written concurrently may remain.
pub async fn clear(tier: &dyn Tier, domains: Option<&[Whose]>) -> Result<u64, TierError> {
    let chooses = |listed: &Listed| {
        let of =
            |(model, layout): &Whose| *model == listed.name.model && *layout == listed.name.layout;
        domains.is_none_or(|domains| domains.iter().any(of))
    };
    let (swept, _) = sweep_all(tier, chooses).await?;
    Ok(swept.objects)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::scripted::{Scripted, name};
    use crate::testing::shelf::Shelf;
    use crate::testing::suite::{Memory, Sample};
    use crate::{Cause, Kind};

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

    #[tokio::test]
    async fn one_object_that_cannot_be_removed_holds_up_no_other_batch() {
        let listed = |number| Listed {
            name: name(number),
            bytes: 1,
            written_unix_s: 0,
        };
        let chosen: Vec<_> = (0..1_000).map(listed).collect();
        let scripted = Scripted::new();
        let tier: &dyn Tier = &*scripted;
        scripted.fail_about(Cause::Io);
        let swept = tier.remove_chosen(&chosen).await.unwrap();
        assert_eq!(swept.objects, 1_000 - BATCH as u64);
        assert_eq!(swept.whole().unwrap_err().cause, Cause::Io);
        // What concerns the whole tier ends it.
        for cause in [Cause::Io, Cause::Denied] {
            scripted.fail(cause);
            assert_eq!(tier.remove_chosen(&chosen).await.unwrap_err().cause, cause);
        }
        scripted.fail_about(Cause::Unreachable);
        assert!(tier.remove_chosen(&chosen).await.is_err());
    }
}
