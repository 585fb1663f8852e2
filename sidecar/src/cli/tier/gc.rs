//! `gc`: deletes objects of a tier by domain and age. Works page by page, so its memory does not depend on the number of objects.

use super::domain::Domain;
use super::progress::Progress;
use super::target::{Counts, Output, Target};
use super::{DomainRow, Failed, Stopped, Sums, count, ended, now_unix_s, size, write_json};
use kvcachepool_protocol::config::Duration;
use kvcachepool_tiers::{Listed, PASSES_MAX, Pages, Tier};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

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
    args.target.with(Counts::Unused, async |tier: &dyn Tier| {
        let (mut removed, mut kept, mut sums) = (0, 0, Sums::default());
        let (mut progress, mut now, mut left) = (Progress::new(0), None, None);
        for _ in 0..PASSES_MAX {
            let (mut pages, mut pass, mut bytes) = (Pages::of(tier), 0, 0);
            (kept, left) = (0, None);
            loop {
                let mut fit = Vec::new();
                let swept = pages.sweep(|listed| {
                    // A server's clock is known once it has answered.
                    let clock = || tier.info().unix_s.now().unwrap_or_else(now_unix_s);
                    let fits = args.which.has(listed, *now.get_or_insert_with(clock));
                    bytes += listed.bytes;
                    match fits {
                        true => fit.push(listed.clone()),
                        false => kept += 1,
                    }
                    fits && !args.dry_run
                });
                let Some(swept) = swept.await? else {
                    break;
                };
                pass += swept.objects;
                left = left.or(swept.whole().err());
                fit.iter().for_each(|listed| sums.add(listed));
                if args.objects {
                    progress.clear();
                    write_rows(out, args.target.output, &fit)?;
                }
                progress.at(pass + kept, bytes);
            }
            removed += pass;
            // Removing moves the pages of some tiers, so objects may have been skipped.
            if pass == 0 {
                break;
            }
        }
        drop(progress);
        if let Some(e) = left {
            return Err(e.into());
        }
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
