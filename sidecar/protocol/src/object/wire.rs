//! Encodes and decodes the head of an object. Total: any bytes give an object or a named error.

use super::*;
use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    little_endian::{U32, U64},
};

pub const HEADER_BYTES: usize = 512;

/// The bytes are not a usable object.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadObject {
    /// Fewer bytes than the object needs.
    #[error("{got} bytes, {needed} are needed")]
    Torn {
        /// Number of bytes given.
        got: u64,
        /// Number of bytes needed.
        needed: u64,
    },
    /// The bytes have another magic number.
    #[error("the bytes are not a cache object: wrong magic number")]
    NotAnObject,
    /// Written by another version.
    #[error("object of version {0}; this build reads version {VERSION}")]
    OtherVersion(u32),
    /// The header's digest does not match.
    #[error("the header is corrupt: its digest does not match")]
    HeaderCorrupt,
    /// The digest of section table, block hashes and token ids does not match.
    #[error("the section table is corrupt: its digest does not match")]
    TableCorrupt,
    /// A codec, fidelity, cipher or key kind that this build does not know.
    #[error("{what} {value} is unknown to this build")]
    Unsupported { what: &'static str, value: u32 },
    /// A field contradicts another, or is out of its range.
    #[error("{0}")]
    Invalid(&'static str),
}

/// The fixed header of an object.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HeaderRecord {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// [`KeyKind`].
    pub kind: u8,
    /// [`Codec`].
    pub codec: u8,
    /// [`Fidelity`].
    pub fidelity: u8,
    /// [`Cipher`].
    pub cipher: u8,
    /// Always zero.
    pub flags: U32,
    /// Number of entries of the section table.
    pub sections: U32,
    /// ModelId.
    pub model: [u8; 32],
    /// LayoutId.
    pub layout: [u8; 32],
    pub namespace: [u8; 32],
    pub key: [u8; 32],
    /// Key of the preceding chunk.
    pub parent: [u8; 32],
    /// Engine hash of the last block.
    pub last_hash: [u8; 32],
    /// Index of the part.
    pub part: U32,
    pub parts: U32,
    pub tokens: U32,
    /// Position of the first token.
    pub first_token: U32,
    /// Number of engine block hashes after the section table.
    pub block_hashes: U32,
    /// Number of token ids after the block hashes.
    pub token_ids: U32,
    /// Bytes before the first section.
    pub head_bytes: U64,
    /// Length of the whole object.
    pub total_bytes: U64,
    /// Time of writing, Unix milliseconds.
    pub created_unix_ms: U64,
    /// Expiry, Unix seconds; 0 = never.
    pub expires_unix_s: U64,
    pub writer: [u8; 16],
    /// Engine name, padded with zeros.
    pub engine: [u8; 16],
    /// Engine version, padded with zeros.
    pub engine_version: [u8; 32],
    /// Nonce of the cipher.
    pub nonce: [u8; 24],
    /// xxh3-128 of everything between header and padding.
    pub table_digest: [u8; 16],
    /// [`Element`].
    pub element: u8,
    /// Dimensions of a block, from the outermost to the innermost, followed by zeros.
    pub dims: [DimRecord; MAX_DIMS],
    /// Always zero.
    pub reserved: [u8; 79],
    /// xxh3-128 of the preceding header bytes.
    pub digest: [u8; 16],
}

/// A dimension of a block in an object's header.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    Immutable,
    KnownLayout,
    Unaligned,
)]
#[repr(C)]
pub struct DimRecord {
    /// [`Axis`], 0 = no dimension.
    pub axis: u8,
    pub size: U32,
}

/// An entry of the section table.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SectionRecord {
    pub group: U32,
    pub shard: U32,
    /// Offset in the object.
    pub offset: U64,
    /// Length of the stored bytes.
    pub stored_bytes: U64,
    /// Length of the bytes in the arena.
    pub raw_bytes: U64,
    /// Digest of the stored bytes.
    pub stored_digest: [u8; 16],
    /// Digest of the bytes in the arena.
    pub raw_digest: [u8; 16],
}

const _: () = assert!(size_of::<HeaderRecord>() == HEADER_BYTES);
const _: () = assert!(size_of::<SectionRecord>() == 64);
const DIGEST_AT: usize = HEADER_BYTES - 16;

