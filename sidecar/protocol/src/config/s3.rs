//! The config section `s3`.

use super::{ByteSize, Choice, Duration, choice};
use std::path::PathBuf;

/// The S3 tier: a bucket of S3 or of a compatible server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct S3 {
    /// Name of the bucket. Empty: no S3 tier.
    pub bucket: String,
    /// Region. Empty: the region of the environment, or `us-east-1` with an endpoint.
    pub region: String,
    /// `http(s)://host[:port]` of a server other than AWS. Empty: AWS.
    pub endpoint: String,
    /// Prefix of all object names, without leading or trailing slashes; may be empty.
    pub prefix: String,
    /// Where the bucket's name is in URLs.
    pub addressing_style: AddressingStyle,
    /// Use AWS Transfer Acceleration.
    pub accelerate: bool,
    /// Folder with the files `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and, optionally, `AWS_SESSION_TOKEN`. `None`: the AWS default
    /// chain.
    pub auth: Option<PathBuf>,
    /// PEM file with the trusted authorities. `None`: those of the system.
    pub ca: Option<PathBuf>,
    /// When S3's own checksums are sent and checked.
    pub checksums: Checksums,
    pub http_version: HttpVersion,
    /// Requests in flight.
    pub max_concurrency: u32,
    /// Bytes allowed below the prefix; 0 = no limit.
    pub capacity: ByteSize,
    /// Percent of the capacity at which removal of the oldest objects begins.
    pub evict_at_percent: u32,
    /// Percent of the capacity at which removal ends.
    pub evict_to_percent: u32,
    /// Objects are removed this long after they were written. 0 disables expiry.
    pub expire_after: Duration,
}

choice!(
    /// Where the bucket's name is in URLs.
    AddressingStyle {
        /// In the host for AWS and for endpoints whose name has a dot, otherwise in the path.
        #[default]
        Auto = "Auto",
        /// `https://host/bucket/key`.
        Path = "Path",
        /// `https://bucket.host/key`.
        VirtualHost = "VirtualHost",
    }
);
choice!(
    /// When S3's own checksums are sent and checked. kvcachepool's digests are always checked.
    Checksums {
        /// Where S3 requires them. Older compatible servers accept this.
        #[default]
        WhenRequired = "WhenRequired",
        /// Wherever S3 supports them.
        WhenSupported = "WhenSupported",
    }
);
choice!(
    HttpVersion {
        /// HTTP/1.1 with one connection per transfer.
        #[default]
        Auto = "Auto",
        Http1 = "Http1",
        /// HTTP/2 if the server offers it over TLS, otherwise HTTP/1.1.
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

/// Longest prefix. An object's name adds 116 bytes, and S3 allows 1024.
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
