//! The config files. In Kubernetes there are two: the pod's own, and the pool's, which reaches running pods and may be missing. The
//! newer one is in effect.

use super::{ConfigFileError, Loaded, load, parse, read};
use kvcachepool_protocol::config::FILE_NAME;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Folder of the files in an injected pod, and of credentials and certificates.
pub const INJECTED_FOLDER: &str = "/etc/kvcachepool";

/// Paths of the config files.
#[derive(Debug, Clone, Default)]
pub struct Files {
    /// File of this pod; `None` means all defaults. It sets the socket and the memory size.
    pub pod: Option<PathBuf>,
    /// File of the pool. While its generation is higher it is in effect, except for the keys that are fixed when a pod is created.
    pub pool: Option<PathBuf>,
}

impl Files {
    /// The files of an injected pod below `folder`; `None` if it has none. Those of the pool appear later, or never.
    pub fn injected(folder: &Path) -> Option<Self> {
        let file = |part: &str| folder.join(part).join(FILE_NAME);
        let (pod, pool) = (file("pod"), file("pool"));
        pod.exists().then_some(Self {
            pod: Some(pod),
            pool: Some(pool),
        })
    }

    /// No file is named: every key has its default.
    pub fn is_empty(&self) -> bool {
        self.pod.is_none() && self.pool.is_none()
    }

    /// Loads the config in effect. Only an invalid file of the pod is an error: without a valid file of the pool, the pod's is used alone.
    pub fn load(&self) -> Result<Loaded, ConfigFileError> {
        let pod = load(self.pod.as_deref())?;
        let Some(path) = &self.pool else {
            return Ok(pod);
        };
        Ok(match parse(Some(path), true) {
            Ok(pool) => either(pod, pool),
            Err(e) if e.is_absence() => pod,
            Err(e) => Loaded {
                pool_refused: Some(e),
                ..pod
            },
        })
    }

    /// Hash of the files' content, to notice a change; `None` while the pod's file cannot be read. Polled, because a mounted volume
    /// changes by a swap of a symbolic link above its files.
    pub fn fingerprint(&self) -> Option<blake3::Hash> {
        let mut hasher = blake3::Hasher::new();
        let pod = read(self.pod.as_deref()).ok()?;
        hasher.update(&(pod.len() as u64).to_le_bytes());
        hasher.update(pod.as_bytes());
        if let Some(path) = &self.pool
            && let Ok(pool) = read(Some(path))
        {
            hasher.update(b"pool");
            hasher.update(pool.as_bytes());
        }
        Some(hasher.finalize())
    }
}

fn either(pod: Loaded, pool: Loaded) -> Loaded {
    let newer = pool.config.pool.generation > pod.config.pool.generation;
    Loaded {
        config: pod.config.or_newer(pool.config),
        unknown: if newer { pool.unknown } else { pod.unknown },
        pool_refused: None,
    }
}

impl ConfigFileError {
    /// Whether the file or its folder does not exist: an optional volume without content.
    fn is_absence(&self) -> bool {
        matches!(self, Self::Unreadable { source, .. } if matches!(source.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvcachepool_protocol::config::{ByteSize, LogLevel};

    fn files(folder: &tempfile::TempDir) -> Files {
        Files {
            pod: Some(folder.path().join("pod.yaml")),
            pool: Some(folder.path().join("pool/config.v1.yaml")),
        }
    }

    fn write(path: &Option<PathBuf>, text: &str) {
        let path = path.as_ref().unwrap();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    #[test]
    fn an_injected_pod_has_a_file_of_its_own_and_maybe_the_pools() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Files::injected(folder.path()).is_none());
        let pool = Some(folder.path().join("pool/config.v1.yaml"));
        write(&pool, "pool: {generation: 1}\n");
        assert!(Files::injected(folder.path()).is_none());
        let pod = Some(folder.path().join("pod/config.v1.yaml"));
        write(&pod, "memory: {size: 1Gi}\n");
        let files = Files::injected(folder.path()).unwrap();
        assert_eq!((files.pod, files.pool), (pod, pool));
        assert!(Files::default().is_empty());
    }

    #[test]
    fn the_pools_file_counts_while_it_is_newer_and_may_be_missing_or_wrong() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(&folder);
        assert!(
            files.load().is_err(),
            "without the pod's file nothing says where"
        );
        assert_eq!(files.fingerprint(), None);
        write(&files.pod, "pool: {generation: 2}\nmemory: {size: 1Gi}\n");
        let alone = files.load().unwrap();
        assert_eq!(
            (alone.config.pool.generation, alone.pool_refused.is_none()),
            (2, true)
        );
        let before = files.fingerprint();

        write(
            &files.pool,
            "pool: {generation: 3}\nmemory: {size: 2Gi}\nlog: {level: warn}\nnext: 1\n",
        );
        assert_ne!(files.fingerprint(), before);
        let both = files.load().unwrap();
        assert_eq!(both.config.pool.generation, 3);
        assert_eq!(both.config.memory.size, ByteSize(1 << 30));
        assert_eq!(both.config.log.level, LogLevel::Warn);
        assert_eq!(
            both.unknown[0].path, "next",
            "it is the operator's: a warning"
        );

        write(&files.pool, "pool: {generation: three}\n");
        let refused = files.load().unwrap();
        assert_eq!(refused.config.pool.generation, 2);
        let why = refused.pool_refused.unwrap().to_string();
        assert!(
            why.starts_with("ConfigInvalid") && why.contains("pool/config.v1.yaml"),
            "{why}"
        );

        std::fs::remove_dir_all(folder.path().join("pool")).unwrap();
        assert_eq!(files.fingerprint(), before);
    }
}