/// Number of bytes of an object that [`Object::decode`] needs; `header` is its first 512.
pub fn head_bytes(header: &[u8]) -> Result<u64, BadObject> {
    Ok(header_record(header)?.head_bytes.get())
}

impl Object {
    /// Encodes the bytes before the first section: header, section table, hashes, token ids, padding.
    pub fn encode(&self) -> Result<Vec<u8>, BadObject> {
        self.check()?;
        let offsets = self.offsets();
        let mut out = vec![0u8; HEADER_BYTES];
        for (section, offset) in self.sections.iter().zip(offsets) {
            let record = SectionRecord {
                group: section.group.into(),
                shard: section.shard.into(),
                offset: offset.into(),
                stored_bytes: section.stored_bytes.into(),
                raw_bytes: section.raw_bytes.into(),
                stored_digest: section.stored_digest,
                raw_digest: section.raw_digest,
            };
            out.extend_from_slice(record.as_bytes());
        }
        out.extend_from_slice(self.block_hashes.as_bytes());
        for id in &self.token_ids {
            out.extend_from_slice(&id.to_le_bytes());
        }
        let mut header = HeaderRecord {
            magic: MAGIC,
            version: VERSION.into(),
            kind: self.kind as u8,
            codec: self.codec as u8,
            fidelity: self.fidelity as u8,
            cipher: self.cipher as u8,
            flags: 0.into(),
            sections: (self.sections.len() as u32).into(),
            model: self.model.0,
            layout: self.layout.0,
            namespace: self.namespace.0,
            key: self.key().0,
            parent: self.parent.0,
            last_hash: self.last_hash.0,
            part: self.part.into(),
            parts: self.parts.into(),
            tokens: self.tokens.into(),
            first_token: self.first_token.into(),
            block_hashes: (self.block_hashes.len() as u32).into(),
            token_ids: (self.token_ids.len() as u32).into(),
            head_bytes: self.head_bytes().into(),
            total_bytes: self.total_bytes().into(),
            created_unix_ms: self.created_unix_ms.into(),
            expires_unix_s: self.expires_unix_s.into(),
            writer: self.writer,
            engine: padded(&self.engine)?,
            engine_version: padded(&self.engine_version)?,
            nonce: self.nonce,
            table_digest: digest(&out[HEADER_BYTES..]),
            element: self.form.element() as u8,
            dims: dim_records(&self.form),
            reserved: [0; 79],
            digest: [0; 16],
        };
        header.digest = digest(&header.as_bytes()[..DIGEST_AT]);
        out[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        out.resize(self.head_bytes() as usize, 0);
        Ok(out)
    }

    /// Decodes the head of an object; `bytes` may be longer. The lengths of the sections are validated here, their bytes by the digest of
    /// each.
    pub fn decode(bytes: &[u8]) -> Result<Self, BadObject> {
        let header = header_record(bytes)?;
        let needed = header.head_bytes.get();
        let head = usize::try_from(needed)
            .ok()
            .and_then(|n| bytes.get(..n))
            .ok_or(BadObject::Torn {
                got: bytes.len() as u64,
                needed,
            })?;
        let counts =
            [header.sections, header.block_hashes, header.token_ids].map(|n| n.get() as usize);
        let (table, rest) = counted(&head[HEADER_BYTES..], counts[0], 64)?;
        let (hashes, rest) = counted(rest, counts[1], 32)?;
        let (ids, padding) = counted(rest, counts[2], 4)?;
        let meta = table.len() + hashes.len() + ids.len();
        if digest(&head[HEADER_BYTES..HEADER_BYTES + meta]) != header.table_digest {
            return Err(BadObject::TableCorrupt);
        }
        if padding.len() as u64 >= ALIGN || padding.iter().any(|b| *b != 0) {
            return Err(BadObject::Invalid("padding is not zero"));
        }
        let records: Vec<SectionRecord> = table
            .chunks_exact(64)
            .filter_map(|b| SectionRecord::read_from_bytes(b).ok())
            .collect();
        let object = Self {
            kind: KeyKind::try_from(header.kind).map_err(|v| unsupported("key kind", v))?,
            codec: codec(header.codec)?,
            fidelity: Fidelity::numbered(header.fidelity)
                .ok_or_else(|| unsupported("fidelity", header.fidelity))?,
            form: form(&header)?,
            cipher: cipher(header.cipher)?,
            model: ModelId(header.model),
            layout: LayoutId(header.layout),
            namespace: NamespaceId(header.namespace),
            last_hash: EngineHash(header.last_hash),
            parent: ChunkKey(header.parent),
            part: header.part.get(),
            parts: header.parts.get(),
            tokens: header.tokens.get(),
            first_token: header.first_token.get(),
            created_unix_ms: header.created_unix_ms.get(),
            expires_unix_s: header.expires_unix_s.get(),
            writer: header.writer,
            engine: unpadded(&header.engine)?,
            engine_version: unpadded(&header.engine_version)?,
            nonce: header.nonce,
            sections: records.iter().map(section).collect(),
            block_hashes: <[EngineHash]>::ref_from_bytes(hashes)
                .map_err(|_| BadObject::Invalid("block hashes are incomplete"))?
                .to_vec(),
            token_ids: ids
                .chunks_exact(4)
                .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        };
        object.check()?;
        let offsets_agree = object
            .offsets()
            .iter()
            .zip(&records)
            .all(|(offset, record)| *offset == record.offset.get());
        if !offsets_agree || object.total_bytes() != header.total_bytes.get() {
            return Err(BadObject::Invalid("section offsets are not contiguous"));
        }
        if object.head_bytes() != needed {
            return Err(BadObject::Invalid(
                "the head's length differs from that of its parts",
            ));
        }
        if object.key().0 != header.key {
            return Err(BadObject::Invalid("the key does not match its parts"));
        }
        Ok(object)
    }

    /// Conditions of both encoding and decoding.
    fn check(&self) -> Result<(), BadObject> {
        let ensure = |holds, why| {
            if holds {
                Ok(())
            } else {
                Err(BadObject::Invalid(why))
            }
        };
        ensure(
            (1..=MAX_SECTIONS).contains(&self.sections.len()),
            "no sections, or too many",
        )?;
        ensure(
            self.sections
                .iter()
                .zip(self.sections.iter().skip(1))
                .all(|(a, b)| (a.group, a.shard) < (b.group, b.shard)),
            "sections are not in order of group and shard",
        )?;
        ensure(
            (1..=MAX_TOKENS).contains(&self.tokens),
            "the token count is out of range",
        )?;
        ensure(self.part < self.parts, "the part index is out of range")?;
        ensure(
            self.block_hashes.len() <= self.tokens as usize,
            "more block hashes than tokens",
        )?;
        ensure(
            self.block_hashes
                .last()
                .is_none_or(|h| *h == self.last_hash),
            "the last block hash does not match the key",
        )?;
        ensure(
            self.token_ids.is_empty() || self.token_ids.len() == self.tokens as usize,
            "the number of token ids is neither 0 nor that of the tokens",
        )?;
        ensure(
            self.cipher != Cipher::None || self.nonce == [0; 24],
            "a nonce without a cipher",
        )?;
        let lost = self.codec.fidelity();
        ensure(
            lost == Fidelity::Exact || lost == self.fidelity,
            "the codec loses more than the stated fidelity",
        )?;
        for s in &self.sections {
            ensure(
                s.stored_bytes > 0 && s.stored_bytes <= MAX_BYTES && s.raw_bytes <= MAX_BYTES,
                "a section's length is out of range",
            )?;
            let plain = s.stored_bytes == s.raw_bytes && s.stored_digest == s.raw_digest;
            ensure(
                self.codec != Codec::None || self.cipher != Cipher::None || plain,
                "an unpacked section has different stored and raw lengths or digests",
            )?;
        }
        ensure(self.total_bytes() <= MAX_BYTES, "the object is too long")
    }
}

fn header_record(bytes: &[u8]) -> Result<HeaderRecord, BadObject> {
    let (header, _) = HeaderRecord::read_from_prefix(bytes).map_err(|_| BadObject::Torn {
        got: bytes.len() as u64,
        needed: HEADER_BYTES as u64,
    })?;
    if header.magic != MAGIC {
        return Err(BadObject::NotAnObject);
    }
    if header.version.get() != VERSION {
        return Err(BadObject::OtherVersion(header.version.get()));
    }
    if digest(&header.as_bytes()[..DIGEST_AT]) != header.digest {
        return Err(BadObject::HeaderCorrupt);
    }
    if header.flags.get() != 0 {
        return Err(unsupported_value("flags", header.flags.get()));
    }
    // A later version may use these bytes. The digest matches, so the header is not damaged.
    if let Some(said) = header.reserved.iter().find(|byte| **byte != 0) {
        return Err(unsupported("a field of the header", *said));
    }
    let head = header.head_bytes.get();
    if head < ALIGN || !head.is_multiple_of(ALIGN) {
        return Err(BadObject::Invalid("the head is not a multiple of 4 KiB"));
    }
    let longest = HEADER_BYTES as u64 + 64 * MAX_SECTIONS as u64 + 36 * u64::from(MAX_TOKENS);
    if head > longest.next_multiple_of(ALIGN) {
        return Err(BadObject::Invalid("the head is too long"));
    }
    Ok(header)
}

fn section(record: &SectionRecord) -> Section {
    Section {
        group: record.group.get(),
        shard: record.shard.get(),
        stored_bytes: record.stored_bytes.get(),
        raw_bytes: record.raw_bytes.get(),
        stored_digest: record.stored_digest,
        raw_digest: record.raw_digest,
    }
}

fn counted(bytes: &[u8], count: usize, size: usize) -> Result<(&[u8], &[u8]), BadObject> {
    count
        .checked_mul(size)
        .and_then(|n| bytes.split_at_checked(n))
        .ok_or(BadObject::Invalid("the head is shorter than its parts"))
}

fn codec(value: u8) -> Result<Codec, BadObject> {
    match value {
        0 => Ok(Codec::None),
        1 => Ok(Codec::Lossless),
        2 => Ok(Codec::Fp8),
        3 => Ok(Codec::Int8),
        4 => Ok(Codec::Int4),
        5 => Ok(Codec::CacheGen),
        _ => Err(unsupported("codec", value)),
    }
}

fn element(value: u8) -> Result<Element, BadObject> {
    match value {
        0 => Ok(Element::Opaque),
        1 => Ok(Element::Bf16),
        2 => Ok(Element::F16),
        3 => Ok(Element::F32),
        _ => Err(unsupported("element", value)),
    }
}

fn dim_records(form: &Form) -> [DimRecord; MAX_DIMS] {
    let mut records = [DimRecord::default(); MAX_DIMS];
    for (record, dim) in records.iter_mut().zip(form.dims()) {
        *record = DimRecord {
            axis: dim.axis as u8,
            size: dim.size.into(),
        };
    }
    records
}

fn form(header: &HeaderRecord) -> Result<Form, BadObject> {
    let none = DimRecord::default();
    let there = header.dims.iter().take_while(|dim| **dim != none).count();
    let (there, rest) = header.dims.split_at(there);
    let dim = |record: &DimRecord| {
        let axis = Axis::numbered(record.axis).ok_or_else(|| unsupported("axis", record.axis))?;
        Ok(Dim {
            axis,
            size: record.size.get(),
        })
    };
    let dims: Vec<_> = there.iter().map(dim).collect::<Result<_, _>>()?;
    let sound = rest.iter().all(|dim| *dim == none);
    let form = Form::new(element(header.element)?, &dims).filter(|_| sound);
    form.ok_or(BadObject::Invalid("the form is invalid"))
}

fn cipher(value: u8) -> Result<Cipher, BadObject> {
    match value {
        0 => Ok(Cipher::None),
        _ => Err(unsupported("cipher", value)),
    }
}

fn unsupported(what: &'static str, value: u8) -> BadObject {
    unsupported_value(what, value.into())
}

fn unsupported_value(what: &'static str, value: u32) -> BadObject {
    BadObject::Unsupported { what, value }
}

fn padded<const N: usize>(text: &str) -> Result<[u8; N], BadObject> {
    let mut out = [0u8; N];
    let field = out
        .get_mut(..text.len())
        .ok_or(BadObject::Invalid("engine name or version is too long"))?;
    if text.contains('\0') {
        return Err(BadObject::Invalid(
            "engine name or version holds a zero byte",
        ));
    }
    field.copy_from_slice(text.as_bytes());
    Ok(out)
}

fn unpadded(field: &[u8]) -> Result<String, BadObject> {
    let end = field.iter().position(|b| *b == 0).unwrap_or(field.len());
    let (text, zeros) = field.split_at(end);
    if zeros.iter().any(|b| *b != 0) {
        return Err(BadObject::Invalid(
            "engine name or version holds a zero byte",
        ));
    }
    std::str::from_utf8(text)
        .map(str::to_string)
        .map_err(|_| BadObject::Invalid("engine name or version is not UTF-8"))
}
