//! Frames and messages: what is written is read, in whatever pieces it comes; all else is a named error.

use crate::samples::messages;
use kvcachepool_protocol::PROTOCOL_VERSION;
use kvcachepool_protocol::frame::*;
use kvcachepool_protocol::key::{EngineHash, unpack_hashes};
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::refs::{SectionRef, TornRefs, pack, unpack};
use proptest::prelude::*;

fn read_all(mut stream: &[u8], piece: usize) -> Result<Vec<(Header, Vec<u8>)>, FrameError> {
    let mut reader = FrameReader::new(MAX_BODY);
    let mut frames = Vec::new();
    while !stream.is_empty() {
        let (mut now, later) = stream.split_at(piece.min(stream.len()));
        while let Some(frame) = reader.take(&mut now)? {
            frames.push(frame);
        }
        assert!(now.is_empty());
        stream = later;
    }
    Ok(frames)
}

#[test]
fn every_message_comes_through_in_pieces_of_any_size() {
    let samples = messages::all();
    let stream: Vec<u8> = samples
        .iter()
        .flat_map(|s| frame(s.op, s.flags, s.tag, &s.body))
        .collect();
    for piece in [1, 7, 16, 17, 1000, stream.len()] {
        let frames = read_all(&stream, piece).unwrap();
        assert_eq!(frames.len(), samples.len());
        for ((header, body), s) in frames.iter().zip(&samples) {
            assert_eq!(Op::try_from(header.opcode), Ok(s.op));
            assert_eq!(
                (header.flags, header.tag, header.version),
                (s.flags, s.tag, PROTOCOL_VERSION)
            );
            assert_eq!(body, &s.body);
            assert_eq!((s.again)(body).unwrap(), s.body, "{}", s.name);
        }
    }
}

#[test]
fn every_opcode_of_the_protocol_has_a_sample() {
    let sampled: Vec<u8> = messages::all().iter().map(|s| s.op as u8).collect();
    for op in 1..=15u8 {
        let op = Op::try_from(op).unwrap();
        assert!(sampled.contains(&(op as u8)), "{op:?}");
    }
    assert_eq!(Op::try_from(0), Err(FrameError::UnknownOpcode(0)));
    assert_eq!(Op::try_from(16), Err(FrameError::UnknownOpcode(16)));
}

#[test]
fn a_frame_of_another_version_or_over_the_limit_is_refused_by_its_header() {
    let with = |version, length| {
        Header {
            length,
            version,
            opcode: 1,
            flags: 0,
            tag: 1,
        }
        .encode()
    };
    assert_eq!(
        Header::decode(&with(3, 0)),
        Err(FrameError::WrongVersion(3))
    );
    assert_eq!(
        Header::decode(&with(0, 0)),
        Err(FrameError::WrongVersion(0))
    );
    assert!(
        Header::decode(&with(2, 0)).is_ok(),
        "one version ahead is served"
    );
    let over = MAX_BODY as u32 + 1;
    assert_eq!(
        Header::decode(&with(1, over)),
        Err(FrameError::Oversized {
            length: over,
            limit: MAX_BODY
        })
    );
    let mut reader = FrameReader::new(100);
    let refused = Header {
        length: 0,
        version: 9,
        opcode: 4,
        flags: 0,
        tag: 1 << 40,
    };
    let mut stranger = FrameReader::new(100);
    assert!(stranger.take(&mut &refused.encode()[..]).is_err());
    assert_eq!(stranger.refused(), (4, 1 << 40));
    let oversized = reader.take(&mut &with(1, 101)[..]);
    assert_eq!(
        oversized,
        Err(FrameError::Oversized {
            length: 101,
            limit: 100
        })
    );
}

#[test]
fn a_partial_frame_is_pending() {
    let whole = frame(Op::Release, 0, 1, &[1, 2, 3]);
    for cut in 1..whole.len() {
        let mut reader = FrameReader::new(MAX_BODY);
        assert_eq!(reader.take(&mut &whole[..cut]), Ok(None));
        assert_eq!(reader.pending(), cut);
    }
}

#[test]
fn an_announced_body_takes_no_memory_before_it_comes() {
    let mut reader = FrameReader::new(MAX_BODY);
    let header = Header {
        length: MAX_BODY as u32,
        version: 1,
        opcode: 1,
        flags: 0,
        tag: 1,
    };
    reader.take(&mut &header.encode()[..]).unwrap();
    assert_eq!(reader.pending(), HEADER_BYTES);
}

