//! The config section `s3`.

use super::choice::choice;
use super::section::{GI, HOUR_MS, TI, YEAR_MS, field, section};
use super::slot::Form;
use super::tiers::TierMode;
use super::{ByteSize, Duration};
use std::path::PathBuf;

section! {
    /// The S3 tier: a bucket of S3 or of a compatible server.
    #[derive(Debug)]
    S3 {
        /// Name of the bucket: 3 to 63 lower-case letters, digits, - and .. Empty: no S3 tier.
        "s3.bucket" bucket: String, Text(&BUCKET), Restart, field("spec.shared.s3.bucket").required();
        /// Region of the bucket. Empty: the region of the environment, or us-east-1 with an endpoint.
        "s3.region" region: String, Text(&REGION), Restart, field("spec.shared.s3.region").or("us-east-1");
        /// http(s)://host or http(s)://host:port of a server other than AWS, without path, user or password.
        "s3.endpoint" endpoint: String, Text(&ENDPOINT), Restart, field("spec.shared.s3.endpoint");
        /// Prefix of all object names: at most 512 letters, digits, -, ., _, =, and single slashes between them.
        "s3.prefix" prefix: String, Text(&PREFIX), Restart, field("spec.shared.s3.prefix");
        /// Where the bucket's name is in URLs: in the path, in the host, or chosen by endpoint.
        "s3.addressingStyle" addressing_style: AddressingStyle, Choice, Restart, field("spec.shared.s3.addressingStyle");
        /// Use AWS Transfer Acceleration. Not together with endpoint.
        "s3.accelerate" accelerate: bool, Flag, Restart, field("spec.shared.s3.accelerate");
        /// Folder with the files AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, optionally, AWS_SESSION_TOKEN. Read again when they change.
        /// Empty: the AWS default chain.
        "s3.auth" auth: Option<PathBuf>, File, Restart;
        /// PEM file with the trusted authorities. Empty: those of the system. A changed file needs a restart.
        "s3.ca" ca: Option<PathBuf>, File, Restart;
        /// When S3's own checksums are sent and checked. Older compatible servers refuse them. The digests of objects are compared in any case.
        "s3.checksums" checksums: Checksums, Choice, Restart, field("spec.shared.s3.checksums");
        /// Requests that run at once, of every kind.
        "s3.maxConcurrency" max_concurrency: u32 = 64, Count(1..=4_096), Restart, field("spec.shared.s3.maxConcurrency");
        /// Bytes below the prefix, including those of other sidecars. The oldest objects are removed. 0: no limit.
        "s3.capacity" capacity: ByteSize, Size(0..=1024 * TI), Restart, field("spec.shared.s3.capacity").within(GI..=1024 * TI);
        /// Percent of the capacity at which removal begins.
        "s3.evictAtPercent" evict_at_percent: u32 = 90, Count(1..=100), Restart, field("spec.shared.s3.evictAtPercent");
        /// Percent of the capacity at which removal ends. At most evictAtPercent.
        "s3.evictToPercent" evict_to_percent: u32 = 80, Count(1..=100), Restart, field("spec.shared.s3.evictToPercent");
        /// Objects are removed this long after they were written. 0 disables expiry.
        "s3.expireAfter" expire_after: Duration, Time(0..=87_600 * HOUR_MS), Restart, field("spec.shared.s3.expireAfter").within(HOUR_MS..=YEAR_MS);
        /// For debugging. Audit: every operation of the tier is logged. Blackhole: nothing is kept, and the tier is not used.
        "s3.mode" mode: TierMode, Choice, Restart;
    }
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

/// Longest prefix. An object's name adds 116 bytes, and S3 allows 1024.
const PREFIX_BYTES: usize = 512;

const BUCKET: Form = Form {
    pattern: "^[a-z0-9][-a-z0-9.]{1,61}[a-z0-9]$",
    write: "the name of a bucket: 3 to 63 lower-case letters, digits, - and ., a letter or digit at both ends",
    matches: |text| {
        let end = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let ends = [text.bytes().next(), text.bytes().last()];
        (3..=63).contains(&text.len())
            && text.bytes().all(|b| end(b) || b"-.".contains(&b))
            && ends.into_iter().flatten().all(end)
    },
};
const REGION: Form = Form {
    pattern: "^[-_a-zA-Z0-9]{1,64}$",
    write: "a region such as us-east-1",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        (1..=64).contains(&text.len()) && text.bytes().all(plain)
    },
};
const ENDPOINT: Form = Form {
    pattern: r"^https?://[-a-zA-Z0-9._:\\[\\]]{1,300}$",
    write: "a scheme and a host, such as https://s3.example.com or http://minio.storage:9000",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._:[]".contains(&b);
        let mut hosts = ["http://", "https://"]
            .iter()
            .filter_map(|scheme| text.strip_prefix(scheme));
        hosts.any(|host| (1..=300).contains(&host.len()) && host.bytes().all(plain))
    },
};
const PREFIX: Form = Form {
    pattern: "^[-a-zA-Z0-9._=]*[-a-zA-Z0-9_=][-a-zA-Z0-9._=]*(/[-a-zA-Z0-9._=]*[-a-zA-Z0-9_=][-a-zA-Z0-9._=]*)*$",
    write: "names joined by /, without one at the ends, of letters, digits, -, ., _ and =, none of dots alone",
    matches: |text| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._=".contains(&b);
        let part = |part: &str| part.bytes().all(plain) && part.bytes().any(|b| b != b'.');
        text.len() <= PREFIX_BYTES && text.split('/').all(part)
    },
};
