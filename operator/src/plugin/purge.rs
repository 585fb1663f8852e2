//! `purge`: runs a Job that deletes, or counts, the objects of a pool's shared tiers.

use super::args::Purge as Args;
use super::job::{Ended, OVERTIME, run, suffix};
use super::read::{Cluster, ReadError, failed};
use super::settings::of_shared_tiers;
use super::table::table;
use crate::api::KVCachePool;
use crate::desired::job::purge_now;
use kube::api::ListParams;
use kube::core::DeserializeGuard;
use kube::{Api, ResourceExt};
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why nothing was purged.
#[derive(Debug, Error)]
pub enum PurgeError {
    /// Other pools may share the tiers, and the user may not list them.
    #[error(
        "SharersUnknown: you may not list the pools of all namespaces, so it is unknown whether another pool uses the same tiers: {0}"
    )]
    SharersUnknown(ReadError),
}

/// A line of the Job's log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tier {
    /// `redis`, `filesystem` or `s3`.
    pub tier: String,
    /// URL or path.
    pub place: String,
    /// Objects that were deleted, or would be.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Names in the tier that are no objects of kvcachepool. They are kept.
    #[serde(default)]
    pub foreign: u64,
}

/// A tier that was left alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Shared {
    pub tier: &'static str,
    /// Namespace and name of a pool that uses it too.
    pub pool: String,
}

/// Result of a purge.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Whether nothing was deleted.
    pub dry_run: bool,
    pub tiers: Vec<Tier>,
    /// Tiers that another pool uses too.
    pub shared: Vec<Shared>,
    /// What could not be purged; empty if nothing.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub error: String,
}

/// Purges the shared tiers of a pool.
pub async fn purge(cluster: &Cluster, args: &Args) -> Result<Report, Box<dyn std::error::Error>> {
    let pool = cluster.one(&args.pool).await?;
    let settings = of_shared_tiers(cluster, &pool, args.image.as_deref()).await?;
    let (others, unreadable) = match others(cluster, &pool).await {
        Ok(found) => found,
        Err(e) if !args.dry_run => return Err(PurgeError::SharersUnknown(e).into()),
        Err(e) => {
            super::warning(&PurgeError::SharersUnknown(e).to_string());
            (Vec::new(), None)
        }
    };
    let image = settings.image.clone();
    let others: Vec<_> = others.iter().collect();
    let purge = purge_now(
        &pool,
        settings,
        (&others, unreadable.as_deref()),
        (args.service_account.as_deref(), args.dry_run),
        args.timeout + OVERTIME,
        &suffix(),
    );
    let shared = purge.shared.into_iter();
    let mut report = Report {
        dry_run: args.dry_run,
        shared: shared.map(|(tier, pool)| Shared { tier, pool }).collect(),
        ..Report::default()
    };
    if let Some(job) = purge.job {
        let ended = run(cluster, job, &image, args.timeout).await?;
        (report.tiers, report.error) = read(&ended);
    }
    Ok(report)
}

/// All pools but this one, and the first that cannot be read.
async fn others(
    cluster: &Cluster,
    pool: &KVCachePool,
) -> Result<(Vec<KVCachePool>, Option<String>), ReadError> {
    let all: Api<DeserializeGuard<KVCachePool>> = Api::all(cluster.client().clone());
    let found = all.list(&ListParams::default()).await;
    let (mut others, mut unreadable) = (Vec::new(), None);
    for stored in found.map_err(failed("KVCachePools of all namespaces"))? {
        match stored.0 {
            Ok(other) if other.uid() == pool.uid() => {}
            Ok(other) => others.push(other),
            Err(e) => {
                let (namespace, name) = (e.metadata.namespace, e.metadata.name);
                let name = [namespace, name].map(Option::unwrap_or_default).join("/");
                unreadable.get_or_insert(name);
            }
        }
    }
    Ok((others, unreadable))
}

/// The tiers in the Job's log, and its error.
fn read(ended: &Ended) -> (Vec<Tier>, String) {
    let lines = ended.log.lines();
    let tiers = lines.filter_map(|line| serde_json::from_str(line).ok());
    let error = match &*ended.why {
        "" | "exit code 0" => String::new(),
        _ => ended.no_report().to_string(),
    };
    (tiers.collect(), error)
}

impl Report {
    /// The report as text.
    pub fn text(&self) -> String {
        let rows: Vec<_> = self
            .tiers
            .iter()
            .map(|tier| {
                let numbers = [tier.objects, tier.bytes, tier.foreign].map(|n| n.to_string());
                let names = [tier.tier.clone(), tier.place.clone()];
                [&names[..], &numbers].concat()
            })
            .collect();
        let done = if self.dry_run {
            "WOULD DELETE"
        } else {
            "DELETED"
        };
        let mut text = match rows.is_empty() {
            true => String::new(),
            false => table(&["TIER", "WHERE", done, "BYTES", "FOREIGN"], &rows),
        };
        for Shared { tier, pool } in &self.shared {
            text.push_str(&format!("{tier} is left alone: pool {pool} uses it too\n"));
        }
        if !self.error.is_empty() {
            text.push_str(&format!("error: {}\n", self.error));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(log: &str, why: &str) -> Ended {
        let (log, why) = (log.to_owned(), why.to_owned());
        Ended { log, why }
    }

    #[test]
    fn the_result_of_each_tier_is_found_among_other_lines_and_an_error_is_kept() {
        let line =
            r#"{"tier":"s3","place":"s3://kv","dry_run":true,"objects":3,"bytes":9,"foreign":1}"#;
        let (tiers, error) = read(&ended(&format!("warning: a key\n{line}\n"), "exit code 0"));
        assert_eq!(error, "");
        let mut report = Report {
            dry_run: true,
            tiers,
            ..Report::default()
        };
        assert_eq!(
            report.text(),
            "TIER   WHERE     WOULD DELETE   BYTES   FOREIGN\ns3     s3://kv   3              9       1\n"
        );
        let (tiers, error) = read(&ended("error: redis: Denied\n", "exit code 1"));
        assert!(
            tiers.is_empty() && error.contains("error: redis: Denied"),
            "{error}"
        );
        report.error = error;
        report.shared = vec![Shared {
            tier: "redis",
            pool: "a/b".to_owned(),
        }];
        let text = report.text();
        assert!(
            text.contains("redis is left alone: pool a/b uses it too\n"),
            "{text}"
        );
        assert!(text.contains("error: NoReport: "), "{text}");
    }
}
