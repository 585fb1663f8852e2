//! Formats of Kubernetes names, for text from outside that becomes part of pods or of API server URLs. None is wider than the API server's
//! own: it accepts every text that passes here.

/// Longest label, by RFC 1123.
const LABEL_BYTES: usize = 63;
/// Longest subdomain, by RFC 1123.
const SUBDOMAIN_BYTES: usize = 253;
/// Longest name of an extended resource: quotas prepend `requests.`.
const RESOURCE_BYTES: usize = 240;

/// Fields of a pod that a variable can refer to, besides labels and annotations.
const FIELD_PATHS: [&str; 9] = [
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.hostIP",
    "status.hostIPs",
    "status.podIP",
    "status.podIPs",
];

/// A DNS label: the name of a namespace, of a container, of a pool.
pub fn is_label(text: &str) -> bool {
    text.len() <= LABEL_BYTES && within(text, u8::is_ascii_lowercase, b"-")
}

/// A DNS subdomain: the name of most objects.
pub fn is_subdomain(text: &str) -> bool {
    let part = |part| within(part, u8::is_ascii_lowercase, b"-");
    text.len() <= SUBDOMAIN_BYTES && text.split('.').all(part)
}

/// The key of a label, with or without a domain.
pub fn is_qualified(text: &str) -> bool {
    let name = match text.split_once('/') {
        Some((domain, name)) if is_subdomain(domain) => name,
        Some(_) => return false,
        None => text,
    };
    name.len() <= LABEL_BYTES && within(name, u8::is_ascii_alphabetic, b"-_.")
}

/// A resource with a domain, such as `nvidia.com/gpu`, whose request always equals its limit.
pub fn is_extended_resource(text: &str) -> bool {
    text.len() <= RESOURCE_BYTES
        && text.contains('/')
        && is_qualified(text)
        && !text.starts_with("requests.")
        && !text.contains("kubernetes.io/")
}

/// A field of its pod that a container's variable can refer to.
pub fn is_field_path(text: &str) -> bool {
    let key = ["metadata.labels['", "metadata.annotations['"]
        .iter()
        .find_map(|start| text.strip_prefix(start)?.strip_suffix("']"));
    FIELD_PATHS.contains(&text) || key.is_some_and(is_qualified)
}

/// Whether a text has a letter or digit at both ends, and only those or `inner` between.
pub(crate) fn within(text: &str, letter: fn(&u8) -> bool, inner: &[u8]) -> bool {
    let end = |b: &u8| letter(b) || b.is_ascii_digit();
    let bytes = text.as_bytes();
    bytes.first().is_some_and(end)
        && bytes.last().is_some_and(end)
        && bytes.iter().all(|b| end(b) || inner.contains(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(is: fn(&str) -> bool, good: &[&str], bad: &[&str]) {
        for text in good {
            assert!(is(text), "{text}");
        }
        for text in bad {
            assert!(!is(text), "{text}");
        }
    }

    #[test]
    fn names_are_those_of_the_api_server() {
        let long = "a".repeat(64);
        all(
            is_label,
            &["a", "0-a", &long[..63]],
            &["", "-a", "a-", "A", "a.b", "a/b", "../a", "é", &long],
        );
        all(
            is_subdomain,
            &["a", "a.b-c.d"],
            &["", "a..b", ".a", "a.", "a.-b", "A", &"a".repeat(254)],
        );
        all(
            is_qualified,
            &["a", "A_b.c-D", "example.com/A_b"],
            &["", "/a", "a/", "a/b/c", "A.com/b", "a b", "_a", &long],
        );
    }

    #[test]
    fn resources_with_a_domain_are_distinguished_from_all_others() {
        all(
            is_extended_resource,
            &["nvidia.com/gpu", "a/B_1"],
            &[
                "gpu",
                "cpu",
                "nvidia.com/",
                "requests.nvidia.com/gpu",
                "kubernetes.io/x",
                "x.kubernetes.io/y",
                "nvidia..com/gpu",
                &format!("{}/{}", "a".repeat(200), "b".repeat(60)),
            ],
        );
    }

    #[test]
    fn field_paths_are_those_of_environment_variables() {
        all(
            is_field_path,
            &[
                "metadata.name",
                "status.podIPs",
                "metadata.labels['app']",
                "metadata.annotations['example.com/a']",
            ],
            &[
                "",
                "metadata",
                "spec.containers",
                "status.phase",
                "metadata.labels",
                "metadata.labels['a b']",
                "metadata.labels['a",
                "metadata.name['a']",
                "metadata.labels['']",
            ],
        );
    }
}
