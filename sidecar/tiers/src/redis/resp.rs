//! Redis' wire format (RESP2): encodes commands, parses replies. Total and bounded: any bytes give a reply, a request for more bytes, or an
//! error, and a length claimed by the other side takes no memory before its bytes arrive.

/// Longest line of a reply: a status, an error or a number.
pub const LINE_MAX: usize = 16 << 10;
/// Longest bulk string that is kept as a whole; longer ones are written into spans piece by piece.
pub const BULK_MAX: u64 = 8 << 20;
pub const PARTS_MAX: u64 = 1 << 18;
/// Deepest nesting of arrays.
const DEPTH_MAX: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// A status such as `OK`.
    Simple(String),
    /// An error; its first word is the kind.
    Error(String),
    Integer(i64),
    Bulk(Vec<u8>),
    /// No value.
    Nil,
    Array(Vec<Reply>),
}

/// The first line of a reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Head {
    /// The whole reply is this line.
    Whole(Reply),
    /// This many bytes and a line end follow.
    Bulk(u64),
    /// This many replies follow.
    Array(u64),
}

/// Bytes that are not a valid reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BadReply {
    /// The first byte is not a RESP type.
    #[error("a reply begins with byte {0:#04x}")]
    Kind(u8),
    #[error("a line of a reply is longer than {LINE_MAX} bytes")]
    Line,
    #[error("invalid number in a reply")]
    Number,
    /// Too long, too many or too deep.
    #[error("a reply is larger than any expected one")]
    Large,
    /// No line end after the stated number of bytes.
    #[error("a reply does not end at its stated length")]
    End,
}

/// Parses the first line of a reply, and returns its length. `None`: more bytes are needed.
pub fn head(bytes: &[u8]) -> Result<Option<(Head, usize)>, BadReply> {
    head_behind(bytes, 0)
}

/// The same, if the first `looked` bytes are known to contain no line end.
fn head_behind(bytes: &[u8], looked: usize) -> Result<Option<(Head, usize)>, BadReply> {
    let Some((kind, rest)) = bytes.split_first() else {
        return Ok(None);
    };
    if !matches!(kind, b'+' | b'-' | b':' | b'$' | b'*') {
        return Err(BadReply::Kind(*kind));
    }
    let within = rest.get(..LINE_MAX).unwrap_or(rest);
    // One of the two bytes of the line end may be among them.
    let from = looked.saturating_sub(2);
    let unseen = within.get(from..).unwrap_or_default();
    let Some(end) = unseen.windows(2).position(|pair| pair == b"\r\n") else {
        return if rest.len() >= LINE_MAX {
            Err(BadReply::Line)
        } else {
            Ok(None)
        };
    };
    let end = from + end;
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

/// An incomplete array.
#[derive(Debug)]
struct Open {
    parts: Vec<Reply>,
    missing: u64,
}

/// Incremental parser of one reply. It keeps complete parts: no byte is parsed twice.
#[derive(Debug, Default)]
pub struct Reader {
    /// Nested arrays, the outermost first.
    open: Vec<Open>,
    /// Length of the bulk string whose line was read.
    bulk: Option<usize>,
    /// Bytes of an incomplete line that were already searched.
    looked: usize,
    /// Consumed bytes of this reply.
    taken: usize,
    /// Work done: bytes searched for the end of a line, or copied.
    #[cfg(test)]
    work: usize,
}

impl Reader {
    /// Consumed bytes of an incomplete reply.
    pub fn taken(&self) -> usize {
        self.taken
    }

    /// Parses more bytes. `bytes` begin where the previous call stopped consuming them. Returns the reply once it is complete, and the
    /// number of consumed bytes; the rest must be passed again, with more behind it, in the next call.
    pub fn read(&mut self, bytes: &[u8]) -> Result<(Option<Reply>, usize), BadReply> {
        let mut used = 0;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            let Some((part, length)) = self.part(rest)? else {
                return Ok((None, used));
            };
            used += length;
            self.taken += length;
            let Some(part) = part else { continue };
            if let Some(whole) = self.put(part) {
                self.taken = 0;
                return Ok((Some(whole), used));
            }
        }
    }

    /// The next line or bulk string: the completed reply, if any, and its length. `None`: more bytes are needed.
    fn part(&mut self, bytes: &[u8]) -> Result<Option<(Option<Reply>, usize)>, BadReply> {
        if let Some(length) = self.bulk {
            let Some((text, end)) = bytes.split_at_checked(length) else {
                return Ok(None);
            };
            return match end {
                [b'\r', b'\n', ..] => {
                    self.bulk = None;
                    self.works(length);
                    Ok(Some((Some(Reply::Bulk(text.to_vec())), length + 2)))
                }
                [] | [b'\r'] => Ok(None),
                _ => Err(BadReply::End),
            };
        }
        let Some((head, used)) = head_behind(bytes, self.looked)? else {
            self.works(bytes.len().saturating_sub(self.looked));
            self.looked = bytes.len();
            return Ok(None);
        };
        self.works(used.saturating_sub(self.looked));
        self.looked = 0;
        let whole = match head {
            Head::Whole(reply) => Some(reply),
            Head::Bulk(length) if length > BULK_MAX => return Err(BadReply::Large),
            Head::Bulk(length) => {
                self.bulk = Some(length as usize);
                None
            }
            Head::Array(parts) if parts > PARTS_MAX || self.open.len() >= DEPTH_MAX => {
                return Err(BadReply::Large);
            }
            Head::Array(0) => Some(Reply::Array(Vec::new())),
            Head::Array(missing) => {
                self.open.push(Open {
                    parts: Vec::new(),
                    missing,
                });
                None
            }
        };
        Ok(Some((whole, used)))
    }

    /// Inserts a complete part. Returns the reply if it is complete now.
    fn put(&mut self, mut part: Reply) -> Option<Reply> {
        while let Some(mut array) = self.open.pop() {
            array.parts.push(part);
            array.missing -= 1;
            if array.missing > 0 {
                self.open.push(array);
                return None;
            }
            part = Reply::Array(array.parts);
        }
        Some(part)
    }

    fn works(&mut self, _bytes: usize) {
        #[cfg(test)]
        {
            self.work += _bytes;
        }
    }
}

