//! `check`: opens every tier of a config once and uses it as a sidecar does, so that problems show before a pod is created. `probe`
//! contains the operations.

mod probe;

use super::ConfigFiles;
use super::tier::Output;
use kvcachepool_protocol::check::{Report, Tier};
use kvcachepool_protocol::config::{Config, WritePolicy};
use kvcachepool_tiers::{Cause, Kind, Opening, TierError, configured};
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of a tier's check.
const LONGEST: Duration = Duration::from_secs(20);

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: ConfigFiles,
    /// Output format: text for people, json for programs.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let config = args.files.required()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|e| format!("cannot start: {e}"))?;
    let report = runtime.block_on(look(&config));
    let mut out = std::io::stdout().lock();
    let printed = match args.output {
        Output::Json => super::tier::write_json(&mut out, &report),
        Output::Text => write_text(&mut out, &report),
    };
    printed.map_err(|e| format!("cannot print: {e}"))?;
    Ok(match report.ready {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Checks all tiers at once: a tier that hangs does not delay the others.
async fn look(config: &Config) -> Report {
    let writes = config.write.policy != WritePolicy::None;
    let openings = configured(config);
    let looks = openings.iter().map(|opening| async move {
        let found = timeout(LONGEST, one(opening, writes)).await;
        row(opening, found.unwrap_or_else(|_| Err(hangs(opening.kind))))
    });
    Report::of(futures::future::join_all(looks).await)
}

async fn one(opening: &Opening, writes: bool) -> Result<(), TierError> {
    let tier = opening.open().await?;
    probe::probe(tier.as_ref(), writes).await
}

fn hangs(kind: Kind) -> TierError {
    let detail = format!("no answer within {} s", LONGEST.as_secs());
    TierError::new(kind, Cause::Timeout, detail)
}

fn row(opening: &Opening, found: Result<(), TierError>) -> Tier {
    let (reason, message) = match &found {
        Ok(()) => Default::default(),
        Err(e) => (e.cause.name().to_owned(), e.detail.clone()),
    };
    Tier {
        tier: opening.kind.name().to_owned(),
        place: opening.place(),
        ready: found.is_ok(),
        reason,
        message,
    }
}

fn write_text(out: &mut dyn Write, report: &Report) -> std::io::Result<()> {
    if report.tiers.is_empty() {
        return writeln!(out, "the config has no lower tier");
    }
    let rows = report.tiers.iter().map(|tier| {
        let state = if tier.ready { "Ready" } else { "Unavailable" };
        [&*tier.tier, state, &tier.place, &tier.reason, &tier.message]
    });
    let head = ["TIER", "STATE", "WHERE", "REASON", "MESSAGE"];
    let lines: Vec<_> = std::iter::once(head).chain(rows).collect();
    let width = |cell: usize| {
        let widths = lines.iter().map(|line| line[cell].chars().count());
        widths.max().unwrap_or(0)
    };
    let [tiers, states, places, reasons] = [0, 1, 2, 3].map(width);
    for [tier, state, place, reason, message] in &lines {
        let line = format!(
            "{tier:tiers$}   {state:states$}   {place:places$}   {reason:reasons$}   {message}"
        );
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(text: &str) -> Config {
        Config::parse(text, false).unwrap().0
    }

    async fn looked(text: &str) -> (Report, String) {
        let report = look(&config(text)).await;
        let mut out = Vec::new();
        write_text(&mut out, &report).unwrap();
        (report, String::from_utf8(out).unwrap())
    }

    #[tokio::test]
    async fn a_config_without_tiers_is_in_order() {
        let (report, text) = looked("memory: {size: 64Mi}\n").await;
        assert!(report.ready && report.tiers.is_empty());
        assert_eq!(text, "the config has no lower tier\n");
    }

    #[tokio::test]
    async fn each_tier_has_its_own_line_and_a_name_for_what_is_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().display();
        let (report, text) = looked(&format!(
            "disk: {{path: {disk}, size: 1Gi}}\n\
             redis: {{urls: [\"redis+unix://{disk}/none\"]}}\n\
             fileSystem: {{path: {disk}/none}}\n\
             s3: {{bucket: kv-cache, endpoint: \"http://127.0.0.1:1\", auth: {disk}/none}}\n"
        ))
        .await;
        assert!(!report.ready);
        let found: Vec<(&str, bool, &str)> = report
            .tiers
            .iter()
            .map(|t| (&*t.tier, t.ready, &*t.reason))
            .collect();
        assert_eq!(
            found,
            [
                ("disk", true, ""),
                ("redis", false, "Unreachable"),
                ("filesystem", false, "Gone"),
                ("s3", false, "Unauthenticated")
            ],
            "{text}"
        );
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[0].starts_with("TIER         STATE         WHERE"),
            "{text}"
        );
        assert!(
            lines[1].starts_with("disk         Ready         /"),
            "{text}"
        );
        assert!(
            lines[4].starts_with("s3           Unavailable   s3://kv-cache at "),
            "{text}"
        );
        assert!(lines[4].contains("AWS_ACCESS_KEY_ID"), "{text}");
    }
}
