//! `inspect`: prints the domains of a tier with their objects, bytes and ages, or every object with the fields of its header.

use super::target::{Counts, Output, Target};
use super::{AT_ONCE, Failed, Stopped, Sums, age, count, ended, size, walk, write_json};
use futures::StreamExt;
use kvcachepool_protocol::object::Object;
use kvcachepool_tiers::{Listed, Tier};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(super) target: Target,
    /// Also print every object with the fields of its header.
    #[arg(long)]
    pub(super) objects: bool,
}

/// The summary, printed last.
#[derive(Debug, Serialize)]
struct Report {
    tier: &'static str,
    objects: u64,
    bytes: u64,
    /// Bytes that the tier uses for its objects.
    used_bytes: u64,
    foreign_names: u64,
    domains: Vec<super::DomainRow>,
}

/// One object of the listing.
#[derive(Debug, Serialize)]
struct ObjectRow {
    object: String,
    bytes: u64,
    written_unix_s: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    head: Option<Head>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Head {
    part: u32,
    parts: u32,
    tokens: u32,
    first_token: u32,
    created_unix_ms: u64,
    expires_unix_s: u64,
    engine: String,
    engine_version: String,
    namespace: String,
    parent: String,
    sections: Vec<SectionRow>,
}

#[derive(Debug, Serialize)]
struct SectionRow {
    group: u32,
    shard: u32,
    bytes: u64,
}

impl From<Object> for Head {
    fn from(object: Object) -> Self {
        let section = |s: &kvcachepool_protocol::object::Section| SectionRow {
            group: s.group,
            shard: s.shard,
            bytes: s.stored_bytes,
        };
        Self {
            part: object.part,
            parts: object.parts,
            tokens: object.tokens,
            first_token: object.first_token,
            created_unix_ms: object.created_unix_ms,
            expires_unix_s: object.expires_unix_s,
            engine: object.engine,
            engine_version: object.engine_version,
            namespace: object.namespace.hex(),
            parent: object.parent.hex(),
            sections: object.sections.iter().map(section).collect(),
        }
    }
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let printed = print(args, &mut std::io::stdout().lock());
    ended(printed.map(|()| ExitCode::SUCCESS))
}

pub(super) fn print(args: &Args, out: &mut dyn Write) -> Result<(), Failed> {
    let output = args.target.output;
    args.target.with(Counts::Used, async |tier: &dyn Tier| {
        let mut sums = Sums::default();
        let foreign_names = walk(tier, async |page| {
            page.iter().for_each(|listed| sums.add(listed));
            let page = page.into_iter().filter(|_| args.objects);
            let rows = futures::stream::iter(page.map(|listed| row(tier, listed)));
            let mut rows = std::pin::pin!(rows.buffered(AT_ONCE));
            while let Some(row) = rows.next().await {
                match output {
                    Output::Json => write_json(out, &row)?,
                    Output::Text => write_row(out, &row)?,
                }
            }
            Ok(())
        })
        .await?;
        let report = Report {
            tier: tier.info().kind.name(),
            objects: sums.objects(),
            bytes: sums.bytes(),
            used_bytes: tier.usage().await?.bytes,
            foreign_names,
            domains: sums.rows(),
        };
        match output {
            Output::Json => write_json(out, &report)?,
            Output::Text => write_report(out, &report, &sums)?,
        }
        Ok::<(), Stopped>(())
    })
}

async fn row(tier: &dyn Tier, listed: Listed) -> ObjectRow {
    let head = tier.head(&listed.name).await;
    let (head, error) = match head {
        Ok(object) => (Some(object.into()), None),
        Err(e) => (None, Some(e.to_string())),
    };
    ObjectRow {
        object: listed.name.s3(""),
        bytes: listed.bytes,
        written_unix_s: listed.written_unix_s,
        head,
        error,
    }
}

fn write_row(out: &mut dyn Write, row: &ObjectRow) -> std::io::Result<()> {
    let (bytes, age) = (size(row.bytes), age(row.written_unix_s));
    write!(out, "{}  {bytes}  {age}  ", row.object)?;
    match (&row.head, &row.error) {
        (Some(head), _) => {
            let (tokens, from) = (head.tokens, head.first_token);
            let sections = count(head.sections.len() as u64, "section", "sections");
            let (engine, version) = (&head.engine, &head.engine_version);
            writeln!(
                out,
                "{tokens} tokens from {from}, {sections}, {engine} {version}"
            )
        }
        (None, error) => writeln!(out, "{}", error.as_deref().unwrap_or_default()),
    }
}

fn write_report(out: &mut dyn Write, report: &Report, sums: &Sums) -> std::io::Result<()> {
    let objects = count(report.objects, "object", "objects");
    let (bytes, used) = (size(report.bytes), size(report.used_bytes));
    writeln!(out, "{}: {objects}, {bytes}; {used} used", report.tier)?;
    if report.foreign_names > 0 {
        let foreign = count(report.foreign_names, "foreign name", "foreign names");
        writeln!(out, "{foreign}, left alone")?;
    }
    sums.write(out)
}
