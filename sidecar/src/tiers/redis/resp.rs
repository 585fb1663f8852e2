//! Redis' wire format (RESP2): commands to bytes, bytes to replies. Total and bounded: any bytes give a reply, a wish for more, or a named
//! error, and a length that the other side claims takes no memory before its bytes are there.

/// Longest line of a reply: a status, an error, a number.
pub const LINE_MAX: usize = 16 << 10;
/// Longest bulk string that is kept as a whole; longer ones go into spans piece by piece.
pub const BULK_MAX: u64 = 8 << 20;
/// Most parts of an array.
pub const PARTS_MAX: u64 = 1 << 18;
/// Arrays within arrays.
const DEPTH_MAX: u32 = 6;

/// One reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A status such as `OK`.
    Simple(String),
    /// The server refused; its first word is the kind.
    Error(String),
    /// A number.
    Integer(i64),
    /// Bytes.
    Bulk(Vec<u8>),
    /// Nothing there.
    Nil,
    /// Parts.
    Array(Vec<Reply>),
}

/// The first line of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Head {
    /// The whole reply: nothing but this line.
    Whole(Reply),
    /// As many bytes and a line end follow.
    Bulk(u64),
    /// As many replies follow.
    Array(u64),
}

/// Bytes that are no reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// The first byte is none of the protocol's.
    #[error("a reply begins with byte {0:#04x}")]
    Kind(u8),
    /// A line without an end.
    #[error("a line of a reply is longer than {LINE_MAX} bytes")]
    Line,
    /// A number that is none.
    #[error("a number in a reply is none")]
    Number,
    /// Too long, too many or too deep.
    #[error("a reply is larger than any that was asked for")]
    Large,
    /// Bytes that are not followed by a line end.
    #[error("a reply does not end where it says")]
    End,
}

