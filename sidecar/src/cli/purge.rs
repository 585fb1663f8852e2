//! `purge`: deletes every object of the shared tiers. Works page by page, so its memory does not depend on the number of objects.

use super::ConfigFiles;
use super::tier::{Output, count, size, write_json};
use kvcachepool_tiers::layers::{
    BreakerOptions, DeadlineOptions, Options, PackingOptions, RetryOptions, layered,
};
use kvcachepool_tiers::{
    Cause, Kind, Opening, PASSES_MAX, Tier, TierError, configured, sweep, sweep_all,
};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: ConfigFiles,
    /// Print what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// Output format: text for people, json for programs.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

/// Result for a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
struct Purged {
    /// Objects that were deleted, or would be.
    objects: u64,
    bytes: u64,
    /// Foreign names in the tier; they are kept.
    foreign: u64,
}

#[derive(Debug, Serialize)]
struct Row<'a> {
    tier: &'static str,
    place: &'a str,
    dry_run: bool,
    #[serde(flatten)]
    purged: Purged,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let config = args.files.required()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start: {e}"))?;
    let mut openings = configured(&config);
    openings.retain(|opening| opening.kind != Kind::Disk);
    if openings.is_empty() && args.output == Output::Text {
        println!("the config has no shared tier");
    }
    let mut failed = Vec::new();
    for opening in openings {
        match runtime.block_on(one(&opening, args.dry_run)) {
            Ok(purged) => print(args, &opening, purged, &mut std::io::stdout().lock())
                .map_err(|e| format!("cannot print: {e}"))?,
            Err(e) => failed.push(e.to_string()),
        }
    }
    match failed.is_empty() {
        true => Ok(ExitCode::SUCCESS),
        false => Err(failed.join("; ")),
    }
}

async fn one(opening: &Opening, dry_run: bool) -> Result<Purged, TierError> {
    let tier = opening.open().await?;
    purge(
        layered(tier, &patient(opening.layers.clone()))
            .tier
            .as_ref(),
        dry_run,
    )
    .await
}

/// No request waits here: an operation may take long and is retried as long as that can help.
fn patient(layers: Options) -> Options {
    Options {
        deadline: DeadlineOptions {
            question: Duration::from_secs(120),
            transfer: Duration::from_secs(120),
            ..DeadlineOptions::default()
        },
        retry: RetryOptions {
            attempts_max: 8,
            pause: Duration::from_millis(250),
            pause_max: Duration::from_secs(10),
            ..RetryOptions::default()
        },
        breaker: BreakerOptions {
            failures: u32::MAX,
            ..BreakerOptions::default()
        },
        // Objects are deleted by name, so the codec does not matter.
        packing: PackingOptions::default(),
        ..layers
    }
}

async fn purge(tier: &dyn Tier, dry_run: bool) -> Result<Purged, TierError> {
    if dry_run {
        let mut purged = Purged::default();
        let swept = sweep(tier, |listed| {
            purged.objects += 1;
            purged.bytes += listed.bytes;
            false
        });
        purged.foreign = swept.await?.foreign;
        return Ok(purged);
    }
    let (swept, ended) = sweep_all(tier, |_| true).await?;
    if !ended {
        let why = format!(
            "objects still remain after {PASSES_MAX} passes: end all pods of the pool, because they write new ones, and run the command again"
        );
        return Err(TierError::new(tier.info().kind, Cause::Busy, why));
    }
    Ok(Purged {
        objects: swept.objects,
        bytes: swept.bytes,
        foreign: swept.foreign,
    })
}

fn print(
    args: &Args,
    opening: &Opening,
    purged: Purged,
    out: &mut dyn Write,
) -> std::io::Result<()> {
    let (tier, place) = (opening.kind.name(), opening.place());
    if args.output == Output::Json {
        let dry_run = args.dry_run;
        let row = Row {
            tier,
            place: &place,
            dry_run,
            purged,
        };
        return write_json(out, &row);
    }
    let objects = count(purged.objects, "object", "objects");
    let bytes = size(purged.bytes);
    let what = match args.dry_run {
        true => "would be removed",
        false => "removed",
    };
    let foreign = match purged.foreign {
        0 => String::new(),
        n => format!("; {} kept", count(n, "foreign name", "foreign names")),
    };
    writeln!(out, "{tier}: {place}: {objects} {what}, {bytes}{foreign}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::chaos::{Chaos, Faults};
    use crate::testing::faulty::{Faulty, Reply};
    use crate::testing::shelf::Shelf;
    use crate::testing::suite::{Memory, Sample};
    use kvcachepool_tiers::PAGE;
    use kvcachepool_tiers::s3::S3;
    use std::sync::Arc;

    const OBJECTS: u64 = PAGE as u64 + 7;

    async fn full() -> Shelf {
        let (memory, shelf) = (Memory::new(32 << 20), Shelf::new(Kind::S3, 0));
        for number in 0..OBJECTS {
            let sample = Sample::new(number % 3, number, &[64]);
            shelf.put(sample.put(&memory)).await.unwrap();
        }
        shelf
    }

    async fn held(shelf: &Shelf) -> u64 {
        shelf.usage().await.unwrap().objects
    }

    #[tokio::test]
    async fn all_objects_of_all_pages_and_domains_go() {
        let shelf = full().await;
        let bytes = shelf.usage().await.unwrap().bytes;
        let dry = purge(&shelf, true).await.unwrap();
        assert_eq!((dry.objects, dry.bytes), (OBJECTS, bytes));
        assert_eq!(held(&shelf).await, OBJECTS);
        assert_eq!(purge(&shelf, false).await.unwrap(), dry);
        assert_eq!(held(&shelf).await, 0);
        assert_eq!(purge(&shelf, false).await.unwrap(), Purged::default());
    }

    #[tokio::test]
    async fn what_others_write_again_and_again_ends_it_with_what_to_do() {
        let key = Sample::new(1, 0, &[64]).name().s3("");
        let server = Faulty::start(move |asked| {
            let body = match asked.method.as_str() {
                "GET" => format!("<ListBucketResult><Contents><Key>{key}</Key><Size>9</Size></Contents></ListBucketResult>"),
                _ => "<DeleteResult/>".to_string(),
            };
            Reply::Full(200, vec![], body.into())
        })
        .await;
        let tier = S3::open_counted(&server.config()).await.unwrap();
        let error = purge(&tier, false).await.unwrap_err();
        assert_eq!(error.cause, Cause::Busy, "{error}");
        assert!(error.detail.contains("end all pods of the pool"), "{error}");
        let passes = server.count("POST");
        assert_eq!(passes, PASSES_MAX as usize);
    }

    #[tokio::test(start_paused = true)]
    async fn what_fails_for_a_while_is_tried_again_and_what_fails_for_good_ends_it() {
        let shelf = full().await;
        let faults = |cause, before| Faults {
            before,
            causes: vec![cause],
            ..Faults::none(3)
        };
        let tried = async |faults: Faults| {
            let chaos = Arc::new(Chaos::new(Arc::new(shelf.clone()), faults));
            let usual = Options::default();
            purge(layered(chaos, &patient(usual)).tier.as_ref(), false).await
        };
        let denied = tried(faults(Cause::Denied, 1_000)).await.unwrap_err();
        assert_eq!(denied.cause, Cause::Denied);
        assert_eq!(held(&shelf).await, OBJECTS);
        tried(faults(Cause::Throttled, 300)).await.unwrap();
        assert_eq!(held(&shelf).await, 0);
    }
}
