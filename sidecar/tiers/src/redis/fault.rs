//! What a server or the way to it says, as names of causes.

use crate::{Cause, Kind, TierError};
use kvcachepool_protocol::object::ObjectName;

/// Why something did not work, before it is known for which object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The server answered with an error; its text.
    Refused(String),
    /// Anything else.
    Of(Cause, String),
}

/// Where another node has what was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redirect {
    /// From now on.
    Moved(u16, String),
    /// This time.
    Ask(String),
}

impl Fault {
    /// The connection broke, or there is none.
    pub fn unreachable(why: impl ToString) -> Self {
        Self::Of(Cause::Unreachable, why.to_string())
    }

    /// An answer that makes no sense.
    pub fn protocol(why: impl ToString) -> Self {
        Self::Of(Cause::Protocol, why.to_string())
    }

    /// The same, said of a place on the way.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let (cause, detail) = self.told();
        Self::Of(cause, format!("{place}: {detail}"))
    }

    /// Nobody answers, or whoever does is of no use for a while.
    pub fn is_a_loss(&self) -> bool {
        match self {
            Self::Refused(text) => is_of_the_server(text),
            Self::Of(cause, _) => *cause == Cause::Unreachable,
        }
    }

    /// The cause that it has as an error of the tier.
    pub fn cause(&self) -> Cause {
        match self {
            Self::Refused(text) => meaning(text).0,
            Self::Of(cause, _) => *cause,
        }
    }

    /// For people.
    pub fn detail(&self) -> String {
        self.clone().told().1
    }

    fn told(self) -> (Cause, String) {
        match self {
            Self::Refused(text) => {
                let (cause, advice) = meaning(&text);
                let text: String = text.chars().take(200).collect();
                let gap = if advice.is_empty() { "" } else { "; " };
                (cause, format!("{text}{gap}{advice}"))
            }
            Self::Of(cause, detail) => (cause, detail),
        }
    }

    /// As an error of the tier; `place` names the server.
    pub fn error(self, place: &str, object: Option<&ObjectName>) -> TierError {
        let (cause, detail) = self.told();
        let error = TierError::new(Kind::Redis, cause, format!("{place}: {detail}"));
        match object {
            Some(name) => error.about(name.s3("")),
            None => error,
        }
    }

    /// Where to ask instead, if a node of a cluster said so.
    pub fn redirect(&self) -> Option<Redirect> {
        match self {
            Self::Refused(text) => redirect(text),
            Self::Of(..) => None,
        }
    }
}

/// Where to ask instead, if an error of a node of a cluster says so.
pub fn redirect(text: &str) -> Option<Redirect> {
    let mut words = text.split(' ');
    let kind = words.next()?;
    let slot = words.next()?.parse().ok()?;
    let place = words.next()?.to_string();
    match kind {
        "MOVED" => Some(Redirect::Moved(slot, place)),
        "ASK" => Some(Redirect::Ask(place)),
        _ => None,
    }
}

/// After such an error nothing that comes over this connection will be better; over a new one it may.
pub fn is_of_the_connection(text: &str) -> bool {
    let kind = text.split(' ').next().unwrap_or_default();
    matches!(kind, "READONLY" | "NOAUTH" | "WRONGPASS" | "NOPERM")
}

/// The user may not give this command.
pub fn is_denied(text: &str) -> bool {
    text.starts_with("NOPERM")
}

/// The server has no room for what a command writes.
pub fn is_full(text: &str) -> bool {
    text.starts_with("OOM")
}

/// After such an error the server is of no use for a while, as if it were not there.
pub fn is_of_the_server(text: &str) -> bool {
    let kind = text.split(' ').next().unwrap_or_default();
    matches!(kind, "LOADING" | "MASTERDOWN" | "CLUSTERDOWN")
}

