//! Label values as Prometheus's custom writes them. The rest of the code uses names from other places, such as a reason in status
//! (`QueueFull`); a metric has the same name in snake_case (`queue_full`).

use std::borrow::Cow;

/// Labels whose values are not this project's names: config keys, HTTP paths, kinds of Kubernetes objects, servers, versions.
pub const VERBATIM: &[&str] = &["key", "kind", "path", "server", "version"];

/// The values to export for the labels with these names.
pub(crate) fn values<'a>(names: &[&str], values: &[&'a str]) -> Vec<Cow<'a, str>> {
    let mut names = names.iter();
    let exported = values.iter().map(|value| match names.next() {
        Some(name) if VERBATIM.contains(name) => Cow::Borrowed(*value),
        _ => snake_case(value),
    });
    exported.collect()
}

/// The name in snake_case. A word begins at an upper-case letter that follows a lower-case letter or a digit, or that is the last of several.
pub fn snake_case(value: &str) -> Cow<'_, str> {
    let bytes = value.as_bytes();
    if !bytes.iter().any(u8::is_ascii_uppercase) {
        return Cow::Borrowed(value);
    }
    let mut out = String::with_capacity(value.len() + 4);
    for (at, letter) in value.char_indices() {
        let before = at.checked_sub(1).map_or(b'/', |at| bytes[at]);
        let after = bytes.get(at + 1).is_some_and(u8::is_ascii_lowercase);
        let word = before.is_ascii_lowercase()
            || before.is_ascii_digit()
            || (before.is_ascii_uppercase() && after);
        if letter.is_ascii_uppercase() && word {
            out.push('_');
        }
        out.push(letter.to_ascii_lowercase());
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_any_casing_become_snake_case() {
        for (name, exported) in [
            ("QueueFull", "queue_full"),
            ("minLoadTokens", "min_load_tokens"),
            ("no_room", "no_room"),
            ("grant_refused/NoRoom", "grant_refused/no_room"),
            ("NoNVMeDisk", "no_nv_me_disk"),
            ("HTTPError", "http_error"),
            ("S3Down", "s3_down"),
            ("PROBE", "probe"),
            ("ÄnderungX", "Änderung_x"),
            ("", ""),
        ] {
            assert_eq!(snake_case(name), exported);
        }
    }

    #[test]
    fn values_of_others_are_exported_as_they_are() {
        let names = ["kind", "result"];
        assert_eq!(values(&names, &["ConfigMap", "Ok"]), ["ConfigMap", "ok"]);
        // The registry refuses a wrong number of values.
        assert_eq!(values(&names, &["Pod"]).len(), 1);
        assert_eq!(values(&names, &["Pod", "Ok", "More"]).len(), 3);
    }
}
