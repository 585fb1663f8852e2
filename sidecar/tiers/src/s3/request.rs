//! The bucket for all requests: client, names, limits, and the features of the server. Every option of the SDK's client about time, retries,
//! checksums or addresses is explicit, because defaults may change.

use super::bound::Bound;
use super::credentials::Folder;
use super::fault::Asked;
use super::http::Http;
use crate::clock::Clock;
use crate::tags::Tags;
use crate::{Cause, Kind, TierError, tls};
use aws_config::SdkConfig;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    AppName, BehaviorVersion, Builder, IdentityCache, Region, RequestChecksumCalculation,
    ResponseChecksumValidation, StalledStreamProtectionConfig,
};
use aws_sdk_s3::types::ChecksumAlgorithm;
use kvcachepool_protocol::config::{AddressingStyle, Checksums, S3};
use kvcachepool_protocol::object::ObjectName;
use rustls::RootCertStore;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Prefix of our own names that are not objects of the cache.
pub const OWN: &str = ".kvcachepool-";
/// Prefix of the names of probes, which sidecars put and remove when they open the tier.
pub const PROBE: &str = ".kvcachepool-probe";

/// A bucket and a prefix in it.
#[derive(Debug)]
pub struct Requests {
    pub client: Client,
    pub bucket: String,
    /// Without slashes around it; may be empty.
    pub prefix: String,
    /// The server's time.
    pub clock: Arc<Clock>,
    /// The limit of concurrent requests.
    pub bound: Bound,
    /// ETags of the objects read last.
    pub tags: Tags<String>,
    /// Checksum of upload parts.
    pub checksum: Option<ChecksumAlgorithm>,
    /// Number of objects that are being read.
    pub reading: AtomicUsize,
    /// The server supports puts that fail if the object exists.
    conditional: AtomicBool,
    /// The server supports batch removal.
    batches: AtomicBool,
}

impl Requests {
    /// The bucket of a config. Sends no request to it.
    pub async fn open(config: &S3) -> Result<Self, TierError> {
        let (client, clock) = client(config).await?;
        Ok(Self::new(client, clock, config))
    }

    /// Assumes all features of AWS until the server refuses one.
    pub fn new(client: Client, clock: Arc<Clock>, config: &S3) -> Self {
        let summed = config.checksums == Checksums::WhenSupported;
        Self {
            client,
            bucket: config.bucket.clone(),
            prefix: config.prefix.clone(),
            clock,
            bound: Bound::new(config.max_concurrency as usize),
            tags: Tags::default(),
            checksum: summed.then_some(ChecksumAlgorithm::Crc32),
            reading: AtomicUsize::new(0),
            conditional: AtomicBool::new(true),
            batches: AtomicBool::new(true),
        }
    }

    /// Description of a request for its errors.
    pub fn asked<'a>(&'a self, permission: &'static str, object: Option<&'a str>) -> Asked<'a> {
        Asked {
            permission,
            bucket: &self.bucket,
            object,
        }
    }

    /// Sends a request without bytes of objects, within the limit.
    pub async fn ask<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.question().await;
        sent.await
    }

    /// Sends a request with bytes of objects, within the limit.
    pub async fn write<T>(&self, sent: impl Future<Output = T>) -> T {
        let _permit = self.bound.write().await;
        sent.await
    }

    /// The full key of an object.
    pub fn key(&self, name: &ObjectName) -> String {
        name.s3(&self.prefix)
    }

    /// The full key of one of our own names that are not objects.
    pub fn own_key(&self, name: &str) -> String {
        format!("{}{name}", self.folder())
    }

    /// Whether a key is one of those.
    pub fn is_own_key(&self, key: &str) -> bool {
        let rest = key.strip_prefix(&self.folder());
        rest.is_some_and(|rest| rest.starts_with(OWN))
    }

    /// Common prefix of all our names; empty or with a final slash.
    pub fn folder(&self) -> String {
        match self.prefix.as_str() {
            "" => String::new(),
            prefix => format!("{prefix}/"),
        }
    }

    /// Whether the server supports puts that fail if the object exists.
    pub fn conditional(&self) -> bool {
        self.conditional.load(Relaxed)
    }

    /// Records that it does not: from now on a lookup comes first.
    pub fn not_conditional(&self) {
        self.conditional.store(false, Relaxed);
    }

    /// Whether the server supports batch removal.
    pub fn batches(&self) -> bool {
        self.batches.load(Relaxed)
    }

    /// Records that it does not: from now on objects are removed one by one.
    pub fn no_batches(&self) {
        self.batches.store(false, Relaxed);
    }
}

/// Timeout of a request. The layers time out sooner; this bounds requests that run without them.
const ATTEMPT: Duration = Duration::from_secs(60);
/// Region for compatible servers without one.
const REGION: &str = "us-east-1";