/// The cause of an error's text, and what to do.
fn meaning(text: &str) -> (Cause, &'static str) {
    let kind = text.split(' ').next().unwrap_or_default();
    match kind {
        "OOM" => (
            Cause::Full,
            "give the server more memory (maxmemory), or let it evict (maxmemory-policy allkeys-lru)",
        ),
        "READONLY" => (
            Cause::ReadOnly,
            "this is a replica; name the master, or write redis-sentinel:// or redis-cluster://",
        ),
        "MISCONF" | "NOREPLICAS" => (Cause::ReadOnly, "the server takes no writes"),
        "NOAUTH" => (
            Cause::Unauthenticated,
            "the server wants a password: redis.auth",
        ),
        "WRONGPASS" => (
            Cause::Unauthenticated,
            "user or password are wrong; what redis.auth holds is read again",
        ),
        "NOPERM" => (
            Cause::Denied,
            "the user needs the commands of docs/guides/tiers.md on keys kvcp:*",
        ),
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" => (Cause::Unreachable, ""),
        "TRYAGAIN" | "BUSY" => (Cause::Throttled, ""),
        "MOVED" | "ASK" => (
            Cause::Config,
            "this is a node of a cluster: write redis-cluster://",
        ),
        "WRONGTYPE" => (Cause::Foreign, "a value of another kind lies there"),
        "ERR" if text.contains("max number of clients") => {
            (Cause::Throttled, "raise maxclients of the server")
        }
        "ERR" if text.contains("DB index") => (Cause::Gone, "the server has no such database"),
        _ => (Cause::Protocol, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_of_a_server_has_its_name() {
        for (text, cause) in [
            (
                "OOM command not allowed when used memory > 'maxmemory'.",
                Cause::Full,
            ),
            (
                "READONLY You can't write against a read only replica.",
                Cause::ReadOnly,
            ),
            (
                "MISCONF Redis is configured to save RDB snapshots",
                Cause::ReadOnly,
            ),
            (
                "NOREPLICAS Not enough good replicas to write.",
                Cause::ReadOnly,
            ),
            ("NOAUTH Authentication required.", Cause::Unauthenticated),
            (
                "WRONGPASS invalid username-password pair",
                Cause::Unauthenticated,
            ),
            ("NOPERM this user has no permissions", Cause::Denied),
            (
                "LOADING Redis is loading the dataset in memory",
                Cause::Unreachable,
            ),
            ("MASTERDOWN Link with MASTER is down", Cause::Unreachable),
            ("CLUSTERDOWN The cluster is down", Cause::Unreachable),
            (
                "TRYAGAIN Multiple keys request during rehashing",
                Cause::Throttled,
            ),
            ("BUSY Redis is busy running a script.", Cause::Throttled),
            ("ERR max number of clients reached", Cause::Throttled),
            ("MOVED 866 127.0.0.1:7001", Cause::Config),
            ("ASK 866 127.0.0.1:7001", Cause::Config),
            ("WRONGTYPE Operation against a key", Cause::Foreign),
            ("ERR DB index is out of range", Cause::Gone),
            ("ERR unknown command", Cause::Protocol),
            ("", Cause::Protocol),
        ] {
            let error = Fault::Refused(text.into()).error("host:1", None);
            assert_eq!((error.tier, error.cause), (Kind::Redis, cause), "{text}");
            assert!(error.detail.starts_with("host:1: "), "{error}");
        }
    }

    #[test]
    fn a_redirect_is_read_and_nothing_else_is_one() {
        let moved = Redirect::Moved(866, "127.0.0.1:7001".into());
        assert_eq!(redirect("MOVED 866 127.0.0.1:7001"), Some(moved));
        assert_eq!(
            redirect("ASK 1 [::1]:1"),
            Some(Redirect::Ask("[::1]:1".into()))
        );
        for text in [
            "",
            "MOVED",
            "MOVED x y",
            "MOVED 1",
            "ERR 1 a:1",
            "ASK 70000 a:1",
        ] {
            assert_eq!(redirect(text), None, "{text}");
        }
    }
}
