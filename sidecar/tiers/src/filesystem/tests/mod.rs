//! The file system tier as its users see it, and the folder as others leave it.

mod census;
mod folders;
mod processes;
mod shared;
mod suite;

use super::{FileSystem, Options};
use crate::testing::suite::{Memory, Sample};
use crate::{Tier, TierError};
use kvcachepool_protocol::config;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// A folder, and memory for its objects.
struct Rig {
    temp: TempDir,
    memory: Memory,
}

impl Rig {
    fn new() -> Self {
        Self {
            temp: tempfile::tempdir().unwrap(),
            memory: Memory::new(64 << 20),
        }
    }

    fn path(&self) -> PathBuf {
        self.temp.path().join("kv")
    }

    fn config(&self) -> config::FileSystem {
        config_at(&self.path())
    }

    /// Opens the folder, which it creates, without background work.
    async fn open(&self) -> FileSystem {
        std::fs::create_dir_all(self.path()).unwrap();
        self.try_open().await.unwrap()
    }

    async fn try_open(&self) -> Result<FileSystem, TierError> {
        FileSystem::open(&self.config(), quiet()).await
    }

    async fn put(&self, tier: &FileSystem, sample: &Sample) {
        tier.put(sample.put(&self.memory)).await.unwrap();
    }

    /// Whether the tier returns the object as it was written.
    async fn check(&self, tier: &FileSystem, sample: &Sample) {
        let get = sample.get_all(&self.memory);
        let head = tier.get(get.clone()).await;
        assert_eq!(head, Ok(sample.object.clone()));
        assert!(sample.lies_in(&get.places));
    }

    fn file(&self, sample: &Sample) -> PathBuf {
        self.path().join(sample.name().s3(""))
    }
}

fn config_at(path: &Path) -> config::FileSystem {
    config::FileSystem {
        path: Some(path.into()),
        ..config::FileSystem::default()
    }
}

/// Without background work.
fn quiet() -> Options {
    Options {
        census: None,
        ..Options::default()
    }
}

/// Dates a file this much earlier.
fn age(file: &Path, by: Duration) {
    let opened = std::fs::File::options().write(true).open(file).unwrap();
    opened.set_modified(SystemTime::now() - by).unwrap();
}

/// All names below a folder, relative to it, in order.
fn names(folder: &Path) -> Vec<String> {
    let mut all = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() && !path.is_symlink() {
                true => open.push(path),
                false => all.push(path.strip_prefix(folder).unwrap().display().to_string()),
            }
        }
    }
    all.sort();
    all
}
