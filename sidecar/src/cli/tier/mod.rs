//! `inspect`, `verify` and `gc`: work on the contents of a tier, without a sidecar. They use tiers through the trait only; `target.rs`
//! alone knows the kinds and how to open one.

mod domain;
pub mod gc;
pub mod inspect;
mod progress;
mod reader;
mod target;
#[cfg(test)]
mod tests;
pub mod verify;

pub use target::Output;

use domain::Domain;
use kvcachepool_tiers::{Listed, Pages, Tier, TierError};
use progress::Progress;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// Headers that are read at once.
const AT_ONCE: usize = 32;

/// Why a command ended early.
#[derive(Debug)]
enum Stopped {
    Tier(TierError),
    Output(std::io::Error),
}

/// Why a command did not complete.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Failed {
    /// Message for the user.
    #[error("{0}")]
    Said(String),
    /// The reader of the output closed the pipe, as `head` does.
    #[error("the reader of the output has closed the pipe")]
    Unread,
}

impl From<String> for Failed {
    fn from(said: String) -> Self {
        Self::Said(said)
    }
}

/// Exit code as a shell reports a program that a closed pipe ended (SIGPIPE).
const UNREAD: u8 = 128 + 13;

/// Exit code of the command; silent when the pipe was closed.
fn ended(done: Result<ExitCode, Failed>) -> Result<ExitCode, String> {
    done.or_else(|failed| match failed {
        Failed::Said(message) => Err(message),
        Failed::Unread => Ok(ExitCode::from(UNREAD)),
    })
}

impl From<TierError> for Stopped {
    fn from(error: TierError) -> Self {
        Self::Tier(error)
    }
}

impl From<std::io::Error> for Stopped {
    fn from(error: std::io::Error) -> Self {
        Self::Output(error)
    }
}

/// Totals of a domain.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct Sum {
    objects: u64,
    bytes: u64,
    oldest_unix_s: u64,
    newest_unix_s: u64,
}

/// Totals by domain.
#[derive(Debug, Default)]
struct Sums(BTreeMap<Domain, Sum>);

/// One line of a report.
#[derive(Debug, Serialize)]
struct DomainRow {
    domain: String,
    #[serde(flatten)]
    sum: Sum,
}

impl Sums {
    fn add(&mut self, listed: &Listed) {
        let at = listed.written_unix_s;
        let sum = self.0.entry(Domain::of(&listed.name)).or_insert(Sum {
            objects: 0,
            bytes: 0,
            oldest_unix_s: at,
            newest_unix_s: at,
        });
        sum.objects += 1;
        sum.bytes += listed.bytes;
        sum.oldest_unix_s = sum.oldest_unix_s.min(at);
        sum.newest_unix_s = sum.newest_unix_s.max(at);
    }

    fn objects(&self) -> u64 {
        self.0.values().map(|sum| sum.objects).sum()
    }

    fn bytes(&self) -> u64 {
        self.0.values().map(|sum| sum.bytes).sum()
    }

    fn rows(&self) -> Vec<DomainRow> {
        let row = |(domain, sum): (&Domain, &Sum)| DomainRow {
            domain: domain.to_string(),
            sum: *sum,
        };
        self.0.iter().map(row).collect()
    }

    fn write(&self, out: &mut dyn Write) -> std::io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let (domain, bytes, oldest) = ("domain", "bytes", "oldest");
        writeln!(
            out,
            "{domain:33}  objects  {bytes:>9}  {oldest:>9}    newest"
        )?;
        for (domain, sum) in &self.0 {
            let (bytes, oldest) = (size(sum.bytes), age(sum.oldest_unix_s));
            let (objects, newest) = (sum.objects, age(sum.newest_unix_s));
            let domain = domain.to_string();
            writeln!(
                out,
                "{domain:33}  {objects:>7}  {bytes:>9}  {oldest:>9} {newest:>9}"
            )?;
        }
        Ok(())
    }
}

/// Calls `each` with every page of a listing, and shows the progress. Returns the number of foreign names.
async fn walk(
    tier: &dyn Tier,
    mut each: impl AsyncFnMut(Vec<Listed>) -> Result<(), Stopped>,
) -> Result<u64, Stopped> {
    let (mut progress, mut objects, mut bytes) = (Progress::new(0), 0, 0);
    let (mut pages, mut foreign) = (Pages::of(tier), 0);
    while let Some(page) = pages.next().await? {
        progress.clear();
        objects += page.objects.len() as u64;
        bytes += page.objects.iter().map(|listed| listed.bytes).sum::<u64>();
        foreign += page.foreign;
        each(page.objects).await?;
        progress.at(objects, bytes);
    }
    Ok(foreign)
}

/// Bytes as text.
pub(super) fn size(bytes: u64) -> String {
    super::status::size(bytes)
}

fn now_unix_s() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

/// Age as text, in the largest unit of which it has at least two.
fn age(unix_s: u64) -> String {
    let seconds = now_unix_s().saturating_sub(unix_s);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

pub(super) fn write_json(out: &mut dyn Write, value: &impl Serialize) -> std::io::Result<()> {
    serde_json::to_writer(&mut *out, value)?;
    writeln!(out)
}

/// A number with the singular or the plural.
pub(super) fn count(number: u64, one: &str, several: &str) -> String {
    let what = if number == 1 { one } else { several };
    format!("{number} {what}")
}
