//! What loses something is named so, comes back as what it says, and is nobody else's.

use super::*;
use crate::clear;
use kvcachepool_kernels::codec::relative_error;
use kvcachepool_protocol::config::UNPACKING_BYTES;
use kvcachepool_protocol::object::{Axis, Dim, Element, Fidelity, Form};
use std::time::Duration;

const LOSSY: [(Codec, f64, u64); 4] = [
    (Codec::Fp8, 0.05, 60),
    (Codec::Int8, 0.05, 60),
    (Codec::Int4, 0.3, 40),
    (Codec::CacheGen, 0.3, 40),
];

fn around(shelf: &Shelf, codec: Codec) -> Packing {
    Packing::new(
        Arc::new(shelf.clone()),
        PackingOptions::new(codec),
        deadline::Options::default(),
        Arc::default(),
    )
}

/// Blocks of 3 layers with 4 heads of 16 tokens, numbers of two bytes.
fn numbers(number: u64) -> Sample {
    let dim = |(axis, size)| Dim { axis, size };
    let dims = [
        (Axis::Layer, 3),
        (Axis::Channel, 4),
        (Axis::Token, 16),
        (Axis::Half, 2),
        (Axis::Channel, 32),
    ];
    let form = Form::new(Element::Bf16, &dims.map(dim)).unwrap();
    of(form, number, &[12, 1, 3])
}

/// Sections of so many blocks.
fn of(form: Form, number: u64, blocks: &[u64]) -> Sample {
    let block = u64::from(form.block_bytes().unwrap());
    let lengths: Vec<_> = blocks.iter().map(|blocks| blocks * block).collect();
    let mut sample = Sample::new(1, number, &lengths);
    sample.object.form = form;
    sample
}

#[tokio::test]
async fn what_is_lost_is_little_and_the_same_for_every_reader_of_the_codec() {
    for (codec, error, percent) in LOSSY {
        let (shelf, sample) = (Shelf::new(Kind::Disk, 0), numbers(0));
        let (writer, reader) = (around(&shelf, codec), around(&shelf, codec));
        let memory = Memory::new(64 << 20);
        writer.put(sample.put(&memory)).await.unwrap();
        let name = ObjectName {
            fidelity: codec.fidelity(),
            ..sample.name()
        };
        let packed = shelf.head(&name).await.unwrap();
        assert_eq!((packed.codec, packed.name()), (codec, name));
        let [put, _] = writer.packed().amounts();
        assert!(put.stored_bytes * 100 < put.raw_bytes * percent, "{put:?}");
        assert!(0.0 < writer.packed().error() && writer.packed().error() < error);
        let mut before = None;
        for tier in [&writer, &reader] {
            let get = sample.get_all(&memory);
            let head = tier.get(get.clone()).await.unwrap();
            assert_eq!((head.codec, head.fidelity), (Codec::None, Fidelity::Exact));
            let bytes: Vec<_> = get
                .places
                .iter()
                .map(|place| bytes_of(&place.span))
                .collect();
            for ((section, bytes), raw) in head.sections.iter().zip(&bytes).zip(&sample.bytes) {
                assert_eq!(section.raw_digest, digest(bytes));
                let lost = relative_error(Element::Bf16, raw, bytes);
                assert!(lost < error, "{codec:?}: {lost}");
            }
            assert!(
                before
                    .replace(bytes.clone())
                    .is_none_or(|before| before == bytes)
            );
        }
    }
}

#[tokio::test]
async fn what_may_have_lost_something_is_there_for_its_own_codec_and_for_no_other() {
    let (shelf, sample, memory) = (Shelf::new(Kind::Disk, 0), numbers(0), Memory::new(64 << 20));
    let writer = around(&shelf, Codec::Fp8);
    writer.put(sample.put(&memory)).await.unwrap();
    let name = sample.name();
    for codec in [
        Codec::None,
        Codec::Lossless,
        Codec::Int8,
        Codec::Int4,
        Codec::CacheGen,
    ] {
        let other = around(&shelf, codec);
        assert_eq!(
            other.lookup(std::slice::from_ref(&name)).await,
            Ok(vec![false])
        );
        let error = other.get(sample.get_all(&memory)).await.unwrap_err();
        assert_eq!(error.cause, Cause::Missing, "{codec:?}");
        assert_eq!(
            other
                .remove(Removal::Named(std::slice::from_ref(&name)))
                .await,
            Ok(0)
        );
    }
    assert_eq!(
        writer.lookup(std::slice::from_ref(&name)).await,
        Ok(vec![true])
    );
    let listed = writer.list(None, 10).await.unwrap().objects;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].name, name);
    assert_eq!(writer.head(&name).await.unwrap().fidelity, Fidelity::Exact);
    assert_eq!(
        writer
            .remove(Removal::Named(std::slice::from_ref(&name)))
            .await,
        Ok(1)
    );
}

