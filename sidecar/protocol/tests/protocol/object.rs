//! Objects: one encoding, read back by anybody, and refused by name when a bit of it is wrong.

use crate::samples::object::object;
use kvcachepool_protocol::key::*;
use kvcachepool_protocol::object::*;
use proptest::prelude::*;
use zerocopy::{FromBytes, IntoBytes};

type Change<'a> = &'a dyn Fn(&mut HeaderRecord);

fn reseal(bytes: &mut [u8]) {
    let at = HEADER_BYTES - 16;
    let sum = digest(&bytes[..at]);
    bytes[at..HEADER_BYTES].copy_from_slice(&sum);
}

fn header(bytes: &[u8]) -> HeaderRecord {
    HeaderRecord::read_from_bytes(&bytes[..HEADER_BYTES]).unwrap()
}

fn dim(axis: u8, size: u32) -> DimRecord {
    let size = size.into();
    DimRecord { axis, size }
}

/// Changes the header and makes its digest right again.
fn changed(bytes: &[u8], change: impl FnOnce(&mut HeaderRecord)) -> Result<Object, BadObject> {
    let mut bytes = bytes.to_vec();
    let mut record = header(&bytes);
    change(&mut record);
    bytes[..HEADER_BYTES].copy_from_slice(record.as_bytes());
    reseal(&mut bytes);
    Object::decode(&bytes)
}

#[test]
fn an_object_reads_back_with_its_sections_where_they_are_said_to_be() {
    for (sections, hashes, ids) in [
        (1, 0, false),
        (2, 16, false),
        (5, 2, true),
        (128, 256, true),
    ] {
        let (object, payload) = object(sections, hashes, ids);
        let mut bytes = object.encode().unwrap();
        assert_eq!(bytes.len() as u64, object.head_bytes());
        assert_eq!(
            head_bytes(&bytes[..HEADER_BYTES]).unwrap(),
            object.head_bytes()
        );
        for (offset, section) in object.offsets().iter().zip(&payload) {
            assert_eq!(offset % ALIGN, 0);
            bytes.resize(*offset as usize, 0);
            bytes.extend_from_slice(section);
        }
        assert_eq!(bytes.len() as u64, object.total_bytes());
        let back = Object::decode(&bytes).unwrap();
        assert_eq!(back, object);
        for (section, bytes) in back.sections.iter().zip(&payload) {
            assert_eq!(section.stored_bytes, bytes.len() as u64);
            assert_eq!(section.stored_digest, digest(bytes));
        }
    }
}

#[test]
fn the_bytes_are_what_they_were() {
    let (object, _) = object(2, 4, false);
    let bytes = object.encode().unwrap();
    assert_eq!(&bytes[..16], b"KVCPOBJ1\x01\0\0\0\x01\0\0\0");
    assert_eq!(
        blake3::hash(&bytes).to_hex().as_str(),
        "e5fff3616be12d04c77a4194dec7b7938380260fd4a81970e0cdadbc17830f36"
    );
    assert_eq!(
        object.name().s3("prod/"),
        format!(
            "prod/0101010101010101/0202020202020202/{}/{}.exact.kv",
            &object.key().hex()[..2],
            object.key().hex()
        )
    );
    assert_eq!(
        object.name().redis(),
        format!(
            "kvcp:0101010101010101:0202020202020202:{{{}}}.exact",
            object.key().hex()
        )
    );
    let mut head = [0; 16];
    head[15] = 0xAB;
    assert_eq!(
        object.name().redis_segment(&head, 3),
        format!(
            "{}:000000000000000000000000000000ab:3",
            object.name().redis()
        )
    );
}

