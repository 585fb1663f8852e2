use super::*;
use crate::layers::{Options, layered};
use crate::testing::shelf::Shelf;
use crate::testing::suite::{Memory, Sample, untouched};
use crate::{Kind, Tier};
use kvcachepool_protocol::domain::PortableGroup;
use kvcachepool_protocol::layouts::{LAYOUTS_JSON, LayoutTable};
use kvcachepool_protocol::object::Element;

const TOKENS: usize = 32;
const LAYERS: usize = 3;
const HEADS: usize = 4;
const STATE: usize = 8;

/// An instance: order of its cache, ranks, and tokens of a block.
#[derive(Clone, Copy, Debug)]
struct Instance {
    layout: &'static str,
    ranks: usize,
    block: usize,
}

const INSTANCES: [Instance; 4] = [
    Instance {
        layout: "LBHNC",
        ranks: 1,
        block: 16,
    },
    Instance {
        layout: "LBNHC",
        ranks: 2,
        block: 8,
    },
    Instance {
        layout: "BLNHC",
        ranks: 4,
        block: 32,
    },
    Instance {
        layout: "BHLNC",
        ranks: 2,
        block: 16,
    },
];

impl Instance {
    fn portable(self, groups: usize) -> Arc<Portable> {
        let table = LayoutTable::parse(LAYOUTS_JSON).unwrap();
        let group = PortableGroup {
            layers: LAYERS as u32,
            kernel_blocks: 1,
            heads: (HEADS / self.ranks) as u32,
            tokens: self.block as u32,
            state_bytes: STATE as u32,
            parts: self.ranks as u32,
        };
        Arc::new(Portable {
            layout: table.layout(self.layout).unwrap().clone(),
            groups: vec![group; groups],
        })
    }

    /// The sections of a chunk: what the caches of the ranks hold.
    fn sections(self, group: usize) -> Vec<Vec<u8>> {
        let heads = HEADS / self.ranks;
        let sizes = |dim| match dim {
            'L' => LAYERS,
            'H' => heads,
            'N' => self.block,
            _ => 1,
        };
        let section = |rank: usize| {
            let mut bytes = Vec::new();
            for block in 0..TOKENS / self.block {
                let states: usize = "LHN".chars().map(sizes).product();
                for state in 0..states {
                    let (mut rest, mut at) = (state, [0; 3]);
                    for dim in self.layout.chars().rev() {
                        let place = "LHN".find(dim);
                        if let Some(place) = place {
                            at[place] = rest % sizes(dim);
                            rest /= sizes(dim);
                        }
                    }
                    let [layer, head, token] = at;
                    let (head, token) = (rank * heads + head, block * self.block + token);
                    let number = ((group * LAYERS + layer) * HEADS + head) * TOKENS + token;
                    bytes.extend((number as u64).to_le_bytes());
                }
            }
            bytes
        };
        (0..self.ranks).map(section).collect()
    }

    /// A chunk of `groups` groups, as this instance stores it.
    fn chunk(self, groups: usize) -> Sample {
        let mut sample = Sample::new(1, 0, &[]);
        for group in 0..groups {
            for (shard, bytes) in self.sections(group).into_iter().enumerate() {
                let section = Section::exact(group as u32, shard as u32, &bytes);
                sample.object.sections.push(section);
                sample.bytes.push(bytes);
            }
        }
        sample
    }
}

fn converter(shelf: &Shelf) -> Converter {
    layered(Arc::new(shelf.clone()), &Options::default()).converter
}

#[tokio::test]
async fn what_one_instance_writes_every_other_reads() {
    let memory = Memory::new(8 << 20);
    let mut heads = Vec::new();
    for writer in INSTANCES {
        let (shelf, stored) = (Shelf::new(Kind::Disk, 0), writer.chunk(2));
        let converter = converter(&shelf);
        let put = stored.put(&memory);
        converter
            .write(put, Some(writer.portable(2)))
            .await
            .unwrap();
        heads.push(shelf.head(&stored.name()).await.unwrap());
        for reader in INSTANCES {
            let wanted = reader.chunk(2);
            let places = wanted.get_all(&memory).places;
            let landed = converter
                .read(&wanted.name(), places.clone(), Some(reader.portable(2)))
                .await
                .unwrap();
            assert!(wanted.lies_in(&places), "{writer:?} to {reader:?}");
            // The head is that of the chunk as the reader has it.
            assert_eq!(landed.object.sections, wanted.object.sections);
            let digests = wanted.object.sections.iter().map(|s| Some(s.raw_digest));
            assert_eq!(landed.digests, digests.collect::<Vec<_>>());
        }
    }
    assert_eq!(heads[0].sections.len(), 2);
    assert!(heads.iter().all(|head| head == &heads[0]));
}

