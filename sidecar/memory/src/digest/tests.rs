//! Compares digests of mappings with the library's over the same bytes, by every method that the CPU supports.

use super::*;
use proptest::prelude::*;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use xxhash_rust::xxh3::xxh3_128;

const MIB: u64 = 1 << 20;

/// A new digest for each method that this CPU supports.
fn hashers() -> Vec<Digest> {
    let copied = Digest(Hasher::Copied(Xxh3::new()));
    #[cfg(target_arch = "x86_64")]
    if let Some(sums) = Sums::new() {
        return vec![copied, Digest(Hasher::InPlace(sums))];
    }
    eprintln!("skipped: digests in place, this CPU has no AVX2");
    vec![copied]
}

fn filled(length: u64) -> (Mapping, Vec<u8>) {
    let mapping = Mapping::private("digest-test", length).unwrap();
    let mut random = fastrand::Rng::with_seed(length);
    let bytes: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
    assert!(mapping.write(0, &bytes));
    (mapping, bytes)
}

/// Adds parts that end at `cuts`, by each method.
fn agree(mapping: &Mapping, bytes: &[u8], offset: u64, length: u64, cuts: &[u64]) {
    let end = offset + length;
    let expected = xxh3_128(&bytes[offset as usize..end as usize]).to_le_bytes();
    for (hasher, mut digest) in hashers().into_iter().enumerate() {
        let mut from = offset;
        for to in cuts.iter().map(|cut| offset + cut).chain([end]) {
            assert!(digest.add(mapping, from, to - from));
            from = to;
        }
        let value = digest.value();
        assert_eq!(
            value, expected,
            "hasher {hasher}: {length} at {offset}, cut at {cuts:?}"
        );
    }
}

#[test]
fn a_digest_is_the_librarys_for_every_length() {
    let (mapping, bytes) = filled(4096);
    for length in 0..=2100 {
        agree(&mapping, &bytes, 0, length, &[]);
        agree(&mapping, &bytes, 4096 - length, length, &[]);
    }
}

#[test]
fn a_digest_is_the_librarys_at_every_address() {
    let (mapping, bytes) = filled(4 * MIB);
    for offset in 0..64 {
        for length in (230..=250).chain([511, 512, 513, 1024, 1025, 1088, 2100]) {
            agree(&mapping, &bytes, offset, length, &[]);
        }
        let copied = COPY_BYTES as u64;
        for length in [copied - 1, copied, copied + 1, 3 * copied - 4] {
            agree(&mapping, &bytes, offset, length, &[]);
        }
        let length = fastrand::Rng::with_seed(offset).u64(..3 * MIB);
        agree(&mapping, &bytes, offset, length, &[]);
    }
}

#[test]
fn a_digest_is_the_librarys_however_it_is_cut_in_two() {
    let (mapping, bytes) = filled(4096);
    for length in [240, 241, 256, 257, 320, 576, 1025, 1300] {
        for cut in 0..=length {
            agree(&mapping, &bytes, 1, length, &[cut]);
        }
    }
}

/// Parts of which some are held back, some are not, and some are whole blocks.
fn parts() -> impl Strategy<Value = Vec<u64>> {
    let part = prop_oneof![0..4u64, 60..70u64, 0..300u64, 1000..1100u64, 0..20_000u64];
    prop::collection::vec(part, 1..40)
}

proptest! {
    #[test]
    fn a_digest_is_the_librarys_whatever_its_parts(offset in 0..64u64, parts in parts()) {
        let (mapping, bytes) = filled(MIB);
        let cuts: Vec<u64> = parts
            .iter()
            .scan(0, |end, part| {
                *end += part;
                Some(*end)
            })
            .collect();
        let length = cuts.last().copied().unwrap_or(0);
        agree(&mapping, &bytes, offset, length, &cuts);
    }
}

#[test]
fn a_digest_can_be_asked_for_on_the_way() {
    let (mapping, bytes) = filled(4096);
    for mut digest in hashers() {
        for at in 0..40 {
            let expected = xxh3_128(&bytes[..at * 100]).to_le_bytes();
            assert_eq!(digest.value(), expected, "{at}");
            assert!(digest.add(&mapping, at as u64 * 100, 100));
        }
    }
}

#[test]
fn what_is_not_mapped_is_refused_and_changes_nothing() {
    let (mapping, bytes) = filled(4096);
    let expected = xxh3_128(&bytes).to_le_bytes();
    for mut digest in hashers() {
        assert!(digest.add(&mapping, 0, 1000));
        for (offset, length) in [
            (0, 4097),
            (1, 4096),
            (4097, 0),
            (u64::MAX, 1),
            (1, u64::MAX),
        ] {
            assert!(
                !digest.add(&mapping, offset, length),
                "{length} at {offset}"
            );
        }
        assert!(digest.add(&mapping, 1000, 3096));
        assert!(digest.add(&mapping, 4096, 0));
        assert_eq!(digest.value(), expected);
    }
    assert_eq!(mapping.xxh3_128(0, 4096), Some(expected));
    assert_eq!(mapping.xxh3_128(1, 4096), None);
}

#[test]
fn a_writer_beside_it_spoils_the_digests_of_what_it_writes_and_nothing_else() {
    const ROUNDS: u64 = 2_000;
    let (mapping, bytes) = filled(MIB);
    let (from, to) = (4_099, 600_001);
    let alone = xxh3_128(&bytes[from..to]).to_le_bytes();
    let written = AtomicU64::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                assert!(mapping.write(0, &vec![round as u8; from]));
                assert!(mapping.write(to as u64, &vec![round as u8; MIB as usize - to]));
                written.store(round + 1, Relaxed);
            }
        });
        while written.load(Relaxed) < ROUNDS {
            for (mut all, mut own) in hashers().into_iter().zip(hashers()) {
                assert!(all.add(&mapping, 0, MIB));
                all.value();
                assert!(own.add(&mapping, from as u64, (to - from) as u64));
                assert_eq!(own.value(), alone);
            }
        }
    });
    let mut bytes = vec![0; MIB as usize];
    assert!(mapping.read(0, &mut bytes));
    agree(&mapping, &bytes, 0, MIB, &[]);
}
