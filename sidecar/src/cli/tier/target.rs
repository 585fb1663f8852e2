//! The tier that a URL names, and how a tool opens it.

use super::{Failed, Stopped};
use kvcachepool_protocol::config::{self, Config};
use kvcachepool_tiers::disk::{Disk, Options};
use kvcachepool_tiers::filesystem::FileSystem;
use kvcachepool_tiers::redis::{self, Redis};
use kvcachepool_tiers::s3::S3;
use kvcachepool_tiers::{Cause, Kind, Tier, TierError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A tier, and how to answer about it.
#[derive(Debug, clap::Args)]
pub struct Target {
    /// The tier: file:///folder for a disk or file system tier, s3://bucket/prefix for an S3 tier, redis://host:6379 and the like for a Redis tier.
    #[arg(value_name = "URL")]
    url: String,
    /// Folder with credentials. Redis: the files `password` and, for an ACL user, `username`; default: those of the URL. S3: the files
    /// `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and optionally `AWS_SESSION_TOKEN`; default: the AWS chain of environment, profile,
    /// web identity of the pod, and instance.
    #[arg(long, value_name = "FOLDER")]
    auth: Option<PathBuf>,
    /// PEM file with the certificate authorities to trust for TLS. Default: for S3 the file in AWS_CA_BUNDLE, otherwise the system's.
    #[arg(long, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Folder with `tls.crt` and `tls.key`, for Redis servers that ask for a client's certificate.
    #[arg(long, value_name = "FOLDER")]
    client_certificate: Option<PathBuf>,
    #[command(flatten)]
    bucket: Bucket,
    /// Output format: text for people, json for programs.
    #[arg(short, long, value_enum, default_value = "text")]
    pub output: Output,
}

/// Options for a bucket that its URL does not contain.
#[derive(Debug, Default, PartialEq, Eq, clap::Args)]
struct Bucket {
    /// Endpoint of a server that is not AWS, such as http://minio:9000. Default: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.
    #[arg(long, value_name = "URL", help_heading = OF_S3)]
    endpoint: Option<String>,
    /// Region of the bucket. Default: AWS_REGION or AWS_DEFAULT_REGION; with an endpoint us-east-1.
    #[arg(long, value_name = "NAME", help_heading = OF_S3)]
    region: Option<String>,
    /// Position of the bucket's name in requests: Path (https://host/bucket), VirtualHost (https://bucket.host) or Auto, which is
    /// VirtualHost for AWS and for endpoints with a public name.
    #[arg(long, value_name = "STYLE", help_heading = OF_S3)]
    addressing_style: Option<String>,
}

/// For whom a command prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// Plain text.
    Text,
    /// For programs: one JSON document per line.
    Json,
}

/// Whether the work needs the number of objects and their bytes, which takes a listing of a whole bucket or shared folder.
#[derive(Debug, Clone, Copy)]
pub enum Counts {
    Used,
    Unused,
}

/// Help heading of the options in [`Bucket`].
const OF_S3: &str = "Options for S3";
/// Every folder of a tier with files contains this file.
const MARK: &str = "format";

impl Target {
    #[cfg(test)]
    pub(super) fn new(url: String, output: Output) -> Self {
        Self {
            url,
            auth: None,
            ca: None,
            client_certificate: None,
            bucket: Bucket::default(),
            output,
        }
    }

