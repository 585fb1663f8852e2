//! The validation rules of a spec. Each rule is defined once: its place in the schema, CEL for the API server, a function for [`check`],
//! and the message of both.

mod sidecar;
mod table;
#[cfg(test)]
mod tests;

#[cfg(test)]
pub(super) use table::of_key;

use super::{KVCachePool, Reason, at};
use serde_json::{Value, json};
use std::fmt;
use std::sync::LazyLock;

pub struct Rule {
    /// Path of the field, which is `self` in the expression. Empty for the whole object.
    pub at: &'static str,
    /// The expression that the API server evaluates if the field is present.
    pub cel: String,
    /// What to write instead.
    pub message: String,
    holds: Holds,
}

/// Takes the pool, and the field as JSON.
type Holds = Box<dyn Fn(&KVCachePool, &Value) -> bool + Send + Sync>;

/// One violation of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    pub reason: Reason,
    /// Path of the field.
    pub field: String,
    /// What to write instead.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gap = if self.field.is_empty() { "" } else { ": " };
        write!(f, "{}{gap}{}", self.field, self.message)
    }
}

/// All rules, in the order of the spec.
pub fn rules() -> &'static [Rule] {
    static RULES: LazyLock<Vec<Rule>> = LazyLock::new(table::rules);
    &RULES
}

/// All violations of a pool.
pub fn check(pool: &KVCachePool) -> Vec<Problem> {
    let fields = json!({"spec": pool.spec});
    // An absent field satisfies every rule.
    let holds = |rule: &Rule| at(&fields, rule.at).is_none_or(|field| (rule.holds)(pool, field));
    let broken = rules().iter().filter(|rule| !holds(rule));
    let problem = |rule: &Rule| Problem {
        reason: Reason::InvalidSpec,
        field: rule.at.to_string(),
        message: rule.message.clone(),
    };
    broken.map(problem).collect()
}
