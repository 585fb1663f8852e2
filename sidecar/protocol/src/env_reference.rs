//! References to Secrets and ConfigMaps in the environment of a sidecar. The operator makes them optional, so that a missing object
//! holds no pod up, and lists them in a variable of their own; the sidecar names those that the kubelet could not resolve.

use std::fmt;

/// The variable that lists them.
pub const VARIABLE: &str = "KVCACHEPOOL_ENV_REFERENCES";

/// A variable whose value comes from a key of a Secret or a ConfigMap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvReference<'a> {
    /// Name of the variable.
    pub variable: &'a str,
    /// `Secret` or `ConfigMap`.
    pub kind: &'a str,
    /// Name of the object.
    pub object: &'a str,
    /// The key in it.
    pub key: &'a str,
}

/// A line of [`VARIABLE`]. Names of objects have no `/`, keys no `=`.
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

/// The references of a list. Lines that are none are left out.
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