    /// Opens the tier, runs the work and closes it.
    pub(super) fn with<T>(
        &self,
        counts: Counts,
        work: impl AsyncFnOnce(&dyn Tier) -> Result<T, Stopped>,
    ) -> Result<T, Failed> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| format!("cannot start: {e}"))?;
        let done = match self.place()? {
            Place::Folder(folder) => {
                let disk = open(&folder)?;
                let done = runtime.block_on(work(&*disk));
                if let Some(disk) = Arc::into_inner(disk) {
                    disk.close();
                }
                done
            }
            Place::SharedFolder(config) => runtime.block_on(async {
                let tier = match counts {
                    Counts::Used => FileSystem::open_counted(&config).await?,
                    Counts::Unused => FileSystem::open_uncounted(&config).await?,
                };
                work(&tier).await
            }),
            Place::Bucket(config) => runtime.block_on(async {
                let tier = match counts {
                    Counts::Used => S3::open_counted(&config).await?,
                    Counts::Unused => S3::open_uncounted(&config).await?,
                };
                work(&tier).await
            }),
            Place::Servers(redis) => runtime.block_on(work(&redis)),
        };
        done.map_err(|stopped| match stopped {
            Stopped::Tier(e) => Failed::Said(said(&e)),
            Stopped::Output(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Failed::Unread,
            Stopped::Output(e) => Failed::Said(format!("cannot print: {e}")),
        })
    }

    /// Parses the URL. An invalid URL is not printed, because it may contain a password.
    fn place(&self) -> Result<Place, String> {
        let Some((scheme, rest)) = self.url.split_once("://") else {
            return Err(format!("not a URL; {WRITE}"));
        };
        let of_redis = SCHEMES_OF_REDIS.contains(&scheme);
        if scheme == "file" && (self.auth.is_some() || self.ca.is_some()) {
            return Err("--auth and --ca are for servers; a folder has neither".into());
        }
        if !of_redis && self.client_certificate.is_some() {
            return Err("--client-certificate is for Redis".into());
        }
        if scheme != "s3" && self.bucket != Bucket::default() {
            return Err("--endpoint, --region and --addressing-style are for S3".into());
        }
        match scheme {
            "file" if rest.starts_with('/') => Ok(folder(rest.into())),
            "file" => Err("write three slashes and the whole path: file:///path/of/folder".into()),
            "s3" => {
                let config = self.config(rest, |name| std::env::var(name).ok())?;
                Ok(Place::Bucket(Box::new(config)))
            }
            _ if of_redis => Ok(Place::Servers(self.servers()?)),
            _ => Err(format!("no tier uses such URLs; {WRITE}")),
        }
    }

    /// Settings for `bucket/prefix`. Missing options come from the environment, with the names that AWS tools use.
    fn config(
        &self,
        rest: &str,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<config::S3, String> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let said = |option: &Option<String>, variables: &[&str]| {
            let variable = || variables.iter().find_map(|name| env(name));
            option.clone().or_else(variable).unwrap_or_default()
        };
        let path =
            |option: &Option<PathBuf>| option.as_ref().map(|path| path.display().to_string());
        let given = &self.bucket;
        let endpoint = said(
            &given.endpoint,
            &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"],
        );
        let keys = [
            ("bucket", bucket.into()),
            ("prefix", prefix.trim_end_matches('/').into()),
            ("endpoint", endpoint.trim_end_matches('/').into()),
            (
                "region",
                said(&given.region, &["AWS_REGION", "AWS_DEFAULT_REGION"]),
            ),
            ("addressingStyle", said(&given.addressing_style, &[])),
            ("auth", path(&self.auth).unwrap_or_default()),
            ("ca", said(&path(&self.ca), &["AWS_CA_BUNDLE"])),
        ];
        // The config's own parser validates the values.
        let quoted = |text: &str| serde_json::Value::from(text).to_string();
        let said = keys.iter().filter(|(_, text)| !text.is_empty());
        let said: Vec<String> = said
            .map(|(key, text)| format!("{key}: {}", quoted(text)))
            .collect();
        let text = format!("s3: {{{}}}\n", said.join(", "));
        let (config, _) = Config::parse(&text, false).map_err(|e| e.to_string())?;
        if config.s3.bucket.is_empty() {
            return Err("name the bucket: s3://bucket/prefix".into());
        }
        Ok(config.s3)
    }

    /// A tool's read does not extend the life of an object.
    fn servers(&self) -> Result<Redis, String> {
        let settings = redis::Settings {
            urls: vec![self.url.clone()],
            auth: self.auth.clone(),
            tls_files: redis::TlsFiles {
                ca: self.ca.clone(),
                client_certificate: self.client_certificate.clone(),
            },
            ttl: Duration::ZERO,
            options: redis::Options::default(),
        };
        Redis::open(&settings).map_err(|e| said(&e))
    }
}

const SCHEMES_OF_REDIS: [&str; 5] = [
    "redis",
    "rediss",
    "redis+unix",
    "redis-sentinel",
    "redis-cluster",
];
/// Advice after an invalid URL.
const WRITE: &str = "write file:///path/of/folder, s3://bucket/prefix or redis://host:6379";

#[derive(Debug)]
enum Place {
    Folder(PathBuf),
    SharedFolder(config::FileSystem),
    Bucket(Box<config::S3>),
    Servers(Redis),
}

/// The format file of a folder tells which of the two tiers with files uses it.
fn folder(folder: PathBuf) -> Place {
    match FileSystem::is_at(&folder) {
        true => Place::SharedFolder(config::FileSystem {
            path: Some(folder),
            ..config::FileSystem::default()
        }),
        false => Place::Folder(folder),
    }
}

fn open(folder: &Path) -> Result<Arc<Disk>, String> {
    let shown = folder.display();
    // The tier would initialise any empty folder; a tool with a wrong path must not.
    if let Err(e) = std::fs::metadata(folder) {
        return Err(format!(
            "{shown}: {e}; name the folder of a disk or file system tier"
        ));
    }
    if let Err(e) = std::fs::metadata(folder.join(MARK)) {
        return Err(format!(
            "{shown} is not the folder of a disk or file system tier: {MARK}: {e}; name the folder that the sidecar uses"
        ));
    }
    // A tool writes nothing, so no limit applies.
    let disk = Disk::open(folder, u64::MAX, Options::default()).map_err(|e| said(&e))?;
    Ok(Arc::new(disk))
}

