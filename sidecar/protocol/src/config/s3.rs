//! The S3 tier: `s3.*`.

use super::{ByteSize, Choice, Duration, choice};
use std::path::PathBuf;

/// A bucket of S3 or of a compatible server, below all other tiers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3 {
    /// Name of the bucket; empty = there is no such tier.
    pub bucket: String,
    /// Region; empty = that of the environment, or `us-east-1` with an endpoint.
    pub region: String,
    /// `http(s)://host[:port]` of a server that is not AWS; empty = AWS.
    pub endpoint: String,
    /// What names begin with, without slashes around it; may be empty.
    pub prefix: String,
    /// Where the bucket's name stands in URLs.
    pub addressing_style: AddressingStyle,
    /// Use the Transfer Acceleration endpoint of AWS.
    pub accelerate: bool,
    /// Folder with the files `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and perhaps `AWS_SESSION_TOKEN`; none = the default chain.
    pub auth: Option<PathBuf>,
    /// PEM file with the authorities that are trusted; none = those of the system.
    pub ca: Option<PathBuf>,
    /// When S3's own checksums are sent and checked.
    pub checksums: Checksums,
    /// Version of HTTP.
    pub http_version: HttpVersion,
    /// Requests that run at once.
    pub max_concurrency: u32,
    /// Bytes that may lie under the prefix; 0 = no bound.
    pub capacity: ByteSize,
    /// Percent of the capacity from which on the oldest objects go.
    pub evict_at_percent: u32,
    /// Percent of the capacity that are left then.
    pub evict_to_percent: u32,
    /// Objects that were written longer ago go; 0 = never.
    pub expire_after: Duration,
}

choice!(
    /// Where the bucket's name stands in URLs.
    AddressingStyle {
        /// In the host for AWS and where the endpoint is a name with a dot in it, else in the path.
        #[default]
        Auto = "Auto",
        /// `https://host/bucket/key`.
        Path = "Path",
        /// `https://bucket.host/key`.
        VirtualHost = "VirtualHost",
    }
);
choice!(
    /// When S3's own checksums are sent and checked. Digests of ours are always checked.
    Checksums {
        /// Where S3 demands them: what older compatible servers take.
        #[default]
        WhenRequired = "WhenRequired",
        /// Wherever S3 can.
        WhenSupported = "WhenSupported",
    }
);
choice!(
    /// Version of HTTP.
    HttpVersion {
        /// HTTP/1.1: a connection for each transfer.
        #[default]
        Auto = "Auto",
        /// HTTP/1.1.
        Http1 = "Http1",
        /// HTTP/2 where the server's TLS offers it, else HTTP/1.1.
        Http2 = "Http2",
    }
);

impl Default for S3 {
    fn default() -> Self {
        Self {
            bucket: String::new(),
            region: String::new(),
            endpoint: String::new(),
            prefix: String::new(),
            addressing_style: AddressingStyle::Auto,
            accelerate: false,
            auth: None,
            ca: None,
            checksums: Checksums::WhenRequired,
            http_version: HttpVersion::Auto,
            max_concurrency: 64,
            capacity: ByteSize(0),
            evict_at_percent: 90,
            evict_to_percent: 80,
            expire_after: Duration::from_ms(0),
        }
    }
}

/// Longest prefix: names of objects take 116 bytes behind it, and S3 takes 1024.
const PREFIX_BYTES: usize = 512;

pub(super) fn bucket(text: &str) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.';
    let fits = text.is_empty() || (3..=63).contains(&text.len());
    (fits && text.bytes().all(plain))
        .then_some(())
        .ok_or("the name of a bucket: 3 to 63 lower-case letters, digits, - and .")
}

pub(super) fn region(text: &str) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
    (text.len() <= 64 && text.bytes().all(plain))
        .then_some(())
        .ok_or("a region such as us-east-1")
}

pub(super) fn endpoint(text: &str) -> Result<(), &'static str> {
    let rule = "http://host:port or https://host, without a path, user or password";
    if text.is_empty() {
        return Ok(());
    }
    let host = text
        .strip_prefix("http://")
        .or_else(|| text.strip_prefix("https://"))
        .ok_or(rule)?;
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b);
    (!host.is_empty() && host.len() <= 300 && host.bytes().all(plain))
        .then_some(())
        .ok_or(rule)
}

pub(super) fn prefix(text: &str) -> Result<(), &'static str> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._/=".contains(&b);
    let empty_part =
        !text.is_empty() && text.split('/').any(|part| matches!(part, "" | "." | ".."));
    (text.len() <= PREFIX_BYTES && text.bytes().all(plain) && !empty_part)
        .then_some(())
        .ok_or("a prefix such as prod or team/prod: letters, digits, -, ., _, = and single slashes between them")
}
