//! Which tier a URL names, and how it is opened for a tool.

use super::Stopped;
use crate::tiers::disk::{Disk, Options};
use crate::tiers::{Cause, Tier, TierError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tier, and how to answer about it.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// The tier: file:///folder for a disk tier.
    #[arg(value_name = "URL")]
    url: String,
    /// What is printed: text for people, json for programs.
    #[arg(long, value_enum, default_value = "text")]
    pub output: Output,
}

/// For whom a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs: one JSON document per line.
    Json,
}

/// There is one of these in every folder of a disk tier.
const MARK: &str = "format";

impl Target {
    #[cfg(test)]
    pub(super) fn new(url: String, output: Output) -> Self {
        Self { url, output }
    }

    /// Opens the tier, does the work and closes it.
    pub(super) fn with<T>(
        &self,
        work: impl AsyncFnOnce(&dyn Tier) -> Result<T, Stopped>,
    ) -> Result<T, String> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| format!("cannot start: {e}"))?;
        let disk = open(&folder(&self.url)?)?;
        let done = runtime.block_on(work(&*disk));
        if let Some(disk) = Arc::into_inner(disk) {
            disk.close();
        }
        done.map_err(|stopped| match stopped {
            Stopped::Tier(e) => said(&e),
            Stopped::Output(e) => format!("cannot print: {e}"),
        })
    }
}

/// The folder of a URL. A URL that is not served is not printed: it may hold a password.
fn folder(url: &str) -> Result<PathBuf, String> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(format!(
            "\"{url}\" is no URL; write the folder of a disk tier as file:///path/of/folder"
        ));
    };
    match scheme {
        "file" if rest.starts_with('/') => Ok(rest.into()),
        "file" => Err("write three slashes and the whole path: file:///path/of/folder".into()),
        "redis" | "rediss" | "redis+unix" | "redis-sentinel" | "redis-cluster" | "s3" => {
            Err(format!(
                "{scheme}:// is not served by this build; a disk tier is: file:///path/of/folder"
            ))
        }
        _ => Err(format!(
            "no tier has URLs that begin with {scheme}://; a disk tier is file:///path/of/folder"
        )),
    }
}

fn open(folder: &Path) -> Result<Arc<Disk>, String> {
    let shown = folder.display();
    // The tier makes any empty folder its own; a tool that was given the wrong path must not.
    if let Err(e) = std::fs::metadata(folder) {
        return Err(format!("{shown}: {e}; name the folder of a disk tier"));
    }
    if let Err(e) = std::fs::metadata(folder.join(MARK)) {
        return Err(format!(
            "{shown} is no folder of a disk tier: {MARK}: {e}; name the one that the sidecar uses"
        ));
    }
    // A tool makes no room: whatever is there fits.
    let disk = Disk::open(folder, u64::MAX, Options::default()).map_err(|e| said(&e))?;
    Ok(Arc::new(disk))
}

/// An error of the tier, with what to do.
fn said(error: &TierError) -> String {
    let advice = match error.cause {
        Cause::InUse => "; stop that sidecar first, or ask it with `kvcachepool-sidecar status`",
        Cause::Denied => "; run this as the user of the sidecar",
        _ => "",
    };
    format!("{error}{advice}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_of_a_folder_is_the_folder() {
        assert_eq!(folder("file:///data/kv"), Ok(PathBuf::from("/data/kv")));
    }

    #[test]
    fn what_is_not_served_is_said_without_what_may_be_secret() {
        for url in [
            "redis://:secret@host",
            "rediss://:secret@host",
            "redis+unix:///secret",
            "redis-sentinel://secret",
            "redis-cluster://secret",
            "s3://secret/prefix",
            "nfs://secret",
        ] {
            let error = folder(url).unwrap_err();
            assert!(error.contains(url.split("://").next().unwrap()), "{error}");
            assert!(error.contains("file:///"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn what_is_no_url_is_told_how_to_be_one() {
        for text in ["/data/kv", "data", "", "file://data", "file:/data"] {
            let error = folder(text).unwrap_err();
            assert!(error.contains("file:///path"), "{text}: {error}");
        }
    }
}