#[tokio::test]
async fn bytes_that_a_codec_has_nothing_for_are_stored_as_they_are() {
    let (shelf, memory) = (Shelf::new(Kind::Disk, 0), Memory::new(64 << 20));
    let mut infinite = numbers(1);
    infinite.bytes[0][..2].copy_from_slice(&0x7f80u16.to_le_bytes());
    infinite.object.sections[0].raw_digest = digest(&infinite.bytes[0]);
    infinite.object.sections[0].stored_digest = digest(&infinite.bytes[0]);
    let unknown = Sample::new(1, 2, &[20_000]);
    let mut flat = numbers(3);
    flat.object.form = Form::flat(Element::Bf16);
    let mut torn = numbers(4);
    torn.object.form = Form::new(
        Element::Bf16,
        &[Dim {
            axis: Axis::Token,
            size: 5_000,
        }],
    )
    .unwrap();
    for (codec, sample) in [
        (Codec::Int8, infinite.clone()),
        (Codec::Int8, unknown),
        (Codec::CacheGen, infinite),
        (Codec::CacheGen, flat),
        (Codec::CacheGen, torn),
    ] {
        let (shelf, tier) = (shelf.clone(), around(&shelf, codec));
        tier.put(sample.put(&memory)).await.unwrap();
        let get = sample.get_all(&memory);
        let mut object = sample.object.clone();
        if codec != Codec::CacheGen {
            object.form = Form::flat(object.form.element());
        }
        assert_eq!(tier.get(get.clone()).await, Ok(object));
        assert!(sample.lies_in(&get.places));
        assert_eq!(tier.packed().amounts()[0].raw_bytes, 0);
        let plain = tier.packed().plain();
        assert_eq!(plain.map(|(_, objects)| objects), [0, 1, 0], "{codec:?}");
        let exact = around(&shelf, Codec::None);
        assert_eq!(exact.lookup(&[sample.name()]).await, Ok(vec![false]));
    }
}

#[tokio::test]
async fn packed_numbers_that_changed_are_never_a_hit() {
    for (codec, ..) in LOSSY {
        let (shelf, sample, memory) =
            (Shelf::new(Kind::Disk, 0), numbers(0), Memory::new(64 << 20));
        let tier = around(&shelf, codec);
        let name = tier.inside(&sample.name());
        for byte in (0..15_000).step_by(1_499) {
            tier.put(sample.put(&memory)).await.unwrap();
            assert!(shelf.spoil(&name, 0, byte));
            let get = sample.get_all(&memory);
            let error = tier.get(get.clone()).await.unwrap_err();
            assert_eq!(
                error.cause,
                Cause::Corrupt,
                "{codec:?} byte {byte}: {error}"
            );
            assert!(untouched(&get.places[0].span), "{byte}");
        }
    }
}

#[tokio::test]
async fn forms_stand_in_heads_where_a_codec_needs_them_and_nowhere_else() {
    for (codec, known) in [
        (Codec::None, false),
        (Codec::Lossless, false),
        (Codec::Fp8, false),
        (Codec::CacheGen, true),
    ] {
        let (shelf, sample, memory) =
            (Shelf::new(Kind::Disk, 0), numbers(0), Memory::new(64 << 20));
        let tier = around(&shelf, codec);
        tier.put(sample.put(&memory)).await.unwrap();
        let head = shelf.head(&tier.inside(&sample.name())).await.unwrap();
        assert_eq!(head.form.element(), Element::Bf16, "{codec:?}");
        assert_eq!(head.form.block_bytes().is_some(), known, "{codec:?}");
    }
}