#[derive(serde::Serialize)]
struct Later {
    request: &'static str,
    probe: u64,
    from: u32,
    to: u32,
    added_in_a_later_version: Vec<u8>,
}

#[test]
fn unknown_fields_are_ignored_and_absent_ones_take_their_default() {
    let later = Later {
        request: "r",
        probe: 1,
        from: 2,
        to: 3,
        added_in_a_later_version: vec![1],
    };
    let pin: Pin = decode(&encode(&later).unwrap()).unwrap();
    assert_eq!(
        (pin.request.as_str(), pin.probe, pin.from, pin.to),
        ("r", 1, 2, 3)
    );
    let report: Report = decode(&[0x80]).unwrap();
    assert_eq!(report, Report::default());
    let missing = decode::<Pin>(&[0x80]).unwrap_err();
    assert_eq!(
        missing.to_string(),
        "body is not a valid Pin: missing field `request`"
    );
}

#[test]
fn packed_values_of_odd_lengths_are_refused() {
    assert_eq!(unpack(&[0; 17]), Err(TornRefs(17)));
    assert_eq!(unpack(&[]), Ok(vec![]));
    assert_eq!(unpack_hashes(&[7; 64]).unwrap(), [EngineHash([7; 32]); 2]);
    let error = unpack_hashes(&[7; 63]).unwrap_err();
    assert_eq!((error.expected, error.got), (64, 63));
    assert_eq!(unpack_hashes(&[]).unwrap().len(), 0);
}

proptest! {
    #[test]
    fn any_stream_gives_frames_or_an_error(stream in prop::collection::vec(any::<u8>(), 0..300), piece in 1usize..50) {
        let _ = read_all(&stream, piece);
    }

    #[test]
    fn headers_round_trip(length in 0..=MAX_BODY as u32, opcode: u8, flags: u16, tag: u64) {
        let header = Header { length, version: 1, opcode, flags, tag };
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn references_round_trip(refs in prop::collection::vec(any::<[u32; 4]>(), 0..50)) {
        let refs: Vec<_> = refs.into_iter().map(|[a, b, c, d]| SectionRef::new(a, b, c, d)).collect();
        let mut shifted = vec![0];
        shifted.extend(pack(&refs));
        prop_assert_eq!(unpack(&shifted[1..]).unwrap(), refs);
    }

    #[test]
    fn any_changed_body_gives_a_message_that_round_trips_or_an_error(
        which in 0usize..20, at in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), cut in any::<prop::sample::Index>(),
    ) {
        let samples = messages::all();
        let s = &samples[which % samples.len()];
        let mut body = s.body.clone();
        for (i, b) in at {
            let i = i.index(body.len());
            body[i] = b;
        }
        for read in [&body[..], &body[..cut.index(body.len())]] {
            if let Ok(once) = (s.again)(read) {
                prop_assert_eq!((s.again)(&once).unwrap(), once);
            }
        }
    }

    #[test]
    fn any_body_gives_a_message_or_an_error(body in prop::collection::vec(any::<u8>(), 0..200)) {
        for s in messages::all() {
            let _ = (s.again)(&body);
        }
    }

    #[test]
    fn hot_messages_round_trip(request in "\\PC{0,40}", hashes in prop::collection::vec(any::<u8>(), 0..200), local: Option<u64>, n: u64, t: u32) {
        let probe = Probe { independent: t == 1, request: request.clone(), namespace: vec![], hashes: hashes.clone(), tail_tokens: t, local_tokens: local, budget_ms: n, max_load_tokens: local, prefill_tokens_per_s: n };
        prop_assert_eq!(decode::<Probe>(&encode(&probe).unwrap()).unwrap(), probe);
        let chunk = GrantChunk { bytes: 0, hash: hashes.clone(), parent: vec![], first_token: t, tokens: t, groups: t, block_hashes: hashes.clone() };
        let grant = Grant { request, namespace: hashes.clone(), chunks: vec![chunk.clone(), chunk], ttl_s: t };
        prop_assert_eq!(decode::<Grant>(&encode(&grant).unwrap()).unwrap(), grant);
        let sections = Sections { region: n, refs: hashes };
        prop_assert_eq!(decode::<Sections>(&encode(&sections).unwrap()).unwrap(), sections);
    }
}
