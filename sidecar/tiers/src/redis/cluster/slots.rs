//! Slots of a cluster: the slot of a key, and the owners of slots according to a node.

use crate::redis::connection::Connection;
use crate::redis::fault::Fault;
use crate::redis::resp::Reply;
use crate::redis::url::Address;

pub const SLOTS: usize = 16_384;

/// The slot of a key: of the text in its first braces, if there is any.
pub fn slot(key: &str) -> u16 {
    let inner = key
        .split_once('{')
        .and_then(|(_, rest)| rest.split_once('}'));
    let hashed = match inner {
        Some((tag, _)) if !tag.is_empty() => tag,
        _ => key,
    };
    // CRC-16 of XMODEM.
    let crc = hashed.bytes().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ u16::from(byte) << 8, |crc, _| {
            if crc & 0x8000 == 0 {
                crc << 1
            } else {
                crc << 1 ^ 0x1021
            }
        })
    });
    crc % SLOTS as u16
}

/// The owner of each slot according to the node at `own`. A node that knows no owner at all is an error.
pub async fn ask(c: &mut Connection, own: Option<Address>) -> Result<Vec<Option<Address>>, Fault> {
    c.command(&[b"CLUSTER", b"SLOTS"]);
    let answer = match c.answer().await {
        Err(Fault::Refused(text)) if text.contains("cluster support disabled") => {
            let why = "the server is not a cluster node: use redis:// or rediss://";
            return Err(Fault::Of(crate::Cause::Config, why.into()));
        }
        answer => answer?,
    };
    let own = match own {
        Some(Address::Tcp(host, _)) => host,
        _ => String::new(),
    };
    let slots = read(&answer, &own);
    let slots = slots.ok_or_else(|| {
        Fault::protocol("unexpected reply to CLUSTER SLOTS: expected slot ranges")
    })?;
    match slots.iter().any(Option::is_some) {
        true => Ok(slots),
        false => Err(Fault::Refused(
            "CLUSTERDOWN the node knows no owner of slots".into(),
        )),
    }
}

/// Parses the owner of each slot; `own` is the host that answered.
fn read(answer: &Reply, own: &str) -> Option<Vec<Option<Address>>> {
    let Reply::Array(ranges) = answer else {
        return None;
    };
    let mut slots = vec![None; SLOTS];
    for range in ranges {
        let Reply::Array(parts) = range else {
            return None;
        };
        let [
            Reply::Integer(from),
            Reply::Integer(to),
            Reply::Array(master),
            ..,
        ] = &parts[..]
        else {
            return None;
        };
        let [host, Reply::Integer(port), ..] = &master[..] else {
            return None;
        };
        let host = match host {
            Reply::Bulk(host) if !host.is_empty() => String::from_utf8(host.clone()).ok()?,
            Reply::Bulk(_) | Reply::Nil => own.to_string(),
            _ => return None,
        };
        let address = Address::Tcp(host, u16::try_from(*port).ok()?);
        let (from, to) = (usize::try_from(*from).ok()?, usize::try_from(*to).ok()?);
        for owner in slots.get_mut(from..=to)? {
            // With one owner per slot, any reply is parsed in bounded time.
            if owner.replace(address.clone()).is_some() {
                return None;
            }
        }
    }
    Some(slots)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slots_are_those_of_the_specification() {
        for (key, expected) in [
            ("123456789", 0x31C3),
            ("foo", 12_182),
            ("{user1000}.following", 3_443),
            ("{user1000}.followers", 3_443),
            ("foo{}{bar}", 8_363),
            ("foo{{bar}}zap", 4_015),
            ("foo{bar}{zap}", 5_061),
        ] {
            assert_eq!(slot(key), expected, "{key}");
        }
    }

    #[test]
    fn a_map_is_read_with_what_nobody_owns_left_open() {
        let bulk = |text: &str| Reply::Bulk(text.as_bytes().to_vec());
        let range = |from, to, host: Reply, port| {
            let master = Reply::Array(vec![host, Reply::Integer(port), bulk("id")]);
            Reply::Array(vec![Reply::Integer(from), Reply::Integer(to), master])
        };
        let answer = Reply::Array(vec![
            range(0, 99, bulk("a"), 1),
            range(200, 16_383, Reply::Nil, 2),
        ]);
        let slots = read(&answer, "own").unwrap();
        assert_eq!(slots[99], Some(Address::Tcp("a".into(), 1)));
        assert_eq!(slots[100], None);
        assert_eq!(slots[16_383], Some(Address::Tcp("own".into(), 2)));
        let twice = Reply::Array(vec![range(0, 9, bulk("a"), 1), range(9, 9, bulk("b"), 1)]);
        assert_eq!(read(&twice, "own"), None, "slot 9 has two owners");
        for wrong in [
            range(0, 16_384, bulk("a"), 1),
            range(-1, 5, bulk("a"), 1),
            range(6, 5, bulk("a"), 1),
            range(0, 5, bulk("a"), 70_000),
            Reply::Nil,
        ] {
            let read = read(&Reply::Array(vec![wrong.clone()]), "own");
            let nothing = read.is_none_or(|slots| slots.iter().all(Option::is_none));
            assert!(nothing, "{wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_range_is_read_or_refused(from in any::<i64>(), to in any::<i64>(), port in any::<i64>()) {
            let master = Reply::Array(vec![Reply::Nil, Reply::Integer(port)]);
            let range = Reply::Array(vec![Reply::Integer(from), Reply::Integer(to), master]);
            read(&Reply::Array(vec![range]), "own");
        }
    }
}