#[test]
fn a_key_in_redis_has_one_spelling() {
    let name = object(1, 1, false).0.name();
    let key = name.redis();
    let segment = name.redis_segment(&[0x5A; 16], 12);
    assert_eq!(ObjectName::from_redis(&key), Ok((name.clone(), false)));
    assert_eq!(ObjectName::from_redis(&segment), Ok((name, true)));
    for wrong in [
        key.to_uppercase(),
        key.replace(['{', '}'], ""),
        key.replace("exact", "lossy"),
        format!("{key}:1"),
        format!("{segment}:1"),
        segment.replace(":12", ":012"),
        segment.replace(":5a", ":5A"),
        key.replacen("kvcp", "other", 1),
        "kvcp:".into(),
        String::new(),
    ] {
        assert!(ObjectName::from_redis(&wrong).is_err(), "{wrong}");
    }
}

#[test]
fn every_lie_of_a_header_has_its_name() {
    let (object, _) = object(2, 4, true);
    let bytes = object.encode().unwrap();
    let unsupported = |what, value| Err(BadObject::Unsupported { what, value });
    assert_eq!(
        changed(&bytes, |h| h.magic[0] = 0),
        Err(BadObject::NotAnObject)
    );
    assert_eq!(
        changed(&bytes, |h| h.version = 2.into()),
        Err(BadObject::OtherVersion(2))
    );
    assert_eq!(
        changed(&bytes, |h| h.flags = 1.into()),
        unsupported("flags", 1)
    );
    assert_eq!(changed(&bytes, |h| h.kind = 9), unsupported("key kind", 9));
    assert_eq!(changed(&bytes, |h| h.codec = 6), unsupported("codec", 6));
    assert_eq!(
        changed(&bytes, |h| h.fidelity = 5),
        unsupported("fidelity", 5)
    );
    assert_eq!(
        changed(&bytes, |h| h.element = 4),
        unsupported("element", 4)
    );
    assert_eq!(changed(&bytes, |h| h.cipher = 3), unsupported("cipher", 3));
    assert_eq!(
        changed(&bytes, |h| h.dims[0] = dim(5, 1)),
        unsupported("axis", 5)
    );
    assert_eq!(
        changed(&bytes, |h| h.reserved[7] = 1),
        unsupported("a field of the header", 1)
    );
    let invalid: [(&str, Change); 17] = [
        ("the form is invalid", &|h| h.dims[0] = dim(3, 0)),
        ("the form is invalid", &|h| h.dims[0] = dim(2, 3)),
        ("the form is invalid", &|h| {
            h.element = 1;
            h.dims[0] = dim(3, u32::MAX)
        }),
        ("the form is invalid", &|h| h.dims[4] = dim(3, 1)),
        ("the codec loses more", &|h| h.codec = 2),
        ("the head is not a multiple", &|h| h.head_bytes = 100.into()),
        ("the head is not a multiple", &|h| h.head_bytes = 0.into()),
        ("the head is too long", &|h| h.head_bytes = (1 << 30).into()),
        ("the head is shorter", &|h| {
            h.block_hashes = 1_000_000.into()
        }),
        ("the token count", &|h| h.tokens = 0.into()),
        ("the part index", &|h| h.part = 1.into()),
        ("the number of token ids", &|h| h.tokens = 255.into()),
        ("a nonce without", &|h| h.nonce[0] = 1),
        ("the key does not match", &|h| h.key[0] ^= 1),
        ("the key does not match", &|h| h.model[0] ^= 1),
        ("section offsets are not", &|h| h.total_bytes = 1.into()),
        ("engine name or version is not UTF-8", &|h| {
            h.engine[0] = 0xff
        }),
    ];
    for (text, change) in invalid {
        let error = changed(&bytes, change).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
    let mut other = bytes.clone();
    other[HEADER_BYTES + 3] ^= 1;
    assert_eq!(Object::decode(&other), Err(BadObject::TableCorrupt));
    other = bytes.clone();
    other[100] ^= 1;
    assert_eq!(Object::decode(&other), Err(BadObject::HeaderCorrupt));
}

#[test]
fn what_cannot_be_read_back_is_not_written() {
    let (good, _) = object(2, 4, false);
    let refuse = |change: &dyn Fn(&mut Object)| {
        let mut o = good.clone();
        change(&mut o);
        o.encode().unwrap_err()
    };
    for error in [
        refuse(&|o| o.sections.clear()),
        refuse(&|o| o.sections.swap(0, 1)),
        refuse(&|o| o.sections[1] = o.sections[0]),
        refuse(&|o| o.sections[0].raw_bytes += 1),
        refuse(&|o| o.sections[0].stored_bytes = 0),
        refuse(&|o| o.sections[0].stored_bytes = u64::MAX),
        refuse(&|o| o.tokens = MAX_TOKENS + 1),
        refuse(&|o| o.token_ids = vec![1]),
        refuse(&|o| o.block_hashes.push(EngineHash([1; 32]))),
        refuse(&|o| o.engine = "x".repeat(17)),
        refuse(&|o| o.engine_version = "a\0b".into()),
    ] {
        assert!(matches!(error, BadObject::Invalid(_)), "{error}");
    }
}

#[test]
fn names_have_one_spelling() {
    let (object, _) = object(1, 0, false);
    let name = object.name();
    for prefix in ["", "prod", "/a/b/"] {
        assert_eq!(
            ObjectName::from_s3(prefix, &name.s3(prefix)),
            Ok(name.clone())
        );
    }
    let good = name.s3("");
    for bad in [
        good.to_uppercase(),
        good.replace(".exact", ".int9"),
        good.replace(".exact", ""),
        format!("x{good}"),
        good[1..].to_string(),
        good.replacen('/', "//", 1),
        String::new(),
    ] {
        assert!(ObjectName::from_s3("", &bad).is_err(), "{bad}");
    }
    assert!(ObjectName::from_s3("prod", &good).is_err());
}

#[test]
fn what_may_be_lost_and_what_numbers_are_stand_in_name_and_head() {
    let (mut object, _) = object(2, 4, true);
    let mut names = Vec::new();
    for fidelity in Fidelity::ALL {
        for element in [Element::Opaque, Element::Bf16, Element::F16, Element::F32] {
            let two = Axis::ALL.map(|axis| Dim { axis, size: 2 });
            let most = [Dim {
                axis: Axis::Token,
                size: 3,
            }; MAX_DIMS];
            for dims in [&[][..], &two, &most] {
                (object.fidelity, object.form) = (fidelity, Form::new(element, dims).unwrap());
                let read = Object::decode(&object.encode().unwrap()).unwrap();
                assert_eq!(read, object);
            }
        }
        let name = object.name();
        assert_eq!(ObjectName::from_s3("p", &name.s3("p")), Ok(name.clone()));
        assert_eq!(
            ObjectName::from_redis(&name.redis()),
            Ok((name.clone(), false))
        );
        assert!(!names.contains(&name.redis()));
        names.push(name.redis());
    }
}

proptest! {
    #[test]
    fn any_bytes_give_an_object_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let _ = Object::decode(&bytes);
        let _ = head_bytes(&bytes);
    }

    #[test]
    fn any_header_with_a_right_digest_gives_an_object_or_an_error(
        sections in 1usize..4, at in prop::collection::vec((12usize..HEADER_BYTES - 16, any::<u8>()), 1..6),
    ) {
        let mut bytes = object(sections, 3, false).0.encode().unwrap();
        for (i, b) in at {
            bytes[i] = b;
        }
        reseal(&mut bytes);
        if let Ok(read) = Object::decode(&bytes) {
            // There is one encoding: what is taken is what would be written.
            prop_assert_eq!(read.encode().unwrap(), bytes);
        }
    }

    #[test]
    fn a_torn_object_is_an_error(cut in 0usize..4096) {
        let bytes = object(3, 16, false).0.encode().unwrap();
        let cut = cut.min(bytes.len() - 1);
        let is_torn = matches!(Object::decode(&bytes[..cut]), Err(BadObject::Torn { .. }));
        prop_assert!(is_torn);
    }

    #[test]
    fn any_flipped_bit_of_the_head_is_noticed(bit in 0usize..(512 + 3 * 64 + 16 * 32) * 8) {
        let mut bytes = object(3, 16, false).0.encode().unwrap();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Object::decode(&bytes).is_err());
    }
}
