//! Maps errors of a server, or of the connection to it, to causes.

use crate::{Cause, Kind, TierError};
use kvcachepool_protocol::object::ObjectName;

/// An error before it is attributed to an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The text of the server's error reply.
    Refused(String),
    Of(Cause, String),
}

/// A redirect to another cluster node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Redirect {
    /// Permanent.
    Moved(u16, String),
    /// For this request only.
    Ask(String),
}

impl Fault {
    /// The connection broke or could not be opened.
    pub fn unreachable(why: impl ToString) -> Self {
        Self::Of(Cause::Unreachable, why.to_string())
    }

    /// A reply that violates the protocol.
    pub fn protocol(why: impl ToString) -> Self {
        Self::Of(Cause::Protocol, why.to_string())
    }

    /// Adds a place to the message.
    #[must_use]
    pub fn at(self, place: &str) -> Self {
        let (cause, detail) = self.told();
        Self::Of(cause, format!("{place}: {detail}"))
    }

    /// Whether the server does not answer, or is of no use for a while.
    pub fn is_a_loss(&self) -> bool {
        match self {
            Self::Refused(text) => is_of_the_server(text),
            Self::Of(cause, _) => *cause == Cause::Unreachable,
        }
    }

    /// The cause as an error of the tier.
    pub fn cause(&self) -> Cause {
        match self {
            Self::Refused(text) => meaning(text).0,
            Self::Of(cause, _) => *cause,
        }
    }

    /// The message, with advice.
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

    /// The redirect in an error of a cluster node, if any.
    pub fn redirect(&self) -> Option<Redirect> {
        match self {
            Self::Refused(text) => redirect(text),
            Self::Of(..) => None,
        }
    }
}

/// The redirect in an error text of a cluster node, if any.
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

/// After such an error this connection is useless; a new one may work.
pub fn is_of_the_connection(text: &str) -> bool {
    let kind = text.split(' ').next().unwrap_or_default();
    matches!(kind, "READONLY" | "NOAUTH" | "WRONGPASS" | "NOPERM")
}

/// Whether the user may not run this command.
pub fn is_denied(text: &str) -> bool {
    text.starts_with("NOPERM")
}

/// Whether the server is of no use for a while, as if it were unreachable.
pub fn is_of_the_server(text: &str) -> bool {
    let kind = text.split(' ').next().unwrap_or_default();
    matches!(kind, "LOADING" | "MASTERDOWN" | "CLUSTERDOWN")
}

/// The rights of the Redis user. `docs/guides/tiers.md` has the same sentence.
const RIGHTS: &str = "the user needs these commands on keys kvcp:*: GET GETRANGE SET MSET DEL EXISTS PEXPIRE PERSIST SCAN \
    INFO WATCH UNWATCH MULTI EXEC; with Sentinel ROLE, with a cluster CLUSTER SLOTS and ASKING, with a database other than 0 SELECT";

/// The cause of an error text, and advice.
fn meaning(text: &str) -> (Cause, &'static str) {
    let kind = text.split(' ').next().unwrap_or_default();
    match kind {
        "OOM" => (
            Cause::Full,
            "give the server more memory (maxmemory), or let it evict (maxmemory-policy allkeys-lru)",
        ),
        "READONLY" => (
            Cause::ReadOnly,
            "this is a replica; use the master's URL, or redis-sentinel:// or redis-cluster://",
        ),
        "MISCONF" | "NOREPLICAS" => (
            Cause::ReadOnly,
            "the server refuses writes: check its persistence and its replicas",
        ),
        "NOAUTH" => (
            Cause::Unauthenticated,
            "the server requires a password: set redis.auth",
        ),
        "WRONGPASS" => (
            Cause::Unauthenticated,
            "user or password is wrong; fix the files of redis.auth, which are read again",
        ),
        "NOPERM" => (Cause::Denied, RIGHTS),
        "LOADING" | "MASTERDOWN" | "CLUSTERDOWN" => (Cause::Unreachable, ""),
        "TRYAGAIN" | "BUSY" => (Cause::Throttled, ""),
        "MOVED" | "ASK" => (
            Cause::Config,
            "this is a cluster node: use redis-cluster://",
        ),
        "WRONGTYPE" => (Cause::Foreign, "the key holds a value of another type"),
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
    fn a_denied_command_names_the_rights_that_the_docs_list() {
        let docs = include_str!("../../../../docs/guides/tiers.md").replace('`', "");
        let words: Vec<_> = docs.split_whitespace().collect();
        let sentence = format!("{}.", RIGHTS.replace("the user", "The user"));
        assert!(words.join(" ").contains(&sentence));
        assert_eq!(meaning("NOPERM this user has no permissions").1, RIGHTS);
    }

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