#[tokio::test]
async fn a_stage_has_a_section_of_its_own_and_a_missing_part_leaves_it_out() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
    let (instance, converter) = (INSTANCES[1], converter(&shelf));
    // Two stages: the shards of the second follow those of the first.
    let mut stored = instance.chunk(2);
    for (at, section) in stored.object.sections.iter_mut().enumerate() {
        (section.group, section.shard) = (0, at as u32);
    }
    let portable = instance.portable(1);
    converter
        .write(stored.put(&memory), Some(portable.clone()))
        .await
        .unwrap();
    let head = shelf.head(&stored.name()).await.unwrap();
    let named: Vec<_> = head.sections.iter().map(|s| (s.group, s.shard)).collect();
    assert_eq!(named, [(0, 0), (0, 1)]);

    let mut short = Sample::new(1, 1, &[]);
    short.object.sections = stored.object.sections[..3].to_vec();
    short.bytes = stored.bytes[..3].to_vec();
    converter
        .write(short.put(&memory), Some(portable.clone()))
        .await
        .unwrap();
    let head = shelf.head(&short.name()).await.unwrap();
    assert_eq!(head.sections.len(), 1);
    let mut places = stored.get_all(&memory).places;
    let landed = converter
        .read(&short.name(), places.clone(), Some(portable.clone()))
        .await;
    let had: Vec<_> = landed
        .unwrap()
        .digests
        .iter()
        .map(Option::is_some)
        .collect();
    assert_eq!(had, [true, true, false, false]);
    assert!(short.lies_in(&places[..2]));
    assert!(places[2..].iter().all(|place| untouched(&place.span)));
    // one rank's part alone
    places = stored.get(&memory, &[3]).places;
    converter
        .read(&stored.name(), places.clone(), Some(portable))
        .await
        .unwrap();
    assert!(stored.lies_in(&places));
}

#[tokio::test]
async fn bytes_that_do_not_match_are_neither_written_nor_given_to_a_slot() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
    let (instance, converter) = (INSTANCES[1], converter(&shelf));
    let (stored, portable) = (instance.chunk(1), Some(instance.portable(1)));
    let put = stored.put(&memory);
    assert!(put.spans[1].write(9, &[0xFF]));
    let e = converter.write(put, portable.clone()).await.unwrap_err();
    assert_eq!(e.cause, Cause::Corrupt);
    assert_eq!(shelf.lookup(&[stored.name()]).await.unwrap(), [false]);

    converter
        .write(stored.put(&memory), portable.clone())
        .await
        .unwrap();
    assert!(shelf.spoil(&stored.name(), 0, 100));
    let places = stored.get_all(&memory).places;
    let e = converter
        .read(&stored.name(), places.clone(), portable.clone())
        .await;
    assert_eq!(e.unwrap_err().cause, Cause::Corrupt);
    assert!(places.iter().all(|place| untouched(&place.span)));
    // The object is gone, as every corrupt one.
    let e = converter
        .read(&stored.name(), places, portable)
        .await
        .unwrap_err();
    assert_eq!(e.cause, Cause::Missing);
}