/// Reads the first line of a reply: what it is, and how many bytes it takes. None: more bytes are needed.
pub fn head(bytes: &[u8]) -> Result<Option<(Head, usize)>, BadReply> {
    let Some((kind, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    if !matches!(kind, b'+' | b'-' | b':' | b'$' | b'*') {
        return Err(BadReply::Kind(*kind));
    }
    let within = rest.get(..LINE_MAX).unwrap_or(rest);
    let Some(end) = within.windows(2).position(|pair| pair == b"\r\n") else {
        return if rest.len() >= LINE_MAX {
            Err(BadReply::Line)
        } else {
            Ok(None)
        };
    };
    let line = String::from_utf8_lossy(rest.get(..end).unwrap_or_default());
    let number = || line.parse::<i64>().map_err(|_| BadReply::Number);
    let head = match kind {
        b'+' => Head::Whole(Reply::Simple(line.into_owned())),
        b'-' => Head::Whole(Reply::Error(line.into_owned())),
        b':' => Head::Whole(Reply::Integer(number()?)),
        _ => match (kind, number()?) {
            (_, -1) => Head::Whole(Reply::Nil),
            (b'$', length) => Head::Bulk(u64::try_from(length).map_err(|_| BadReply::Number)?),
            (_, parts) => Head::Array(u64::try_from(parts).map_err(|_| BadReply::Number)?),
        },
    };
    Ok(Some((head, end + 3)))
}

/// Reads a whole reply and how many bytes it takes. None: more bytes are needed.
pub fn reply(bytes: &[u8]) -> Result<Option<(Reply, usize)>, BadReply> {
    nested(bytes, DEPTH_MAX)
}

fn nested(bytes: &[u8], depth: u32) -> Result<Option<(Reply, usize)>, BadReply> {
    let Some((head, used)) = head(bytes)? else {
        return Ok(None);
    };
    let rest = bytes.get(used..).unwrap_or_default();
    match head {
        Head::Whole(reply) => Ok(Some((reply, used))),
        Head::Bulk(length) if length > BULK_MAX => Err(BadReply::Large),
        Head::Bulk(length) => {
            let length = length as usize;
            let Some((text, end)) = rest.split_at_checked(length) else {
                return Ok(None);
            };
            match end {
                [b'\r', b'\n', ..] => Ok(Some((Reply::Bulk(text.to_vec()), used + length + 2))),
                [] | [b'\r'] => Ok(None),
                _ => Err(BadReply::End),
            }
        }
        Head::Array(parts) if parts > PARTS_MAX || depth == 0 => Err(BadReply::Large),
        Head::Array(parts) => {
            let (mut replies, mut at) = (Vec::new(), used);
            for _ in 0..parts {
                let rest = bytes.get(at..).unwrap_or_default();
                let Some((reply, used)) = nested(rest, depth - 1)? else {
                    return Ok(None);
                };
                replies.push(reply);
                at += used;
            }
            Ok(Some((Reply::Array(replies), at)))
        }
    }
}

/// Writes a command.
pub fn command(out: &mut Vec<u8>, words: &[&[u8]]) {
    begin(out, words.len());
    for each in words {
        word(out, each);
    }
}

/// Writes the beginning of a command of so many words.
pub fn begin(out: &mut Vec<u8>, words: usize) {
    out.extend_from_slice(format!("*{words}\r\n").as_bytes());
}

/// Writes a word of a command.
pub fn word(out: &mut Vec<u8>, bytes: &[u8]) {
    length(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Writes what stands before a word of so many bytes; behind it stands a line end.
pub fn length(out: &mut Vec<u8>, bytes: u64) {
    out.extend_from_slice(format!("${bytes}\r\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(reply: &Reply) -> Vec<u8> {
        match reply {
            Reply::Simple(text) => format!("+{text}\r\n").into_bytes(),
            Reply::Error(text) => format!("-{text}\r\n").into_bytes(),
            Reply::Integer(number) => format!(":{number}\r\n").into_bytes(),
            Reply::Nil => b"$-1\r\n".to_vec(),
            Reply::Bulk(bytes) => {
                let mut out = format!("${}\r\n", bytes.len()).into_bytes();
                out.extend_from_slice(bytes);
                out.extend_from_slice(b"\r\n");
                out
            }
            Reply::Array(parts) => {
                let mut out = format!("*{}\r\n", parts.len()).into_bytes();
                out.extend(parts.iter().flat_map(bytes_of));
                out
            }
        }
    }

    fn replies() -> impl Strategy<Value = Reply> {
        let leaf = prop_oneof![
            "[ -~]{0,40}".prop_map(Reply::Simple),
            "[ -~]{0,40}".prop_map(Reply::Error),
            any::<i64>().prop_map(Reply::Integer),
            prop::collection::vec(any::<u8>(), 0..100).prop_map(Reply::Bulk),
            Just(Reply::Nil),
        ];
        leaf.prop_recursive(3, 40, 8, |inner| {
            prop::collection::vec(inner, 0..8).prop_map(Reply::Array)
        })
    }

    proptest! {
        #[test]
        fn a_reply_reads_back_and_needs_all_of_its_bytes(
            expected in replies(),
            behind in prop::collection::vec(any::<u8>(), 0..8),
        ) {
            let mut bytes = bytes_of(&expected);
            let length = bytes.len();
            for cut in 0..length {
                prop_assert_eq!(reply(&bytes[..cut]), Ok(None));
            }
            bytes.extend(behind);
            prop_assert_eq!(reply(&bytes), Ok(Some((expected, length))));
        }

        #[test]
        fn any_bytes_give_a_reply_a_wish_for_more_or_an_error(
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            if let Ok(Some((_, used))) = reply(&bytes) {
                prop_assert!(used <= bytes.len());
            }
        }

        #[test]
        fn bytes_that_look_like_a_reply_do_too(
            text in "[-+:$*0-9\r\na]{0,60}",
        ) {
            if let Ok(Some((_, used))) = reply(text.as_bytes()) {
                prop_assert!(used <= text.len());
            }
        }
    }

    #[test]
    fn what_is_larger_than_was_asked_for_is_refused_before_it_is_there() {
        let deep = b"*1\r\n".repeat(50);
        for (bytes, error) in [
            (&b"$8388609\r\n"[..], BadReply::Large),
            (b"*262145\r\n", BadReply::Large),
            (&deep, BadReply::Large),
            (b"$-2\r\n", BadReply::Number),
            (b"*x\r\n", BadReply::Number),
            (b":\r\n", BadReply::Number),
            (b"$99999999999999999999\r\n", BadReply::Number),
            (b"$1\r\nabc", BadReply::End),
            (b"HTTP/1.1 400", BadReply::Kind(b'H')),
        ] {
            assert_eq!(reply(bytes), Err(error), "{}", bytes.escape_ascii());
        }
        let endless = [b"+".as_slice(), &vec![b'a'; LINE_MAX]].concat();
        assert_eq!(reply(&endless), Err(BadReply::Line));
    }

    #[test]
    fn a_command_is_its_words_with_their_lengths() {
        let mut out = Vec::new();
        command(&mut out, &[b"SET", b"a key", b""]);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$5\r\na key\r\n$0\r\n\r\n");
    }
}
