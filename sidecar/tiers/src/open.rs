//! The tiers that a config asks for, and how each is opened.

use super::directory::{self, Directory};
use super::disk::{self, Disk};
use super::filesystem::{self, FileSystem};
use super::layers::{LimitOptions, Options, PackingOptions, Rooms};
use super::redis::{self, Marks, Redis};
use super::s3::{self, S3};
use super::{Cause, Kind, Operation, Tier, TierError, Writes};
use kvcachepool_protocol::config::{self, Config, WritePolicy};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tracing::info;

type Open = Box<dyn Fn() -> Operation<'static, Arc<dyn Tier>> + Send + Sync>;
/// Applies the change from the first config to the second.
type Change = Box<dyn Fn(&Config, &Config) -> Result<(), TierError> + Send + Sync>;

/// A tier that is not open yet.
pub struct Opening {
    pub kind: Kind,
    /// Settings of its layers.
    pub layers: Options,
    pub(super) place: Box<dyn Fn() -> String + Send + Sync>,
    pub(super) open: Open,
    /// `None`: no setting can change while the tier is open.
    pub(super) change: Option<Change>,
}

impl Opening {
    /// Location for messages, without secrets. Empty if it is unknown.
    pub fn place(&self) -> String {
        (self.place)()
    }

    /// Opens the tier without layers. May be retried after a failure.
    pub fn open(&self) -> Operation<'static, Arc<dyn Tier>> {
        (self.open)()
    }

    /// Applies the settings of a changed config that can change while the tier is open. Fails without effect if the new settings are
    /// invalid.
    pub fn change(&self, before: &Config, config: &Config) -> Result<(), TierError> {
        let change = self.change.as_ref();
        change.map_or(Ok(()), |change| change(before, config))
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opening({} at {})", self.kind, self.place())
    }
}

/// The tiers of a config, nearest first.
pub fn configured(config: &Config) -> Vec<Opening> {
    let redis = Redis::of(&settings(&config.redis));
    let directory = (!config.redis.urls.is_empty()).then(|| redis.clone());
    let codec = config.write.codec.of_objects();
    let tiers = Kind::configured(config).count();
    let packing = PackingOptions::of_tiers(codec, tiers);
    let converting = Rooms::of_tiers(tiers);
    let opening = |kind| {
        let mut opening = match kind {
            Kind::Disk => of_disk(
                config.disk.path.clone().unwrap_or_default(),
                config.disk.size.0,
            ),
            Kind::Redis => of_redis(redis.clone()),
            Kind::FileSystem => of_file_system(config.file_system.clone(), writes(config)),
            Kind::S3 => of_s3(config.s3.clone(), writes(config), directory.clone()),
        };
        opening.layers.packing = packing.of_another();
        opening.layers.converting = converting.of_another();
        opening
    };
    Kind::configured(config).map(opening).collect()
}

fn settings(config: &config::Redis) -> redis::Settings {
    redis::Settings {
        urls: config.urls.clone(),
        auth: config.auth.clone(),
        tls_files: redis::TlsFiles {
            ca: config.ca.clone(),
            client_certificate: config.client_certificate.clone(),
        },
        ttl: Duration::from_millis(config.ttl.ms),
        options: redis::Options::default(),
    }
}

/// A change also applies to the bucket's directory, which uses the same servers.
fn of_redis(redis: Redis) -> Opening {
    let (placed, opened) = (redis.clone(), redis.clone());
    Opening {
        kind: Kind::Redis,
        place: Box::new(move || placed.place()),
        layers: Options::default(),
        open: Box::new(move || {
            let redis = opened.clone();
            Box::pin(async move { Ok(Arc::new(redis.checked()?) as Arc<dyn Tier>) })
        }),
        change: Some(Box::new(move |before, config| {
            // The config refused last may have other URLs than the one before.
            if before.redis == config.redis && redis.clone().checked().is_ok() {
                return Ok(());
            }
            redis.change(&settings(&config.redis))?;
            info!(place = redis.place(), "switched to the new Redis servers");
            Ok(())
        })),
    }
}

fn of_disk(folder: PathBuf, capacity_bytes: u64) -> Opening {
    let place = folder.display().to_string();
    Opening {
        kind: Kind::Disk,
        place: Box::new(move || place.clone()),
        layers: Options::default(),
        open: Box::new(move || {
            let folder = folder.clone();
            Box::pin(async move {
                let open = move || Disk::open(&folder, capacity_bytes, disk::Options::default());
                match tokio::task::spawn_blocking(open).await {
                    Ok(opened) => Ok(Arc::new(opened?) as Arc<dyn Tier>),
                    Err(e) => Err(TierError::new(Kind::Disk, Cause::Io, e.to_string())),
                }
            })
        }),
        change: None,
    }
}

fn of_file_system(config: config::FileSystem, may_write: bool) -> Opening {
    let options = filesystem::Options {
        writes: Writes::new(may_write),
        ..filesystem::Options::default()
    };
    let now = options.writes.clone();
    let place = config.path.clone().unwrap_or_default();
    let place = place.display().to_string();
    Opening {
        kind: Kind::FileSystem,
        place: Box::new(move || place.clone()),
        layers: Options::default(),
        open: Box::new(move || {
            let (config, options) = (config.clone(), options.clone());
            Box::pin(async move {
                let opened = FileSystem::open(&config, options).await?;
                Ok(Arc::new(opened) as Arc<dyn Tier>)
            })
        }),
        change: Some(Box::new(move |_, config| {
            now.set(writes(config));
            Ok(())
        })),
    }
}

/// Whether tiers may be written to.
fn writes(config: &Config) -> bool {
    config.write.policy != WritePolicy::None
}

/// An S3 tier, with Redis as its directory if there is one. `may_write` applies to both.
fn of_s3(config: config::S3, may_write: bool, directory: Option<Redis>) -> Opening {
    let options = s3::Options {
        writes: Writes::new(may_write),
        ..s3::Options::default()
    };
    let now = options.writes.clone();
    let mut limits = LimitOptions::default();
    limits.reads.operations = config.max_concurrency as usize;
    limits.writes.operations = config.max_concurrency as usize;
    let place = S3::place(&config);
    Opening {
        kind: Kind::S3,
        place: Box::new(move || place.clone()),
        layers: Options {
            limits,
            ..Options::default()
        },
        open: Box::new(move || {
            let (config, directory) = (config.clone(), directory.clone());
            let options = options.clone();
            Box::pin(async move {
                let marks = directory.map(|redis| Marks::new(redis, &S3::place(&config)));
                let marks = marks.map(|marks| Arc::new(marks) as Arc<dyn directory::Marks>);
                let writes = options.writes.clone();
                let options = s3::Options {
                    marks: marks.clone(),
                    ..options
                };
                let opened = Arc::new(S3::open(&config, options).await?);
                Ok(match marks {
                    Some(marks) => Arc::new(Directory::new(opened, marks, writes)) as Arc<dyn Tier>,
                    None => opened,
                })
            })
        }),
        change: Some(Box::new(move |_, config| {
            now.set(writes(config));
            Ok(())
        })),
    }
}