/// A client for the bucket of a config, and the clock of its server.
async fn client(config: &S3) -> Result<(Client, Arc<Clock>), TierError> {
    let idle = config.max_concurrency as usize;
    let clock = Arc::<Clock>::default();
    let roots = match &config.ca {
        Some(path) => Arc::new(authorities(path).await?),
        None if config.endpoint.starts_with("http://") => Arc::new(RootCertStore::empty()),
        None => tls::system_authorities()
            .await
            .ok_or_else(|| failed("the system has no certificate authorities; set s3.ca"))?,
    };
    let http = Http::new(roots, idle, clock.clone())?;
    let mut builder = options(config)?.http_client(http);
    // For credentials that are not in files, and for a region that is not in the config.
    let chain = match (&config.auth, region(config)) {
        (Some(_), Some(_)) => None,
        _ => Some(chain(config).await?),
    };
    if let Some(chain) = &chain {
        builder = builder.region(chain.region().cloned());
    }
    match &config.auth {
        // The SDK's cache would keep them for ever.
        Some(path) => {
            let folder = Folder::open(path).await?;
            builder = builder
                .credentials_provider(folder)
                .identity_cache(IdentityCache::no_cache());
        }
        None => {
            if let Some(provider) = chain.and_then(|chain| chain.credentials_provider()) {
                builder = builder.credentials_provider(provider);
            }
            builder = builder.identity_cache(IdentityCache::lazy().build());
        }
    }
    Ok((Client::from_conf(builder.build()), clock))
}

/// Options that follow from the config alone.
pub fn options(config: &S3) -> Result<Builder, TierError> {
    if config.accelerate && !config.endpoint.is_empty() {
        return Err(failed(
            "s3.accelerate works only with AWS: remove it, or remove s3.endpoint",
        ));
    }
    if config.evict_to_percent >= config.evict_at_percent {
        return Err(failed("s3.evictToPercent must be below s3.evictAtPercent"));
    }
    let (send, check) = match config.checksums {
        Checksums::WhenRequired => (
            RequestChecksumCalculation::WhenRequired,
            ResponseChecksumValidation::WhenRequired,
        ),
        Checksums::WhenSupported => (
            RequestChecksumCalculation::WhenSupported,
            ResponseChecksumValidation::WhenSupported,
        ),
    };
    let timeouts = TimeoutConfig::builder()
        .operation_attempt_timeout(ATTEMPT)
        .build();
    let mut builder = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::v2026_01_12())
        .app_name(app_name()?)
        .retry_config(RetryConfig::disabled())
        .timeout_config(timeouts)
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        .request_checksum_calculation(send)
        .response_checksum_validation(check)
        .force_path_style(path_style(config))
        .accelerate(config.accelerate)
        .disable_multi_region_access_points(true)
        .use_arn_region(false);
    if !config.endpoint.is_empty() {
        builder = builder.endpoint_url(&config.endpoint);
    }
    Ok(builder.region(region(config).map(Region::new)))
}

/// Environment, profile, web identity, instance: for the credentials, and for the region if it is not set.
async fn chain(config: &S3) -> Result<SdkConfig, TierError> {
    // Without authorities there can be no web identity; keys in the environment need none.
    let system = tls::system_authorities().await;
    let mut roots = system.map_or_else(RootCertStore::empty, Arc::unwrap_or_clone);
    if let Some(path) = &config.ca {
        // A private cloud's token service has a certificate of the same authority as its bucket.
        roots.roots.extend(authorities(path).await?.roots);
    }
    // The clock of a credential server is not needed.
    let http = Http::new(roots, 1, Arc::default())?;
    let mut loader = aws_config::defaults(BehaviorVersion::v2026_01_12())
        .app_name(app_name()?)
        .http_client(http);
    if let Some(region) = region(config) {
        loader = loader.region(Region::new(region));
    }
    let chain = loader.load().await;
    match chain.region() {
        Some(_) => Ok(chain),
        None => Err(failed(
            "s3.region is not set, and neither the environment nor the instance metadata provides it",
        )),
    }
}

async fn authorities(path: &Path) -> Result<RootCertStore, TierError> {
    let read = tls::authorities(path).await;
    read.map_err(|e| failed(&format!("s3.ca: {e}")))
}

fn region(config: &S3) -> Option<String> {
    match (config.region.as_str(), config.endpoint.as_str()) {
        ("", "") => None,
        ("", _) => Some(REGION.to_string()),
        (region, _) => Some(region.to_string()),
    }
}

/// Whether the bucket's name is in the path of requests.
fn path_style(config: &S3) -> bool {
    match config.addressing_style {
        AddressingStyle::Path => true,
        AddressingStyle::VirtualHost => false,
        AddressingStyle::Auto => {
            let host = host(&config.endpoint);
            let inside = |end: &str| host.ends_with(end) || host.contains(&format!("{end}."));
            !config.endpoint.is_empty()
                && (host.parse::<IpAddr>().is_ok()
                    || !host.contains('.')
                    // Names of a cluster or a private network have no subdomains.
                    || [".svc", ".local", ".internal", ".localhost"].into_iter().any(inside)
                    || config.bucket.contains('.'))
        }
    }
}

fn host(endpoint: &str) -> String {
    let rest = endpoint
        .split_once("://")
        .map_or(endpoint, |(_, rest)| rest);
    match rest.strip_prefix('[') {
        Some(v6) => v6.split(']').next().unwrap_or_default().to_string(),
        None => rest.split(':').next().unwrap_or_default().to_string(),
    }
}

fn app_name() -> Result<AppName, TierError> {
    AppName::new("kvcachepool").map_err(|e| failed(&e.to_string()))
}

fn failed(detail: &str) -> TierError {
    TierError::new(Kind::S3, Cause::Config, detail)
}
