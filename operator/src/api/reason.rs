//! The table of reasons of the condition `Accepted`.

crate::reasons::reasons! {
    "Reason of the condition `Accepted`."

    Accepted = "The pool's spec is valid.",
    InvalidSpec = "A field has an invalid value. The message names the field and the expected value. The object was stored before the rule existed.",
    InvalidSettings = "A key of `spec.sidecar.settings` is unknown, has an invalid value, or has its own field in the pool. The message names it.",
    PolicyViolated = "The pool contradicts the cluster's policy (chart value `policy`). The message names the field and the rule. Change the field, or ask the operator's administrators.",
    Malformed = "The stored object cannot be read by this version: a field has the wrong type, or a value that only a newer version knows. Apply the pool again, or update the operator.",
}
