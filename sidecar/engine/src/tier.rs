//! What the engine knows of the tiers below memory: which kinds there are, and how an operation ends.

use kvcachepool_protocol::object::BadObject;
use std::fmt;

/// Which tier, as metrics, status and errors name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A folder on a local disk.
    Disk,
    /// Redis or Valkey.
    Redis,
    /// S3 or compatible.
    S3,
}

impl Kind {
    /// Its name in metrics and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Redis => "redis",
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
    /// The object is there now, and will be after a crash of this process.
    New,
    /// It was there before: objects of one name hold the same bytes.
    Already,
}

/// Why an operation failed. The names are those of metrics and status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The object is not there.
    Missing,
    /// Its bytes are not what its head says, or its head is none.
    Corrupt,
    /// Something else lies under its name: of another model, layout or key, or of another version of this program.
    Foreign,
    /// A place is not as long as its section, or a section is not in the object.
    Shape,
    Full,
    /// It can be read only.
    ReadOnly,
    /// The folder, bucket or server's database is not there.
    Gone,
    /// Wrong or no credentials.
    Unauthenticated,
    /// The credentials do not allow it.
    Denied,
    /// The other side asks for less.
    Throttled,
    /// Nobody answers, or a connection broke.
    Unreachable,
    Timeout,
    /// The breaker is open after failures in a row: not even tried.
    BreakerOpen,
    /// Too much waits already: not even tried.
    Busy,
    /// Another process has the folder.
    InUse,
    Config,
    /// The other side answered what it should not.
    Protocol,
    /// An input or output error of the operating system.
    Io,
}

/// Is it worth trying again?
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Status {
    /// No: the same will happen again.
    Permanent,
    Temporary,
}

impl Cause {
    /// What a head means that this build cannot use. One of another version, or with what a newer build knows, is another's property and
    /// stays where it is; only what is damaged is corrupt, and may be removed.
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

    pub const ALL: [Self; 18] = [
        Self::Missing,
        Self::Corrupt,
        Self::Foreign,
        Self::Shape,
        Self::Full,
        Self::ReadOnly,
        Self::Gone,
        Self::Unauthenticated,
        Self::Denied,
        Self::Throttled,
        Self::Unreachable,
        Self::Timeout,
        Self::BreakerOpen,
        Self::Busy,
        Self::InUse,
        Self::Config,
        Self::Protocol,
        Self::Io,
    ];

    /// Its name in metrics and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Missing => "Missing",
            Self::Corrupt => "Corrupt",
            Self::Foreign => "Foreign",
            Self::Shape => "Shape",
            Self::Full => "Full",
            Self::ReadOnly => "ReadOnly",
            Self::Gone => "Gone",
            Self::Unauthenticated => "Unauthenticated",
            Self::Denied => "Denied",
            Self::Throttled => "Throttled",
            Self::Unreachable => "Unreachable",
            Self::Timeout => "Timeout",
            Self::BreakerOpen => "BreakerOpen",
            Self::Busy => "Busy",
            Self::InUse => "InUse",
            Self::Config => "Config",
            Self::Protocol => "Protocol",
            Self::Io => "Io",
        }
    }

    /// Is it worth trying again soon?
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

    /// It says something about the tier, not about one object.
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
