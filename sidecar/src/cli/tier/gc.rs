//! `gc`: deletes objects of a tier by domain and age.

use super::domain::Domain;
use super::progress::Progress;
use super::target::{Output, Target};
use super::{DomainRow, Failed, Stopped, Sums, count, ended, now_unix_s, size, walk, write_json};
use kvcachepool_protocol::config::Duration;
use kvcachepool_tiers::{Listed, Source, Tier};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

/// Objects that are deleted between two updates of the progress.
const BATCH: usize = 500;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) target: Target,
    #[command(flatten)]
    pub(super) which: Which,
    /// Print what would be removed, and remove nothing.
    #[arg(long)]
    pub(super) dry_run: bool,
    /// Print every object that is removed.
    #[arg(long)]
    pub(super) objects: bool,
}

/// Conditions for a deletion; an object must meet all that are given.
#[derive(Debug, Default, clap::Args)]
#[group(required = true, multiple = true)]
pub(super) struct Which {
    /// Objects of this domain. Repeatable.
    #[arg(long, value_name = "MODEL/LAYOUT", conflicts_with = "all_but_domain")]
    pub domain: Vec<Domain>,
    /// Objects of every domain except this one. Repeatable.
    #[arg(long, value_name = "MODEL/LAYOUT")]
    pub all_but_domain: Vec<Domain>,
    /// Objects older than this, such as 30d or 12h. In a bucket, the server's clock counts.
    #[arg(long, value_name = "TIME")]
    pub older_than: Option<Duration>,
}

impl Which {
    fn has(&self, listed: &Listed, now_unix_s: u64) -> bool {
        let of = |domains: &[Domain]| domains.iter().any(|d| d.has(&listed.name));
        let old = self.older_than.is_none_or(|age| {
            let ago_s = now_unix_s.saturating_sub(listed.written_unix_s);
            ago_s.saturating_mul(1_000) > age.ms
        });
        let named = self.domain.is_empty() || of(&self.domain);
        old && named && !of(&self.all_but_domain)
    }
}

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub dry_run: bool,
    /// Objects that meet the conditions.
    pub objects: u64,
    pub bytes: u64,
    /// Objects that were deleted.
    pub removed: u64,
    /// Objects that are kept.
    pub kept: u64,
    domains: Vec<DomainRow>,
}

#[derive(Debug, Serialize)]
struct ObjectRow {
    object: String,
    bytes: u64,
    written_unix_s: u64,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let printed = print(args, &mut std::io::stdout().lock());
    ended(printed.map(|_| ExitCode::SUCCESS))
}

pub(super) fn print(args: &Args, out: &mut dyn Write) -> Result<Report, Failed> {
    args.target.with(async |tier: &dyn Tier| {
        // Deleting while listing would move the pages of some tiers.
        let (mut fit, mut kept, mut sums) = (Vec::new(), 0, Sums::default());
        let now = tier.info().unix_s.now().unwrap_or_else(now_unix_s);
        walk(tier, async |page| {
            for listed in page {
                if args.which.has(&listed, now) {
                    sums.add(&listed);
                    fit.push(listed);
                } else {
                    kept += 1;
                }
            }
            Ok(())
        })
        .await?;
        let removed = remove(tier, args, &fit, out).await?;
        let report = Report {
            dry_run: args.dry_run,
            objects: sums.objects(),
            bytes: sums.bytes(),
            removed,
            kept,
            domains: sums.rows(),
        };
        match args.target.output {
            Output::Json => write_json(out, &report)?,
            Output::Text => write_report(out, &report, &sums)?,
        }
        Ok::<_, Stopped>(report)
    })
}

async fn remove(
    tier: &dyn Tier,
    args: &Args,
    fit: &[Listed],
    out: &mut dyn Write,
) -> Result<u64, Stopped> {
    let (mut removed, mut done, mut bytes) = (0, 0, 0);
    let mut progress = Progress::new(fit.len() as u64);
    for batch in fit.chunks(BATCH) {
        if !args.dry_run {
            removed += tier.remove_chosen(batch).await?.objects;
        }
        done += batch.len() as u64;
        bytes += batch.iter().map(|listed| listed.bytes).sum::<u64>();
        if args.objects {
            progress.clear();
            write_rows(out, args.target.output, batch)?;
        }
        progress.at(done, bytes);
    }
    Ok(removed)
}

fn write_rows(out: &mut dyn Write, output: Output, batch: &[Listed]) -> std::io::Result<()> {
    for listed in batch {
        let (object, bytes) = (listed.name.s3(""), listed.bytes);
        match output {
            Output::Text => writeln!(out, "{object}  {}", size(bytes))?,
            Output::Json => {
                let written_unix_s = listed.written_unix_s;
                let row = ObjectRow {
                    object,
                    bytes,
                    written_unix_s,
                };
                write_json(out, &row)?;
            }
        }
    }
    Ok(())
}

fn write_report(out: &mut dyn Write, report: &Report, sums: &Sums) -> std::io::Result<()> {
    let what = if report.dry_run {
        "would be removed"
    } else {
        "removed"
    };
    let number = if report.dry_run {
        report.objects
    } else {
        report.removed
    };
    let objects = count(number, "object", "objects");
    let kept = count(report.kept, "object", "objects");
    let bytes = size(report.bytes);
    writeln!(out, "{objects} {what}, {bytes}; {kept} kept")?;
    sums.write(out)
}