/// An error of the tier, with advice.
fn said(error: &TierError) -> String {
    let advice = match error.cause {
        Cause::InUse => "; stop that sidecar first, or query it with `kvcachepool-sidecar status`",
        Cause::Denied if [Kind::Disk, Kind::FileSystem].contains(&error.tier) => {
            "; run this as the user of the sidecar"
        }
        _ => "",
    };
    format!("{error}{advice}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use kvcachepool_protocol::config::AddressingStyle;
    use std::collections::BTreeMap;

    /// A command line.
    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        target: Target,
    }

    fn place(url: &str) -> Result<Place, String> {
        Target::new(url.into(), Output::Text).place()
    }

    #[test]
    fn a_url_of_a_folder_is_the_folder() {
        let Ok(Place::Folder(folder)) = place("file:///data/kv") else {
            panic!("it is a folder");
        };
        assert_eq!(folder, PathBuf::from("/data/kv"));
    }

    #[test]
    fn urls_of_redis_are_those_of_the_config() {
        for (url, shown) in [
            ("redis://:secret@host", "Redis(host:6379)"),
            ("rediss://u:secret@host:1/2", "Redis(host:1)"),
            ("redis+unix:///run/r.sock?db=1", "Redis(/run/r.sock)"),
            (
                "redis-sentinel://a,b/kv",
                "Redis(master \"kv\" of a:26379, b:26379)",
            ),
            ("redis-cluster://a,b", "Redis(cluster of a:6379, b:6379)"),
        ] {
            let Ok(Place::Servers(redis)) = place(url) else {
                panic!("{url}");
            };
            assert_eq!(format!("{redis:?}"), shown);
        }
        let error = place("redis://:secret@host:x").unwrap_err();
        assert!(error.contains("host and a port"), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }

    #[test]
    fn options_that_a_tier_has_no_use_for_are_refused() {
        let with = |url: &str, option: &[&str]| {
            let line = [&["inspect", url], option].concat();
            Line::try_parse_from(line).unwrap().target.place()
        };
        for (url, option) in [
            ("file:///data", ["--ca", "/ca.crt"]),
            ("file:///data", ["--auth", "/auth"]),
            ("file:///data", ["--client-certificate", "/client"]),
            ("s3://bucket", ["--client-certificate", "/client"]),
            ("file:///data", ["--region", "eu-west-3"]),
            ("redis://host", ["--endpoint", "http://minio:9000"]),
            ("redis://host", ["--addressing-style", "Path"]),
        ] {
            let error = with(url, &option).unwrap_err();
            assert!(error.contains(option[0]), "{url}: {error}");
        }
    }

    #[test]
    fn a_url_of_a_bucket_is_the_bucket_and_options_or_the_environment_say_where_it_is() {
        let config = |rest: &str, options: &[&str], env: &[(&str, &str)]| {
            let line = [&["inspect", "s3://bucket"], options].concat();
            let target = Line::try_parse_from(line).unwrap().target;
            let env: BTreeMap<&str, &str> = env.iter().copied().collect();
            target.config(rest, |name| env.get(name).map(|text| (*text).to_string()))
        };
        let env = [
            ("AWS_ENDPOINT_URL", "http://minio:9000/"),
            ("AWS_CA_BUNDLE", "/ca.crt"),
            ("AWS_DEFAULT_REGION", "eu-west-3"),
        ];
        let expected = config::S3 {
            bucket: "kv-cache".into(),
            prefix: "prod/a".into(),
            endpoint: "http://minio:9000".into(),
            region: "eu-west-3".into(),
            ca: Some("/ca.crt".into()),
            ..config::S3::default()
        };
        assert_eq!(config("kv-cache/prod/a/", &[], &env), Ok(expected));
        let options = [
            "--endpoint=https://s3.example.com",
            "--region=us-east-2",
            "--addressing-style=Path",
            "--ca=/other.crt",
            "--auth=/auth",
        ];
        let expected = config::S3 {
            bucket: "kv-cache".into(),
            endpoint: "https://s3.example.com".into(),
            region: "us-east-2".into(),
            addressing_style: AddressingStyle::Path,
            ca: Some("/other.crt".into()),
            auth: Some("/auth".into()),
            ..config::S3::default()
        };
        assert_eq!(config("kv-cache", &options, &env), Ok(expected));
        for wrong in ["", "/prod", "Bucket", "kv-cache//a"] {
            assert!(config(wrong, &[], &[]).is_err(), "{wrong}");
        }
        let style = config("kv-cache", &["--addressing-style=path"], &[]).unwrap_err();
        assert!(
            style.contains("addressingStyle") && style.contains("VirtualHost"),
            "{style}"
        );
    }

    #[test]
    fn what_is_not_served_is_said_without_what_may_be_secret() {
        for url in [
            "nfs://secret",
            "redis:u:secret@host",
            "secret",
            "u:secret@redis://host",
        ] {
            let error = place(url).unwrap_err();
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
