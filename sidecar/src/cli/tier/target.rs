//! Which tier a URL names, and how it is opened for a tool.

use super::Stopped;
use crate::tiers::disk::{Disk, Options};
use crate::tiers::s3::S3;
use crate::tiers::{Cause, Tier, TierError};
use kvcachepool_protocol::config::{self, Config};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A tier, and how to answer about it.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// The tier: file:///folder for a disk tier, s3://bucket/prefix for an S3 tier.
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
        let done = match place(&self.url)? {
            Place::Folder(folder) => {
                let disk = open(&folder)?;
                let done = runtime.block_on(work(&*disk));
                if let Some(disk) = Arc::into_inner(disk) {
                    disk.close();
                }
                done
            }
            Place::Bucket(config) => runtime.block_on(async {
                let tier = S3::open_counted(&config).await?;
                work(&tier).await
            }),
        };
        done.map_err(|stopped| match stopped {
            Stopped::Tier(e) => said(&e),
            Stopped::Output(e) => format!("cannot print: {e}"),
        })
    }
}

/// What a URL names.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    Folder(PathBuf),
    Bucket(Box<config::S3>),
}

/// What a URL names. A URL that is not served is not printed: it may hold a password.
fn place(url: &str) -> Result<Place, String> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Err(format!(
            "\"{url}\" is no URL; write the folder of a disk tier as file:///path/of/folder"
        ));
    };
    match scheme {
        "file" if rest.starts_with('/') => Ok(Place::Folder(rest.into())),
        "file" => Err("write three slashes and the whole path: file:///path/of/folder".into()),
        "s3" => bucket(rest, |name| std::env::var(name).ok()),
        "redis" | "rediss" | "redis+unix" | "redis-sentinel" | "redis-cluster" => Err(format!(
            "{scheme}:// is not served by this build; a disk tier is: file:///path/of/folder"
        )),
        _ => Err(format!(
            "no tier has URLs that begin with {scheme}://; a disk tier is file:///path/of/folder"
        )),
    }
}

/// `bucket/prefix`; all else is in the environment, named as the tools of AWS name it.
fn bucket(rest: &str, env: impl Fn(&str) -> Option<String>) -> Result<Place, String> {
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    let prefix = prefix.trim_end_matches('/');
    let endpoint = env("AWS_ENDPOINT_URL_S3").or_else(|| env("AWS_ENDPOINT_URL"));
    // The rules for the config's keys are those of the config.
    let quoted = |text: &str| serde_json::Value::from(text).to_string();
    let [bucket, prefix, endpoint, ca] = [
        bucket,
        prefix,
        endpoint
            .as_deref()
            .unwrap_or_default()
            .trim_end_matches('/'),
        env("AWS_CA_BUNDLE").as_deref().unwrap_or_default(),
    ]
    .map(quoted);
    let text =
        format!("s3: {{bucket: {bucket}, prefix: {prefix}, endpoint: {endpoint}, ca: {ca}}}\n");
    let (config, _) = Config::parse(&text, false).map_err(|e| e.to_string())?;
    if config.s3.bucket.is_empty() {
        return Err("name the bucket: s3://bucket/prefix".into());
    }
    Ok(Place::Bucket(Box::new(config.s3)))
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
        let folder = PathBuf::from("/data/kv");
        assert_eq!(place("file:///data/kv"), Ok(Place::Folder(folder)));
    }

    #[test]
    fn a_url_of_a_bucket_is_the_bucket_and_the_environment_says_where_it_is() {
        let env = |name: &str| match name {
            "AWS_ENDPOINT_URL" => Some("http://minio:9000/".into()),
            "AWS_CA_BUNDLE" => Some("/ca.crt".into()),
            _ => None,
        };
        let expected = config::S3 {
            bucket: "kv-cache".into(),
            prefix: "prod/a".into(),
            endpoint: "http://minio:9000".into(),
            ca: Some("/ca.crt".into()),
            ..config::S3::default()
        };
        let found = bucket("kv-cache/prod/a/", env);
        assert_eq!(found, Ok(Place::Bucket(Box::new(expected))));
        for wrong in ["", "/prod", "Bucket", "kv-cache//a"] {
            assert!(bucket(wrong, |_| None).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_not_served_is_said_without_what_may_be_secret() {
        for url in [
            "redis://:secret@host",
            "rediss://:secret@host",
            "redis+unix:///secret",
            "redis-sentinel://secret",
            "redis-cluster://secret",
            "nfs://secret",
        ] {
            let error = place(url).unwrap_err();
            assert!(error.contains(url.split("://").next().unwrap()), "{error}");
            assert!(error.contains("file:///"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn what_is_no_url_is_told_how_to_be_one() {
        for text in ["/data/kv", "data", "", "file://data", "file:/data"] {
            let error = place(text).unwrap_err();
            assert!(error.contains("file:///path"), "{text}: {error}");
        }
    }
}
