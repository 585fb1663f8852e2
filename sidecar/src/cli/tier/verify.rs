//! `verify`: reads every object of a tier and compares its bytes with their digests.

use super::progress::Progress;
use super::reader::{Memory, Reader};
use super::target::{Counts, Output, Target};
use super::{Failed, Stopped, count, ended, size, write_json};
use kvcachepool_protocol::config::ByteSize;
use kvcachepool_protocol::object::ObjectName;
use kvcachepool_tiers::{Cause, Pages, Removal, Tier, TierError};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

/// Problems that a report lists; all are counted.
const PROBLEMS_MAX: usize = 10_000;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) target: Target,
    /// Remove objects that are corrupt.
    #[arg(long)]
    pub(super) remove_corrupt: bool,
    /// Memory for reading. Objects are read in parallel while they fit; larger ones are read in parts.
    #[arg(long, value_name = "SIZE", default_value = "256Mi")]
    pub(super) memory: ByteSize,
}

/// Result of the command.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub objects: u64,
    /// Bytes of the sections that were read.
    pub bytes: u64,
    pub ok: u64,
    /// Objects whose bytes do not match their digests, or whose header is invalid.
    pub corrupt: u64,
    /// Names that contain another object.
    pub foreign: u64,
    /// Objects that could not be read.
    pub failed: u64,
    /// Objects that were removed after they were listed: other processes use the tier.
    pub gone: u64,
    pub removed: u64,
    pub foreign_names: u64,
    pub problems: Vec<Problem>,
}

#[derive(Debug, Serialize)]
pub(super) struct Problem {
    pub object: String,
    pub cause: &'static str,
    pub detail: String,
    pub removed: bool,
}

impl Report {
    fn is_right(&self) -> bool {
        self.corrupt + self.foreign + self.failed == 0
    }
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let printed = print(args, &mut std::io::stdout().lock());
    ended(printed.map(|report| ExitCode::from(u8::from(!report.is_right()))))
}

pub(super) fn print(args: &Args, out: &mut dyn Write) -> Result<Report, Failed> {
    let output = args.target.output;
    let memory = Memory::new(args.memory)?;
    args.target.with(Counts::Used, async |tier: &dyn Tier| {
        let mut progress = Progress::new(tier.usage().await?.objects);
        let mut report = Report::default();
        let mut pages = Pages::of(tier);
        while let Some(page) = pages.next().await? {
            report.foreign_names += page.foreign;
            let names = page.objects.into_iter().map(|listed| listed.name).collect();
            let mut reader = Reader::new(tier, &memory, names);
            loop {
                let batch = reader.next().await;
                if batch.is_empty() {
                    break;
                }
                for (name, read) in batch {
                    report.objects += 1;
                    let error = match read {
                        Ok(bytes) => {
                            report.ok += 1;
                            report.bytes += bytes;
                            continue;
                        }
                        Err(error) => error,
                    };
                    if error.cause == Cause::Missing {
                        report.gone += 1;
                        continue;
                    }
                    if ends_it(error.cause) {
                        return Err(error.into());
                    }
                    let problem = report.found(tier, &name, &error, args).await?;
                    if output == Output::Text {
                        progress.clear();
                        write_problem(out, &problem)?;
                    }
                    if report.problems.len() < PROBLEMS_MAX {
                        report.problems.push(problem);
                    }
                }
                progress.at(report.objects, report.bytes);
            }
        }
        drop(progress);
        match output {
            Output::Json => write_json(out, &report)?,
            Output::Text => write_report(out, &report)?,
        }
        Ok::<_, Stopped>(report)
    })
}

impl Report {
    /// Counts a problem, and deletes the object if the options say so.
    async fn found(
        &mut self,
        tier: &dyn Tier,
        name: &ObjectName,
        error: &TierError,
        args: &Args,
    ) -> Result<Problem, Stopped> {
        let counter = match error.cause {
            Cause::Corrupt => &mut self.corrupt,
            Cause::Foreign => &mut self.foreign,
            _ => &mut self.failed,
        };
        *counter += 1;
        let remove = args.remove_corrupt && error.cause == Cause::Corrupt;
        let removed = remove && tier.remove(Removal::Unusable(name)).await? > 0;
        self.removed += u64::from(removed);
        Ok(Problem {
            object: name.s3(""),
            cause: error.cause.name(),
            detail: error.detail.clone(),
            removed,
        })
    }
}

/// Whether the error means that no other object can be read either.
fn ends_it(cause: Cause) -> bool {
    use Cause::{Denied, Gone, InUse, Unauthenticated, Unreachable};
    matches!(cause, Denied | Gone | InUse | Unauthenticated | Unreachable)
}

fn write_problem(out: &mut dyn Write, problem: &Problem) -> std::io::Result<()> {
    let removed = if problem.removed { " (removed)" } else { "" };
    let (object, cause, detail) = (&problem.object, problem.cause, &problem.detail);
    writeln!(out, "{object}: {cause}: {detail}{removed}")
}

fn write_report(out: &mut dyn Write, report: &Report) -> std::io::Result<()> {
    let objects = count(report.objects, "object", "objects");
    let bytes = size(report.bytes);
    let (ok, corrupt, foreign) = (report.ok, report.corrupt, report.foreign);
    let (failed, gone) = (report.failed, report.gone);
    writeln!(
        out,
        "{objects}: {ok} ok ({bytes}), {corrupt} corrupt, {foreign} foreign, {failed} not read, {gone} removed meanwhile"
    )?;
    if report.removed > 0 {
        let removed = count(report.removed, "object", "objects");
        writeln!(out, "{removed} removed")?;
    } else if report.corrupt > 0 {
        writeln!(
            out,
            "the sidecar never serves corrupt objects; delete them with --remove-corrupt"
        )?;
    }
    if report.foreign_names > 0 {
        let foreign = count(report.foreign_names, "foreign name", "foreign names");
        writeln!(out, "{foreign}, left alone")?;
    }
    Ok(())
}