/// 256 tokens of 32 layers with 8 heads of 128 numbers, keys and values, on one GPU: sections that most pools have.
#[tokio::test]
async fn chunks_of_common_models_find_room_with_every_codec() {
    let dim = |(axis, size)| Dim { axis, size };
    let dims = [
        (Axis::Layer, 32),
        (Axis::Token, 16),
        (Axis::Channel, 8),
        (Axis::Half, 2),
        (Axis::Channel, 128),
    ];
    let form = Form::new(Element::Bf16, &dims.map(dim)).unwrap();
    let (sample, two) = (of(form, 0, &[16]), of(form, 1, &[16, 16]));
    assert_eq!(sample.bytes[0].len(), 32 << 20);
    for codec in [Codec::Lossless, Codec::Int4, Codec::CacheGen] {
        for sample in [&sample, &two] {
            let (shelf, memory) = (Shelf::new(Kind::Disk, 0), Memory::new(256 << 20));
            let tier = around(&shelf, codec);
            tier.put(sample.put(&memory)).await.unwrap();
            assert!(tier.packed().amounts()[0].raw_bytes > 0, "{codec:?}");
            let name = tier.inside(&sample.name());
            assert_eq!(shelf.head(&name).await.unwrap().codec, codec);
            tier.get(sample.get_all(&memory)).await.unwrap();
            // Who does not pack has room for one of them.
            if codec == Codec::Lossless && sample.bytes.len() == 1 {
                let plain = around(&shelf, Codec::None);
                plain.get(sample.get_all(&memory)).await.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn what_is_unpacked_is_held_as_long_as_it_is_and_in_its_codecs_order() {
    let section = |raw_bytes, stored_bytes| Section {
        raw_bytes,
        stored_bytes,
        ..Section::exact(0, 0, &[])
    };
    let sections = [section(800, 100), section(400, 300)];
    assert_eq!(unpacking_bytes(Codec::Int4, &sections), 400 + 300 + 800);
    assert_eq!(
        unpacking_bytes(Codec::CacheGen, &sections),
        400 + 300 + 1600
    );
    assert_eq!(packing_bytes(&[800, 400]), 1200 + 1600);
}

#[tokio::test]
async fn a_tier_that_holds_all_of_its_room_holds_up_no_other() {
    let options = PackingOptions::new(Codec::Int8);
    let (hung, other) = (options.of_another(), options.of_another());
    let held = hung.room.take(PACKING_BYTES - 1).await;
    let put = async |options: PackingOptions| {
        let (shelf, memory) = (Shelf::new(Kind::Disk, 0), Memory::new(64 << 20));
        let deadline = deadline::Options::default();
        let tier = Packing::new(Arc::new(shelf), options, deadline, Arc::default());
        tier.put(numbers(0).put(&memory)).await
    };
    put(other).await.unwrap();
    let soon = Duration::from_millis(20);
    let waits = tokio::time::timeout(soon, put(hung.clone())).await;
    assert!(waits.is_err());
    drop(held);
    put(hung).await.unwrap();
    // Where nothing is packed there is one room for all.
    let plain = PackingOptions::new(Codec::None);
    let held = plain.of_another().room.take(UNPACKING_BYTES - 1).await;
    let more = plain.of_another();
    let waits = tokio::time::timeout(soon, more.room.take(4 << 20)).await;
    assert!(held.is_some() && waits.is_err());
}

#[tokio::test]
async fn all_that_is_listed_can_be_removed_whichever_codec_wrote_it() {
    for (codec, _, _) in LOSSY {
        let (shelf, memory) = (Shelf::new(Kind::Disk, 0), Memory::new(64 << 20));
        let tier = around(&shelf, codec);
        for by_listing in [false, true] {
            let writers = [Codec::None, Codec::Lossless].into_iter();
            for (number, writer) in writers.chain(LOSSY.map(|(codec, ..)| codec)).enumerate() {
                let put = numbers(number as u64).put(&memory);
                around(&shelf, writer).put(put).await.unwrap();
            }
            let removed = if by_listing {
                clear(&tier, None).await
            } else {
                let listed = tier.list(None, 100).await.unwrap().objects;
                let names: Vec<_> = listed.into_iter().map(|object| object.name).collect();
                tier.remove(Removal::Named(&names)).await
            };
            assert_eq!(removed, Ok(6), "{codec:?}");
            assert_eq!(shelf.list(None, 100).await.unwrap().objects.len(), 0);
        }
    }
}
