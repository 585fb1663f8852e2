//! `verify`: reads every object of a tier and compares its bytes with their digests.

use super::progress::Progress;
use super::target::{Output, Target};
use super::{Failed, Stopped, count, ended, size, walk, write_json};
use crate::shm::mapping::Mapping;
use crate::tiers::{Cause, Get, Kind, Place, Span, Tier, TierError};
use kvcachepool_protocol::config::ByteSize;
use kvcachepool_protocol::object::{ALIGN, ObjectName, Section};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

/// Problems that a report lists; all are counted.
const PROBLEMS_MAX: usize = 10_000;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) target: Target,
    /// Remove objects that are corrupt.
    #[arg(long)]
    pub(super) remove_corrupt: bool,
    /// Memory to read into; larger objects are read in parts.
    #[arg(long, value_name = "SIZE", default_value = "256Mi")]
    pub(super) memory: ByteSize,
}

/// What was found.
#[derive(Debug, Default, Serialize)]
pub(super) struct Report {
    pub objects: u64,
    /// Of sections that were read.
    pub bytes: u64,
    pub ok: u64,
    /// Their bytes are not what their heads say, or their heads are none.
    pub corrupt: u64,
    /// Another object lies under their name.
    pub foreign: u64,
    /// They could not be read.
    pub failed: u64,
    pub removed: u64,
    pub foreign_names: u64,
    pub problems: Vec<Problem>,
}

/// An object that is not right.
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

/// Does it and prints it.
pub(super) fn print(args: &Args, out: &mut dyn Write) -> Result<Report, Failed> {
    let output = args.target.output;
    let memory = memory(args.memory)?;
    args.target.with(async |tier: &dyn Tier| {
        let reader = Reader { tier, memory };
        let mut progress = Progress::new(tier.usage().await?.objects);
        let mut report = Report::default();
        let foreign_names = walk(tier, async |listed| {
            progress.at(report.objects, report.bytes);
            report.objects += 1;
            match reader.read(&listed.name).await {
                Ok(bytes) => {
                    report.ok += 1;
                    report.bytes += bytes;
                }
                Err(e) if ends_it(e.cause) => return Err(e.into()),
                Err(e) => {
                    let problem = report.found(&reader, &listed.name, &e, args).await?;
                    if output == Output::Text {
                        progress.clear();
                        write_problem(out, &problem)?;
                    }
                    if report.problems.len() < PROBLEMS_MAX {
                        report.problems.push(problem);
                    }
                }
            }
            Ok(())
        })
        .await?;
        drop(progress);
        report.foreign_names = foreign_names;
        match output {
            Output::Json => write_json(out, &report)?,
            Output::Text => write_report(out, &report)?,
        }
        Ok::<_, Stopped>(report)
    })
}

impl Report {
    /// Counts what is wrong with an object, and takes it away where that was asked for.
    async fn found(
        &mut self,
        reader: &Reader<'_>,
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
        let removed = remove && reader.tier.remove(std::slice::from_ref(name)).await? > 0;
        self.removed += u64::from(removed);
        Ok(Problem {
            object: name.s3(""),
            cause: error.cause.name(),
            detail: error.detail.clone(),
            removed,
        })
    }
}

/// Does it say that no other object can be read either?
fn ends_it(cause: Cause) -> bool {
    use Cause::{Denied, Gone, InUse, Unauthenticated, Unreachable};
    matches!(cause, Denied | Gone | InUse | Unauthenticated | Unreachable)
}

fn memory(size: ByteSize) -> Result<Arc<Mapping>, String> {
    let bytes = size.0.max(ALIGN).next_multiple_of(ALIGN);
    let mapping = Mapping::private("kvcachepool-verify", bytes);
    let mapping = mapping.map_err(|e| format!("--memory {size}: {e}"))?;
    Ok(Arc::new(mapping))
}

struct Reader<'a> {
    tier: &'a dyn Tier,
    memory: Arc<Mapping>,
}

impl Reader<'_> {
    fn failed(&self, cause: Cause, name: &ObjectName, detail: impl Into<String>) -> TierError {
        let tier: Kind = self.tier.kind();
        TierError::new(tier, cause, detail).about(name.s3(""))
    }

    /// Reads an object and checks it; returns the bytes of its sections.
    async fn read(&self, name: &ObjectName) -> Result<u64, TierError> {
        let head = self.tier.head(name).await?;
        let mut left = head.sections.as_slice();
        loop {
            let places = self.places(left);
            let (part, rest) = left.split_at(places.len());
            if part.is_empty() {
                break;
            }
            self.check(name, part, places).await?;
            left = rest;
        }
        if let Some(section) = left.first() {
            let needed = ByteSize(section.stored_bytes.next_multiple_of(ALIGN));
            let detail = format!("a section is larger than the memory; use --memory {needed}");
            return Err(self.failed(Cause::Config, name, detail));
        }
        Ok(head.sections.iter().map(|s| s.stored_bytes).sum())
    }

    /// Where sections go: as many of them as there is memory for.
    fn places(&self, sections: &[Section]) -> Vec<Place> {
        let mut at = 0;
        let place = |section: &Section| {
            let span = Span::new(self.memory.clone(), at, section.stored_bytes, Arc::new(()))?;
            at += section.stored_bytes.next_multiple_of(ALIGN);
            Some(Place {
                group: section.group,
                shard: section.shard,
                span,
            })
        };
        sections.iter().map_while(place).collect()
    }

    async fn check(
        &self,
        name: &ObjectName,
        sections: &[Section],
        places: Vec<Place>,
    ) -> Result<(), TierError> {
        let spans: Vec<Span> = places.iter().map(|place| place.span.clone()).collect();
        let name = name.clone();
        let get = Get {
            name: name.clone(),
            places,
        };
        let head = self.tier.get(get).await?;
        if head.name() != name {
            let detail = format!("{} lies there", head.name().s3(""));
            return Err(self.failed(Cause::Foreign, &name, detail));
        }
        for (section, span) in sections.iter().zip(spans) {
            if span.digest() != Some(section.stored_digest) {
                let (group, shard) = (section.group, section.shard);
                let detail = format!("section {group}/{shard} is not what its digest says");
                return Err(self.failed(Cause::Corrupt, &name, detail));
            }
        }
        Ok(())
    }
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
    let failed = report.failed;
    writeln!(
        out,
        "{objects}: {ok} ok ({bytes}), {corrupt} corrupt, {foreign} foreign, {failed} not read"
    )?;
    if report.removed > 0 {
        let removed = count(report.removed, "object", "objects");
        writeln!(out, "{removed} removed")?;
    } else if report.corrupt > 0 {
        writeln!(
            out,
            "--remove-corrupt removes what is corrupt; the sidecar never serves it"
        )?;
    }
    if report.foreign_names > 0 {
        let foreign = count(report.foreign_names, "name is", "names are");
        writeln!(out, "{foreign} none of ours, and left alone")?;
    }
    Ok(())
}
