//! Any stream, cut anywhere, gives frames or a named error; any body gives a message that reads back to itself, or a named error.
#![no_main]

use kvcachepool_protocol::domain::{RankPart, SchedulerPart, join};
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_REPLY, FrameReader, Header, MAX_BODY, Op};
use kvcachepool_protocol::key::unpack_hashes;
use kvcachepool_protocol::message::*;
use kvcachepool_protocol::object::Fidelity;
use kvcachepool_protocol::{refs, remote};
use libfuzzer_sys::fuzz_target;
use serde::{Serialize, de::DeserializeOwned};

// The first byte says how long the pieces are that the rest comes in.
fuzz_target!(|input: &[u8]| {
    let Some((piece, bytes)) = input.split_first() else {
        return;
    };
    let mut reader = FrameReader::new(MAX_BODY);
    for mut now in bytes.chunks(usize::from(*piece).max(1)) {
        loop {
            match reader.take(&mut now) {
                Ok(Some((header, body))) => message(&header, &body),
                Ok(None) => break,
                Err(_) => return,
            }
        }
        assert!(now.is_empty());
    }
});

fn message(header: &Header, body: &[u8]) {
    assert!(body.len() == header.length as usize);
    if header.flags & FLAG_ERROR != 0 {
        return read::<ErrorBody>(body, |_| ());
    }
    let Ok(op) = Op::try_from(header.opcode) else {
        return;
    };
    let reply = header.flags & FLAG_REPLY != 0;
    match (op, reply) {
        (Op::Hello, false) => {
            read::<Hello>(body, |m| packed(&m.grants));
            read::<remote::Hello>(body, |_| ());
        }
        (Op::Hello, true) => {
            read::<HelloReply>(body, |_| ());
            read::<remote::HelloReply>(body, |_| ());
        }
        (Op::Register, false) => read::<Register>(body, register),
        (Op::Register, true) => read::<RegisterReply>(body, |_| ()),
        (Op::Probe, false) => read::<Probe>(body, |m| {
            let _ = unpack_hashes(&m.hashes);
        }),
        (Op::Probe, true) => {
            read::<ProbeReply>(body, |m| packed(&m.refs));
            read::<remote::ProbeReply>(body, |_| ());
        }
        (Op::Pin, _) => read::<Pin>(body, |_| ()),
        (Op::Release, _) => read::<Release>(body, |_| ()),
        (Op::Grant, false) => read::<Grant>(body, |_| ()),
        (Op::Grant, true) => read::<GrantReply>(body, |m| packed(&m.refs)),
        (Op::Commit, _) => read::<Sections>(body, |m| packed(&m.refs)),
        (Op::Abort, false) => {
            read::<Sections>(body, |m| packed(&m.refs));
            read::<Abort>(body, |_| ());
        }
        (Op::Abort, true) => read::<AbortReply>(body, |_| ()),
        (Op::Events, false) => read::<Events>(body, |_| ()),
        (Op::Events, true) => read::<EventsReply>(body, |_| ()),
        (Op::Admin, _) => read::<Admin>(body, |_| ()),
        (Op::Report, _) => read::<Report>(body, |_| ()),
        (Op::Window, false) => read::<Window>(body, |_| ()),
        (Op::Window, true) => read::<WindowReply>(body, |_| ()),
        (Op::Objects, false) => read::<Objects>(body, |_| ()),
        (Op::Objects, true) => read::<ObjectsReply>(body, |_| ()),
        (Op::Read, false) => read::<remote::Parts>(body, parts),
        (Op::Read, true) => data::<remote::ReadReply>(header, body),
        (Op::Write, false) => data::<remote::Parts>(header, body),
        (Op::Write, true) => read::<remote::WriteReply>(body, |_| ()),
    }
}

fn read<M: Serialize + DeserializeOwned>(body: &[u8], check: impl Fn(&M)) {
    if let Ok(message) = decode::<M>(body) {
        check(&message);
        let again = encode(&message).expect("what was read can be written");
        let twice: M = decode(&again).expect("what was written can be read");
        // Compared as bytes: a NaN is not equal to itself.
        assert!(encode(&twice).is_ok_and(|bytes| bytes == again));
    }
}

/// A frame with data: what it splits into makes the same frame.
fn data<M: Serialize + DeserializeOwned>(header: &Header, body: &[u8]) {
    if let Ok((message, data)) = remote::split::<M>(header.flags, body) {
        let mut again = remote::front(&message).expect("what was read can be written");
        again.extend(data);
        let (_, same) = remote::split::<M>(header.flags, &again).expect("it can be read again");
        assert_eq!(same, data);
    }
}

fn parts(parts: &remote::Parts) {
    assert!(parts.data_bytes().is_none_or(|bytes| bytes <= MAX_BODY));
}

fn packed(bytes: &[u8]) {
    if let Ok(read) = refs::unpack(bytes) {
        assert_eq!(refs::pack(&read), bytes);
    }
}

fn register(register: &Register) {
    if let (Ok(scheduler), Ok(rank)) = (SchedulerPart::check(register), RankPart::check(register)) {
        let _ = join(&scheduler, &[&rank], Fidelity::Exact);
    }
}
