//! Which tiers a config asks for, and how each is opened.

use super::disk::{self, Disk};
use super::layers::Options;
use super::{Cause, Kind, Operation, Tier, TierError};
use kvcachepool_protocol::config::Config;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

type Open = Box<dyn Fn() -> Operation<'static, Arc<dyn Tier>> + Send + Sync>;

/// A tier that is not open yet.
pub struct Opening {
    /// Which.
    pub kind: Kind,
    /// Where it is, for people; without anything that is secret.
    pub place: String,
    /// Settings of its layers.
    pub layers: Options,
    open: Open,
}

impl Opening {
    /// Opens it, without layers. May be tried again after it failed.
    pub fn open(&self) -> Operation<'static, Arc<dyn Tier>> {
        (self.open)()
    }
}

impl fmt::Debug for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opening({} at {})", self.kind, self.place)
    }
}

/// The tiers of a config, the nearest first.
pub fn configured(config: &Config) -> Vec<Opening> {
    let disk = config.disk.path.clone();
    let disk = disk.map(|folder| of_disk(folder, config.disk.size.0));
    disk.into_iter().collect()
}

fn of_disk(folder: PathBuf, capacity_bytes: u64) -> Opening {
    Opening {
        kind: Kind::Disk,
        place: folder.display().to_string(),
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
    }
}