pub fn command(out: &mut Vec<u8>, words: &[&[u8]]) {
    begin(out, words.len());
    for each in words {
        word(out, each);
    }
}

/// Encodes the beginning of a command of this many words.
pub fn begin(out: &mut Vec<u8>, words: usize) {
    out.extend_from_slice(format!("*{words}\r\n").as_bytes());
}

/// Encodes a word of a command.
pub fn word(out: &mut Vec<u8>, bytes: &[u8]) {
    length(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
    out.extend_from_slice(b"\r\n");
}

/// Encodes the prefix of a word of this many bytes; the word ends with a line end.
pub fn length(out: &mut Vec<u8>, bytes: u64) {
    out.extend_from_slice(format!("${bytes}\r\n").as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Parses a whole reply; returns its length too. `None`: more bytes are needed.
    fn reply(bytes: &[u8]) -> Result<Option<(Reply, usize)>, BadReply> {
        let (reply, used) = Reader::default().read(bytes)?;
        Ok(reply.map(|reply| (reply, used)))
    }

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
        fn a_reply_that_comes_in_pieces_is_the_same(
            expected in replies(),
            cuts in prop::collection::vec(0usize..40, 0..20),
        ) {
            let bytes = bytes_of(&expected);
            let mut reader = Reader::default();
            let (mut start, mut end, mut came) = (0, 0, None);
            for piece in cuts.into_iter().chain([bytes.len()]) {
                end = bytes.len().min(end + piece);
                let (reply, used) = reader.read(&bytes[start..end]).unwrap();
                start += used;
                prop_assert!(reply.is_none() || (came.is_none() && start == bytes.len()));
                came = came.or(reply);
            }
            prop_assert_eq!(came, Some(expected));
            prop_assert_eq!(reader.taken(), 0);
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

    /// Work of parsing these bytes in pieces of `piece` bytes.
    fn work(bytes: &[u8], piece: usize) -> usize {
        let mut reader = Reader::default();
        let mut start = 0;
        for end in (piece..).step_by(piece) {
            let end = end.min(bytes.len());
            let (reply, used) = reader.read(&bytes[start..end]).unwrap();
            start += used;
            if reply.is_some() {
                assert_eq!(start, bytes.len());
                return reader.work;
            }
        }
        unreachable!()
    }

    #[test]
    fn an_array_in_small_pieces_takes_no_more_work_than_at_once() {
        let key = Reply::Bulk(vec![b'k'; 64]);
        let page = Reply::Array(vec![
            Reply::Bulk(b"0".to_vec()),
            Reply::Array(vec![key; 2_000]),
            Reply::Simple("x".repeat(10_000)),
        ]);
        let bytes = bytes_of(&page);
        let at_once = work(&bytes, bytes.len());
        assert!(at_once <= bytes.len());
        for piece in [1, 7, 1_000] {
            assert!(work(&bytes, piece) <= 2 * at_once, "pieces of {piece}");
        }
    }

    #[test]
    fn a_command_is_its_words_with_their_lengths() {
        let mut out = Vec::new();
        command(&mut out, &[b"SET", b"a key", b""]);
        assert_eq!(out, b"*3\r\n$3\r\nSET\r\n$5\r\na key\r\n$0\r\n\r\n");
    }
}
