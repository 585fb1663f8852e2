//! Reads the wanted sections of an object, as far as it has them.

use kvcachepool_engine::Landed;
use kvcachepool_protocol::object::ObjectName;
use kvcachepool_tiers::{Cause, Get, Place, Tier, TierError};

/// Reads those of the wanted sections that the object has.
pub async fn read(
    tier: &dyn Tier,
    name: &ObjectName,
    places: &[Place],
) -> Result<Landed, TierError> {
    let get = |places| Get {
        name: name.clone(),
        places,
    };
    let first = tier.get(get(places.to_vec())).await;
    let (object, read) = match first {
        Ok(object) => (object, places.to_vec()),
        // Most objects have all sections. Only when one lacks those of a sliding window is its section table read.
        Err(e) if e.cause == Cause::Shape => {
            let head = tier.head(name).await?;
            let had = |p: &&Place| {
                head.section(p.group, p.shard)
                    .is_some_and(|s| s.stored_bytes == p.span.length)
            };
            let had: Vec<Place> = places.iter().filter(had).cloned().collect();
            let lacks = places
                .iter()
                .filter(|p| head.section(p.group, p.shard).is_none())
                .count();
            if had.is_empty() || had.len() + lacks != places.len() {
                return Err(e);
            }
            (tier.get(get(had.clone())).await?, had)
        }
        Err(e) => return Err(e),
    };
    let digest = |place: &Place| {
        let same = |p: &Place| (p.group, p.shard) == (place.group, place.shard);
        read.iter()
            .any(same)
            .then(|| {
                object
                    .section(place.group, place.shard)
                    .map(|s| s.stored_digest)
            })
            .flatten()
    };
    let digests = places.iter().map(digest).collect();
    Ok(Landed {
        object: Box::new(object),
        digests,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::shelf::Shelf;
    use crate::testing::suite::{Memory, Sample};
    use kvcachepool_tiers::Kind;

    #[tokio::test]
    async fn an_object_without_some_sections_is_read_without_them() {
        let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
        let sample = Sample::new(1, 0, &[5_000, 300]);
        shelf.put(sample.put(&memory)).await.unwrap();
        let places = sample.get_all(&memory).places;
        let all = read(&shelf, &sample.name(), &places).await.unwrap();
        assert!(all.digests.iter().all(Option::is_some));
        let more = Place {
            group: 9,
            shard: 0,
            span: memory.span(70),
        };
        let wanted = [places, vec![more.clone()]].concat();
        let landed = read(&shelf, &sample.name(), &wanted).await.unwrap();
        let digests: Vec<_> = sample
            .object
            .sections
            .iter()
            .map(|s| Some(s.stored_digest))
            .collect();
        assert_eq!(landed.digests, [digests, vec![None]].concat());
        assert!(sample.lies_in(&wanted[..2]));
        // none of the wanted sections
        let e = read(&shelf, &sample.name(), &[more]).await.unwrap_err();
        assert_eq!(e.cause, Cause::Shape);
        // A section of another length is an error, not a missing section.
        let mut short = wanted.clone();
        short[1].span = memory.span(299);
        let e = read(&shelf, &sample.name(), &short).await.unwrap_err();
        assert_eq!(e.cause, Cause::Shape);
    }
}