#[tokio::test]
async fn sections_that_the_layout_does_not_have_are_an_error_with_a_name() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
    let (instance, converter) = (INSTANCES[0], converter(&shelf));
    let stored = instance.chunk(1);
    converter
        .write(stored.put(&memory), Some(instance.portable(1)))
        .await
        .unwrap();
    let places = stored.get_all(&memory).places;
    let group = |place: &Place| Place {
        group: 1,
        ..place.clone()
    };
    let short = |place: &Place| Place {
        span: memory.span(place.span.length - 8),
        ..place.clone()
    };
    let fewer = |place: &Place| Place {
        span: memory.span(place.span.length / 2),
        ..place.clone()
    };
    for wrong in [group(&places[0]), short(&places[0]), fewer(&places[0])] {
        let name = stored.name();
        let read = converter.read(&name, vec![wrong], Some(instance.portable(1)));
        assert_eq!(read.await.unwrap_err().cause, Cause::Shape);
    }
    let rooms = Rooms {
        read: Room::new(1 << 20),
        write: Room::new(1 << 20),
    };
    let small = Converter {
        rooms,
        ..converter.clone()
    };
    let mut huge = instance.chunk(1);
    huge.bytes[0] = huge.bytes[0].repeat(2_000);
    huge.object.sections[0] = Section::exact(0, 0, &huge.bytes[0]);
    let memory = Memory::new(64 << 20);
    let e = small
        .write(huge.put(&memory), Some(instance.portable(1)))
        .await;
    assert_eq!(e.unwrap_err().cause, Cause::Shape);
}

#[tokio::test]
async fn an_object_that_is_not_converted_is_read_without_the_sections_that_it_lacks() {
    let (memory, shelf) = (Memory::new(1 << 20), Shelf::new(Kind::Disk, 0));
    let (sample, converter) = (Sample::new(1, 0, &[5_000, 300]), converter(&shelf));
    converter.write(sample.put(&memory), None).await.unwrap();
    let places = sample.get_all(&memory).places;
    let all = converter
        .read(&sample.name(), places.clone(), None)
        .await
        .unwrap();
    assert!(all.digests.iter().all(Option::is_some));
    let more = Place {
        group: 9,
        shard: 0,
        span: memory.span(70),
    };
    let wanted = [places, vec![more.clone()]].concat();
    let landed = converter
        .read(&sample.name(), wanted.clone(), None)
        .await
        .unwrap();
    let stored = sample.object.sections.iter();
    let digests: Vec<_> = stored.map(|s| Some(s.stored_digest)).collect();
    assert_eq!(landed.digests, [digests, vec![None]].concat());
    assert!(sample.lies_in(&wanted[..2]));
    // none of the wanted sections
    let e = converter
        .read(&sample.name(), vec![more], None)
        .await
        .unwrap_err();
    assert_eq!(e.cause, Cause::Shape);
    // A section of another length is an error, not a missing section.
    let mut short = wanted.clone();
    short[1].span = memory.span(299);
    let e = converter
        .read(&sample.name(), short, None)
        .await
        .unwrap_err();
    assert_eq!(e.cause, Cause::Shape);
}

#[test]
fn the_form_of_an_object_tells_layers_tokens_and_channels() {
    let dims = |list: &[(Axis, u32)]| {
        let dims = list.iter().map(|(axis, size)| Dim {
            axis: *axis,
            size: *size,
        });
        Form::new(Element::Bf16, &dims.collect::<Vec<_>>()).unwrap()
    };
    let memory = Memory::new(1 << 20);
    for (instance, block) in [
        (
            INSTANCES[0],
            dims(&[
                (Axis::Layer, 3),
                (Axis::Channel, 4),
                (Axis::Token, 16),
                (Axis::Half, 2),
                (Axis::Channel, 2),
            ]),
        ),
        (
            INSTANCES[1],
            dims(&[
                (Axis::Layer, 3),
                (Axis::Token, 8),
                (Axis::Channel, 2),
                (Axis::Half, 2),
                (Axis::Channel, 2),
            ]),
        ),
    ] {
        let (portable, places) = (
            instance.portable(1),
            instance.chunk(1).get_all(&memory).places,
        );
        let parts = places
            .iter()
            .map(|place| Part::new(&portable, place).unwrap());
        let parts: Vec<_> = parts.collect();
        let object = dims(&[
            (Axis::Channel, 4),
            (Axis::Layer, 3),
            (Axis::Token, 32),
            (Axis::Half, 2),
            (Axis::Channel, 2),
        ]);
        assert_eq!(form_of(&portable, &block, &parts), object);
        let unknown = Form::flat(Element::Bf16);
        assert_eq!(form_of(&portable, &unknown, &parts), unknown);
    }
}
