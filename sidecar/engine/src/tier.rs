//! Kinds of tiers below memory, and the results of their operations.

use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::object::BadObject;
use std::fmt;

/// Kind of a tier, as named by metrics, status and errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A folder on a local disk.
    Disk,
    /// Redis or Valkey.
    Redis,
    /// A folder on a file system that many sidecars share.
    FileSystem,
    /// S3 or compatible.
    S3,
}

impl Kind {
    /// The tiers of a config file, the nearest first.
    pub fn configured(config: &Config) -> impl Iterator<Item = Self> {
        let disk = config.disk.path.is_some().then_some(Self::Disk);
        let redis = (!config.redis.urls.is_empty()).then_some(Self::Redis);
        let folder = config
            .file_system
            .path
            .is_some()
            .then_some(Self::FileSystem);
        let s3 = (!config.s3.bucket.is_empty()).then_some(Self::S3);
        disk.into_iter().chain(redis).chain(folder).chain(s3)
    }

    /// Name in metrics and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Redis => "redis",
            Self::FileSystem => "filesystem",
            Self::S3 => "s3",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The object is stored durably: it survives a crash of this process.
    New,
    /// The object existed already. Objects with one name hold the same bytes.
    Already,
}

crate::named! {
    /// Why an operation failed. Names are those of metrics and status.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum Cause {
        /// The object does not exist.
        Missing,
        /// The object's bytes do not match its head, or the head is damaged.
        Corrupt,
        /// The object under this name belongs to another model, layout or key, or to another version of this program.
        Foreign,
        /// A target's length differs from its section's, or the object lacks a section.
        Shape,
        Full,
        ReadOnly,
        /// The folder, bucket or database does not exist.
        Gone,
        /// Wrong or no credentials.
        Unauthenticated,
        /// The credentials do not permit the operation.
        Denied,
        /// The server asks for fewer requests.
        Throttled,
        /// No response, or the connection broke.
        Unreachable,
        Timeout,
        /// Not tried: the circuit breaker is open after consecutive failures.
        BreakerOpen,
        /// Not tried: too many operations wait already.
        Busy,
        /// Another process uses the folder.
        InUse,
        Config,
        /// The server sent an invalid response.
        Protocol,
        /// An I/O error of the operating system.
        Io,
    }
}

/// Whether a retry can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// No: it would fail again.
    Permanent,
    Temporary,
}

impl Cause {
    /// Cause for a head that this build cannot use. An object of another version, or with newer features, belongs to another build and is
    /// kept. Only a damaged object is corrupt, and may be deleted.
    pub fn of_head(bad: &BadObject) -> Self {
        match bad {
            BadObject::OtherVersion(_) | BadObject::Unsupported { .. } => Self::Foreign,
            BadObject::Torn { .. }
            | BadObject::NotAnObject
            | BadObject::HeaderCorrupt
            | BadObject::TableCorrupt
            | BadObject::Invalid(_) => Self::Corrupt,
        }
    }

    /// Whether a retry can help soon.
    pub fn status(self) -> Status {
        match self {
            Self::Throttled
            | Self::Unreachable
            | Self::Timeout
            | Self::Busy
            | Self::BreakerOpen => Status::Temporary,
            _ => Status::Permanent,
        }
    }

    /// True if the cause concerns the tier and not only one object.
    pub fn of_the_tier(self) -> bool {
        !matches!(
            self,
            Self::Missing
                | Self::Corrupt
                | Self::Foreign
                | Self::Shape
                | Self::Busy
                | Self::BreakerOpen
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_damaged_is_corrupt() {
        let unsupported = BadObject::Unsupported {
            what: "codec",
            value: 3,
        };
        for foreign in [BadObject::OtherVersion(9), unsupported] {
            assert_eq!(Cause::of_head(&foreign), Cause::Foreign, "{foreign}");
        }
        let torn = BadObject::Torn { got: 1, needed: 2 };
        for damaged in [
            torn,
            BadObject::NotAnObject,
            BadObject::HeaderCorrupt,
            BadObject::TableCorrupt,
            BadObject::Invalid("why"),
        ] {
            assert_eq!(Cause::of_head(&damaged), Cause::Corrupt, "{damaged}");
        }
    }
}
