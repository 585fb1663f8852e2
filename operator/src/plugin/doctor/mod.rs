//! `doctor`: checks an installation from outside. `facts` reads the cluster, `judge` is pure and decides.

pub mod facts;
mod judge;
mod judge_pools;
#[cfg(test)]
mod tests;

use super::read::Cluster;
use super::table::table;
use facts::Facts;
use serde::Serialize;

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    Ok,
    /// Unknown, because the user lacks a right or the API server did not answer.
    Unknown,
    /// Works, but not as it should.
    Warn,
    /// Does not work.
    Fail,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Unknown => "unknown",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub level: Level,
    /// What was found, and what to do.
    pub message: String,
}

/// All findings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    pub findings: Vec<Finding>,
}

/// Checks the installation, and the pools of the namespace or of all.
pub async fn doctor(cluster: &Cluster, operator: Option<&str>, everywhere: bool) -> Diagnosis {
    let facts = Facts::read(cluster, operator, everywhere).await;
    let findings = judge::judge(&facts);
    Diagnosis { findings }
}

impl Diagnosis {
    /// Whether a finding is fail.
    pub fn failed(&self) -> bool {
        self.findings.iter().any(|f| f.level == Level::Fail)
    }

    /// The findings as text.
    pub fn text(&self) -> String {
        let rows: Vec<_> = self
            .findings
            .iter()
            .map(|f| {
                vec![
                    f.level.name().to_owned(),
                    f.check.to_owned(),
                    f.message.clone(),
                ]
            })
            .collect();
        table(&["RESULT", "CHECK", "MESSAGE"], &rows)
    }
}
