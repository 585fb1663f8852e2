//! `check`: runs a Job that checks a pool's shared tiers like its pods would, with their service account, image, Secrets and network, and
//! prints the result.

use super::args::Check;
use super::job::{OVERTIME, run, suffix};
use super::read::Cluster;
use super::settings::of_shared_tiers;
use super::table::table;
use crate::desired::job;
use kvcachepool_protocol::check::Report;

/// Checks the tiers of a pool.
pub async fn check(cluster: &Cluster, args: &Check) -> Result<Report, Box<dyn std::error::Error>> {
    let pool = cluster.one(&args.pool).await?;
    let settings = of_shared_tiers(cluster, &pool, args.image.as_deref()).await?;
    let (account, limit) = (&args.service_account, args.timeout);
    let wanted = job::check(&pool, &settings, account, limit + OVERTIME, &suffix());
    let ended = run(cluster, wanted, &settings.image, limit).await?;
    Ok(read(&ended.log).ok_or_else(|| ended.no_report())?)
}

/// Finds the report in a log that may have other lines.
fn read(log: &str) -> Option<Report> {
    let documents = log.lines().rev().filter(|line| line.starts_with('{'));
    documents
        .filter(|line| line.contains("\"tiers\""))
        .find_map(|line| serde_json::from_str(line).ok())
}

/// The report as text.
pub fn text(report: &Report) -> String {
    let row = |tier: &kvcachepool_protocol::check::Tier| {
        let state = if tier.ready { "Ready" } else { "Unavailable" };
        let cells = [&tier.tier, state, &tier.place, &tier.reason, &tier.message];
        cells.map(str::to_owned).to_vec()
    };
    let rows: Vec<_> = report.tiers.iter().map(row).collect();
    table(&["TIER", "STATE", "WHERE", "REASON", "MESSAGE"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::check::Tier;

    #[test]
    fn the_report_is_found_among_other_lines() {
        let report = Report::of(vec![Tier {
            tier: "s3".to_owned(),
            place: "s3://kv".to_owned(),
            ready: false,
            reason: "Denied".to_owned(),
            message: "s3:PutObject denied on bucket kv".to_owned(),
        }]);
        let line = serde_json::to_string(&report).unwrap();
        let log = format!("warning: a key\n{{\"level\": \"warn\"}}\n{line}\n");
        assert_eq!(read(&log), Some(report.clone()));
        assert_eq!(read("error: ConfigInvalid\n"), None);
        assert_eq!(
            text(&report),
            "TIER   STATE         WHERE     REASON   MESSAGE\n\
             s3     Unavailable   s3://kv   Denied   s3:PutObject denied on bucket kv\n"
        );
    }
}
