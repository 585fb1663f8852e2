//! The wire format of AdmissionReview v1. Input is parsed leniently: an answer needs only a uid.

use crate::untrusted::{self, Unparsed};
use k8s_openapi::ByteString;
use serde::Serialize;
use serde_json::Value;

/// Maximum values of a review. A large pod has some thousands, and as many again in `managedFields`.
const VALUES_MAX: usize = 20_000;

/// A review to answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Review {
    /// Repeated in the answer.
    pub uid: String,
    /// `CREATE`, `UPDATE`, ...
    pub operation: String,
    /// API group of the object's kind; empty for pods.
    pub group: String,
    /// Kind of the object.
    pub kind: String,
    /// For example `eviction` of `pods/eviction`.
    pub sub_resource: String,
    /// Namespace of the request. The object itself may not have it yet.
    pub namespace: String,
    /// The request is a dry run: nothing is stored, and nothing may be recorded.
    pub dry_run: bool,
    /// The object as it was sent, including unknown fields.
    pub object: Option<Value>,
}

/// Why a body is not a review.
#[derive(Debug, thiserror::Error)]
pub enum Unreadable {
    #[error("not JSON that can be read: {0}")]
    Unparsed(#[from] Unparsed),
    #[error("not an AdmissionReview: request.uid is missing")]
    NoUid,
}

impl Unreadable {
    /// Name in metrics.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Unparsed(Unparsed::TooManyValues(_)) => "TooManyValues",
            Self::Unparsed(Unparsed::Json(_)) => "NotJson",
            Self::NoUid => "NoUid",
        }
    }
}

impl Review {
    /// Parses a request's body.
    pub fn read(body: &[u8]) -> Result<Self, Unreadable> {
        let mut review: Value = untrusted::from_slice(body, VALUES_MAX)?;
        let request = review.get_mut("request").ok_or(Unreadable::NoUid)?;
        let text = |pointer: &str| {
            let found = request.pointer(pointer).and_then(Value::as_str);
            found.unwrap_or_default().to_owned()
        };
        let uid = text("/uid");
        if uid.is_empty() {
            return Err(Unreadable::NoUid);
        }
        Ok(Self {
            uid,
            operation: text("/operation"),
            group: text("/kind/group"),
            kind: text("/kind/kind"),
            sub_resource: text("/subResource"),
            namespace: text("/namespace"),
            dry_run: request.get("dryRun").and_then(Value::as_bool) == Some(true),
            object: request
                .get_mut("object")
                .map(Value::take)
                .filter(Value::is_object),
        })
    }
}

/// The answer. It always allows the pod.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    api_version: &'static str,
    kind: &'static str,
    response: Response,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    uid: String,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
}

impl Answer {
    /// Allows the object with a JSON patch, unless the patch is empty.
    pub fn allow(
        uid: String,
        patch: Option<&json_patch::Patch>,
    ) -> Result<Self, serde_json::Error> {
        let patch = match patch {
            Some(patch) if !patch.0.is_empty() => Some(ByteString(serde_json::to_vec(patch)?)),
            _ => None,
        };
        Ok(Self {
            api_version: "admission.k8s.io/v1",
            kind: "AdmissionReview",
            response: Response {
                uid,
                allowed: true,
                patch_type: patch.is_some().then_some("JSONPatch"),
                patch,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_review_with_fields_of_a_wrong_type_is_answered() {
        let body = json!({"request": {"uid": "u", "kind": 5, "operation": [], "dryRun": "yes", "object": "pod"}});
        let review = Review::read(body.to_string().as_bytes()).unwrap();
        assert_eq!(review.uid, "u");
        assert_eq!((review.kind.as_str(), review.operation.as_str()), ("", ""));
        assert!(!review.dry_run);
        assert_eq!(review.object, None);
    }

    #[test]
    fn a_review_without_a_uid_is_invalid() {
        for body in [
            "",
            "nonsense",
            "null",
            "[]",
            "{}",
            r#"{"request":null}"#,
            r#"{"request":{"uid":7}}"#,
        ] {
            assert!(Review::read(body.as_bytes()).is_err(), "{body}");
        }
    }

    #[test]
    fn a_review_that_would_become_far_larger_in_memory_is_not_parsed() {
        let pod = format!(r#"{{"args":[{}0]}}"#, "0,".repeat(VALUES_MAX));
        let body = format!(r#"{{"request":{{"uid":"u","object":{pod}}}}}"#);
        let error = Review::read(body.as_bytes()).err();
        assert_eq!(error.map(|e| e.name()), Some("TooManyValues"));
    }

    #[test]
    fn deep_nesting_is_an_error_and_no_overflow() {
        assert!(Review::read("[".repeat(1 << 20).as_bytes()).is_err());
    }

    #[test]
    fn a_response_has_a_base64_patch_unless_it_is_empty() {
        let patch: json_patch::Patch =
            serde_json::from_value(json!([{"op": "remove", "path": "/a"}])).unwrap();
        let answer =
            serde_json::to_value(Answer::allow("u".into(), Some(&patch)).unwrap()).unwrap();
        assert_eq!(answer["response"]["patchType"], "JSONPatch");
        assert_eq!(
            answer["response"]["patch"],
            "W3sib3AiOiJyZW1vdmUiLCJwYXRoIjoiL2EifV0="
        );
        let empty = json_patch::Patch::default();
        let answer =
            serde_json::to_value(Answer::allow("u".into(), Some(&empty)).unwrap()).unwrap();
        assert_eq!(answer["response"], json!({"uid": "u", "allowed": true}));
    }

    proptest! {
        #[test]
        fn parsing_never_panics(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _read = Review::read(&body);
        }
    }
}
