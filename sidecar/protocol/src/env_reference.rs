//! References to Secrets and ConfigMaps in the environment of a sidecar. The operator makes them optional, so that a missing object does
//! not block the pod, and lists them in an environment variable. The sidecar reports those that the kubelet could not resolve.

use std::fmt;

/// The environment variable with the list.
pub const VARIABLE: &str = "KVCACHEPOOL_ENV_REFERENCES";

/// An environment variable whose value comes from a key of a Secret or a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvReference<'a> {
    pub variable: &'a str,
    /// `Secret` or `ConfigMap`.
    pub kind: &'a str,
    pub object: &'a str,
    pub key: &'a str,
}

/// Formats a line of [`VARIABLE`]. Object names contain no `/`, keys no `=`.
impl fmt::Display for EnvReference<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            variable,
            kind,
            object,
            key,
        } = self;
        write!(f, "{kind}/{object}/{key}={variable}")
    }
}

/// Parses a list. Malformed lines are skipped.
pub fn parse(list: &str) -> impl Iterator<Item = EnvReference<'_>> {
    list.lines().filter_map(|line| {
        let (source, variable) = line.split_once('=')?;
        let mut parts = source.splitn(3, '/');
        Some(EnvReference {
            variable,
            kind: parts.next()?,
            object: parts.next()?,
            key: parts.next()?,
        })
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_list_reads_as_it_was_written() {
        let reference = |variable| EnvReference {
            variable,
            kind: "Secret",
            object: "redis.auth",
            key: "_user-name.1",
        };
        let written = [reference("A"), reference("B=C/D")];
        let list = written.clone().map(|r| r.to_string()).join("\n");
        assert_eq!(parse(&list).collect::<Vec<_>>(), written);
    }

    #[test]
    fn lines_that_are_no_references_are_left_out() {
        for list in ["", "\n", "A", "A=B", "Secret/a=B", "=", "//"] {
            assert_eq!(parse(list).count(), 0, "{list:?}");
        }
        assert_eq!(parse("x\nSecret/a/b=C\n").count(), 1);
    }
}
