//! The rules of a spec, each once: where it stands in the schema, as CEL for the API server, as a function for [`check`], and the
//! message that both give.

mod sidecar;
mod table;
#[cfg(test)]
mod tests;

use super::{KVCachePool, Reason};
use std::fmt;
use std::sync::LazyLock;

/// One rule.
pub struct Rule {
    /// Path of the field, which is `self` in the expression; empty for the whole object.
    pub at: &'static str,
    /// The expression that the API server evaluates where the field is present.
    pub cel: String,
    /// What to write.
    pub message: String,
    holds: Holds,
}

type Holds = Box<dyn Fn(&KVCachePool) -> bool + Send + Sync>;

impl Rule {
    /// Whether it holds; a field that is absent breaks no rule.
    pub fn holds(&self, pool: &KVCachePool) -> bool {
        (self.holds)(pool)
    }
}

/// One thing that is wrong with a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// What kind of problem.
    pub reason: Reason,
    /// Path of the field.
    pub field: String,
    /// What to write.
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

/// All that is wrong with a pool.
pub fn check(pool: &KVCachePool) -> Vec<Problem> {
    let broken = rules().iter().filter(|rule| !rule.holds(pool));
    let problem = |rule: &Rule| Problem {
        reason: Reason::InvalidSpec,
        field: rule.at.to_string(),
        message: rule.message.clone(),
    };
    broken.map(problem).collect()
}
