//! What loses something is named so, comes back as what it says, and is nobody else's.

use super::*;
use kvcachepool_kernels::codec::relative_error;
use kvcachepool_protocol::object::{Axis, Dim, Element, Fidelity, Form};

const LOSSY: [(Codec, f64, u64); 4] = [
    (Codec::Fp8, 0.05, 60),
    (Codec::Int8, 0.05, 60),
    (Codec::Int4, 0.3, 40),
    (Codec::CacheGen, 0.3, 40),
];

fn around(shelf: &Shelf, codec: Codec) -> Packing {
    Packing::new(Arc::new(shelf.clone()), codec, Arc::default())
}

/// Blocks of 3 layers with 4 heads of 16 tokens, numbers of two bytes.
fn numbers(number: u64) -> Sample {
    let dim = |(axis, size)| Dim { axis, size };
    let dims = [
        (Axis::Layer, 3),
        (Axis::Channel, 4),
        (Axis::Token, 16),
        (Axis::Half, 2),
        (Axis::Channel, 8),
    ];
    let form = Form::new(Element::Bf16, &dims.map(dim)).unwrap();
    let block = u64::from(form.block_bytes().unwrap());
    let mut sample = Sample::new(1, number, &[49 * block, block, 10 * block]);
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
        assert_eq!(other.remove(std::slice::from_ref(&name)).await, Ok(0));
    }
    assert_eq!(
        writer.lookup(std::slice::from_ref(&name)).await,
        Ok(vec![true])
    );
    let listed = writer.list(None, 10).await.unwrap().objects;
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].name, name);
    assert_eq!(writer.head(&name).await.unwrap().fidelity, Fidelity::Exact);
    assert_eq!(writer.remove(std::slice::from_ref(&name)).await, Ok(1));
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
        assert_eq!(tier.get(get.clone()).await, Ok(sample.object.clone()));
        assert!(sample.lies_in(&get.places));
        assert_eq!(tier.packed().amounts()[0].raw_bytes, 0);
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
