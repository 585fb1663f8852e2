//! The config sections `disk`, `redis`, `fileSystem`, `write` and `pacing`. The section `s3` is in `s3.rs`.

use super::choice::choice;
use super::section::{GI, HOUR_MS, MI, SECOND_MS, TI, YEAR_MS, field, section};
use super::{ByteSize, Duration};
use crate::object;
use std::path::PathBuf;

section! {
    /// The disk tier.
    #[derive(Debug)]
    Disk {
        /// Folder that only this tier uses. Empty: no disk tier.
        "disk.path" path: Option<PathBuf>, File, Restart;
        /// Bytes of the tier's files with objects. The least recently used objects are evicted.
        "disk.size" size: ByteSize = ByteSize(16 << 30), Size(64 * MI..=16 * TI), Restart, field("spec.local.disk.perPod").required().within(GI..=16 * TI);
        /// For debugging. Audit: every operation of the tier is logged. Blackhole: nothing is kept, and the tier is not used.
        "disk.mode" mode: TierMode, Choice, Restart;
    }
}

section! {
    /// The Redis tier. Its `Debug` form hides the URLs, because they may hold a password.
    Redis {
        /// At most 256 URLs of at most 1024 bytes: independent servers, or one redis-sentinel:// or redis-cluster://. Empty: no Redis tier.
        "redis.urls" urls: Vec<String>, Urls, Servers;
        /// Folder with the files password and, for an ACL user, username. Read again for every new connection. It replaces credentials in the
        /// URLs.
        "redis.auth" auth: Option<PathBuf>, File, Restart;
        /// PEM file with the trusted authorities for TLS. Empty: those of the system. A changed file is used for new connections.
        "redis.ca" ca: Option<PathBuf>, File, Restart;
        /// Folder with the PEM files tls.crt and tls.key, for servers that ask clients for a certificate. Empty: none. Changed files are used
        /// for new connections.
        "redis.clientCertificate" client_certificate: Option<PathBuf>, File, Restart;
        /// Objects expire after this time without a read or a write. 0 disables expiry.
        "redis.ttl" ttl: Duration, Time(0..=8_784 * HOUR_MS), Live, field("spec.shared.redis.ttl").within(SECOND_MS..=YEAR_MS).or("24h");
        /// For debugging. Audit: every operation of the tier is logged. Blackhole: nothing is kept, and the tier is not used.
        "redis.mode" mode: TierMode, Choice, Restart;
    }
}

section! {
    /// The file system tier: a folder that many sidecars share.
    #[derive(Debug)]
    FileSystem {
        /// Folder on a shared file system that only sidecars use. New files and folders get its permissions. Empty: no file system tier.
        "fileSystem.path" path: Option<PathBuf>, File, Restart;
        /// Bytes of all objects in the folder, including those of other sidecars. The oldest objects are removed. 0: no limit.
        "fileSystem.capacity" capacity: ByteSize, Size(0..=1024 * TI), Restart, field("spec.shared.fileSystem.capacity").within(GI..=1024 * TI);
        /// Percent of the capacity at which removal begins.
        "fileSystem.evictAtPercent" evict_at_percent: u32 = 90, Count(1..=100), Restart, field("spec.shared.fileSystem.evictAtPercent");
        /// Percent of the capacity at which removal ends. At most evictAtPercent.
        "fileSystem.evictToPercent" evict_to_percent: u32 = 80, Count(1..=100), Restart, field("spec.shared.fileSystem.evictToPercent");
        /// Objects are removed this long after they were written. 0 disables expiry.
        "fileSystem.expireAfter" expire_after: Duration, Time(0..=87_600 * HOUR_MS), Restart, field("spec.shared.fileSystem.expireAfter").within(HOUR_MS..=YEAR_MS);
        /// For debugging. Audit: every operation of the tier is logged. Blackhole: nothing is kept, and the tier is not used.
        "fileSystem.mode" mode: TierMode, Choice, Restart;
    }
}

impl std::fmt::Debug for Redis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Redis")
            .field("urls", &self.urls.len())
            .field("auth", &self.auth)
            .field("ca", &self.ca)
            .field("ttl", &self.ttl)
            .field("mode", &self.mode)
            .finish()
    }
}

section! {
    /// What is written to the lower tiers, and when.
    #[derive(Debug)]
    Write {
        /// When chunks are written to lower tiers: as soon as they are readable, after backAfter (earlier if much waits), or never.
        "write.policy" policy: WritePolicy, Choice, Live, field("spec.write.policy");
        /// With WriteBack: wait before a chunk is written.
        "write.backAfter" back_after: Duration = Duration::from_ms(60_000), Time(0..=24 * HOUR_MS), Live;
        /// Which chunks are written to lower tiers: all, or those that are used a second time.
        "write.admission" admission: Admission, Choice, Live, field("spec.write.admission");
        /// How chunks are packed in lower tiers. None and Lossless read each other's objects. Each lossy codec is its own domain.
        "write.codec" codec: Codec, Choice, Restart, field("spec.write.codec");
    }
}

section! {
    /// Bandwidth limits of the lower tiers, all together, in bytes per second; 0 = no limit.
    #[derive(Debug)]
    Pacing {
        /// Limit for bytes from all lower tiers into memory. 0: no limit.
        "pacing.readBytesPerSecond" read_bytes_per_second: ByteSize, Size(0..=TI), Live;
        /// Limit for bytes from memory to all lower tiers and for background checks. 0: no limit.
        "pacing.writeBytesPerSecond" write_bytes_per_second: ByteSize, Size(0..=TI), Live;
    }
}

choice!(
    /// What a tier does, for debugging.
    TierMode {
        #[default]
        Normal = "Normal",
        /// Every operation is logged.
        Audit = "Audit",
        /// Writes are accepted and dropped; nothing is found.
        Blackhole = "Blackhole",
    }
);
choice!(
    /// When a chunk in memory is written to the lower tiers.
    WritePolicy {
        /// As soon as it is readable.
        #[default]
        WriteThrough = "WriteThrough",
        /// After `backAfter`, or earlier if much waits.
        WriteBack = "WriteBack",
        None = "None",
    }
);
choice!(
    /// Which chunks are written to the lower tiers.
    Admission {
        #[default]
        All = "All",
        /// Chunks that are used a second time.
        Reused = "Reused",
    }
);
choice!(
    /// How chunks are packed in lower tiers.
    Codec {
        /// Not packed.
        #[default]
        None = "None",
        /// Lossless compression.
        Lossless = "Lossless",
        /// FP8 with a scale per 128 numbers. Lossy.
        Fp8 = "FP8",
        /// 8-bit integers with a scale per 128 numbers. Lossy.
        Int8 = "INT8",
        /// 4-bit integers between the smallest and the largest of 64 numbers. Very lossy.
        Int4 = "INT4",
        /// A few quantisation steps per token and layer, then an entropy coder. The smallest objects and the largest loss.
        CacheGen = "CacheGen",
    }
);

impl Codec {
    /// The codec's value in object headers.
    pub fn of_objects(self) -> object::Codec {
        match self {
            Self::None => object::Codec::None,
            Self::Lossless => object::Codec::Lossless,
            Self::Fp8 => object::Codec::Fp8,
            Self::Int8 => object::Codec::Int8,
            Self::Int4 => object::Codec::Int4,
            Self::CacheGen => object::Codec::CacheGen,
        }
    }
}
