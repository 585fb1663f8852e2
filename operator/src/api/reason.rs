//! The one table of reasons why a pool is accepted or not.

crate::reasons::reasons! {
    "Reason of the condition `Accepted`."

    Accepted = "The pool's spec is in order.",
    InvalidSpec = "A field has a value that it cannot have; the message names the field and says what to write. The object was stored before the rule existed.",
    InvalidSettings = "A key of `spec.sidecar.settings` is unknown, has a wrong value, or belongs to another field of the pool; the message names it.",
    Malformed = "The stored object cannot be read by this version: a field has another type than the schema says, or a value that only a newer version knows. Write the pool anew, or update the operator.",
}
