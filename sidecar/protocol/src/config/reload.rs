//! Compares configs: which changes take effect immediately, and which of two files is in effect.

use super::{Config, HugePages, TransferMode};

/// How a changed value takes effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reload {
    /// Takes effect immediately.
    Live,
    /// Takes effect immediately if the list had Redis servers before, still has servers, and `redis.auth`, `redis.ca` and
    /// `redis.clientCertificate` are unchanged. Otherwise like [`Reload::Restart`].
    Servers,
    /// Takes effect once the container's memory limit has room and the slots behind a smaller arena's end are free, if the arena has normal
    /// pages and the sidecar does not copy through windows. Otherwise like [`Reload::Restart`].
    Arena,
    /// Takes effect at the next start of the sidecar.
    Restart,
}

/// Keys whose values differ between two configs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Changes {
    /// Paths that take effect immediately.
    pub live: Vec<&'static str>,
    /// Paths that wait for a restart.
    pub restart: Vec<&'static str>,
}

impl Config {
    /// Whether `memory.size` of a sidecar with this config can change while it runs.
    pub fn has_live_size(&self) -> bool {
        self.memory.huge_pages == HugePages::None && self.transfer.mode != TransferMode::CudaWindow
    }

    /// Whether a change to `newer` takes effect immediately for this kind of reload.
    fn takes(&self, reload: Reload, newer: &Config) -> bool {
        let (ours, theirs) = (&self.redis, &newer.redis);
        match reload {
            Reload::Live => true,
            Reload::Servers => {
                let both = !ours.urls.is_empty() && !theirs.urls.is_empty();
                let files = (&ours.auth, &ours.ca, &ours.client_certificate);
                both && files == (&theirs.auth, &theirs.ca, &theirs.client_certificate)
            }
            Reload::Arena => self.has_live_size() && newer.has_live_size(),
            Reload::Restart => false,
        }
    }

    /// The keys that differ in `newer`, by how they take effect.
    pub fn changes(&self, newer: &Config) -> Changes {
        let (mut a, mut b) = (self.clone(), newer.clone());
        let mut changes = Changes::default();
        for (old, new) in a.keys().into_iter().zip(b.keys()) {
            if old.slot.text() != new.slot.text() {
                match self.takes(old.reload, newer) {
                    true => changes.live.push(old.path),
                    false => changes.restart.push(old.path),
                }
            }
        }
        changes
    }

    /// The effective config of a sidecar with its pod's file (`self`) and its pool's: the one with the higher `pool.generation`, or the
    /// pod's if they are equal. Keys that the pod was created for always come from the pod's file: addresses, the folders of disk and file system,
    /// and everything that determines its memory. Where tiers, the codec, requests to S3 or a window would need more memory than the pod's container has, they
    /// come from the pod's file, too: an arena beside them would exceed the container's limit, and no memory tier would start.
    pub fn or_newer(self, pool: Config) -> Config {
        if pool.pool.generation <= self.pool.generation {
            return self;
        }
        let extras = self.extras_bytes();
        let mut newer = pool;
        newer.socket = self.socket;
        newer.admin.listen = self.admin.listen;
        newer.memory.size = self.memory.size;
        newer.memory.huge_pages = self.memory.huge_pages;
        newer.limits.index_entries = self.limits.index_entries;
        newer.disk = self.disk;
        newer.file_system.path = self.file_system.path;
        newer.gpu = self.gpu;
        if newer.extras_bytes() > extras {
            newer.write.codec = self.write.codec;
            newer.transfer = self.transfer;
            if self.redis.urls.is_empty() {
                newer.redis = self.redis;
            }
            if self.s3.bucket.is_empty() {
                newer.s3 = self.s3;
            } else {
                newer.s3.max_concurrency = self.s3.max_concurrency;
            }
        }
        newer
    }

    /// This config with the values of `newer` that take effect immediately. It is in effect after a reload.
    pub fn with_live_from(&self, newer: &Config) -> Config {
        let (mut merged, mut from) = (self.clone(), newer.clone());
        for (mut old, new) in merged.keys().into_iter().zip(from.keys()) {
            if self.takes(old.reload, newer) {
                // A value of one config is within the range of the other.
                let _ = old.slot.set(&new.slot.text());
            }
        }
        merged
    }
}
