//! The config file on disk: reading it, noticing that it changed, and what of it the engine's core is told.
//! What keys there are and what they mean is the protocol crate's.

mod core;

pub use self::core::core_config;

use kvcachepool_protocol::config::{Config, ConfigError, UnknownKey};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// The file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    /// It cannot be read.
    #[error("ConfigUnreadable: {path}: {source}")]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// What the kernel said.
        source: std::io::Error,
    },
    /// It was read and is wrong; every problem is named.
    #[error("ConfigInvalid: {path}: {source}")]
    Invalid {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong.
        source: ConfigError,
    },
}

impl ConfigFileError {
    /// Name for metrics and status.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "ConfigUnreadable",
            Self::Invalid { .. } => "ConfigInvalid",
        }
    }
}

/// A config that was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// Its values.
    pub config: Config,
    /// Keys that this version does not know (managed mode only: by hand they are errors).
    pub unknown: Vec<UnknownKey>,
}

/// Reads the file; no path = all defaults.
pub fn load(path: Option<&Path>) -> Result<Loaded, ConfigFileError> {
    let text = read(path)?;
    match Config::parse(&text, false) {
        Ok((config, unknown)) => Ok(Loaded { config, unknown }),
        Err(source) => Err(ConfigFileError::Invalid {
            path: path.unwrap_or(Path::new("")).to_owned(),
            source,
        }),
    }
}

fn read(path: Option<&Path>) -> Result<String, ConfigFileError> {
    let Some(path) = path else {
        return Ok(String::new());
    };
    std::fs::read_to_string(path).map_err(|source| ConfigFileError::Unreadable {
        path: path.to_owned(),
        source,
    })
}

/// Content hash of the file, to notice a change. Polled, because a mounted ConfigMap changes by swapping a link above the file.
pub fn fingerprint(path: Option<&Path>) -> Option<blake3::Hash> {
    read(path).ok().map(|text| blake3::hash(text.as_bytes()))
}

/// Socket and admin address, also of a file that is wrong elsewhere: a sidecar with a wrong config must be reachable to say so.
pub fn addresses(path: Option<&Path>) -> (PathBuf, SocketAddr) {
    let fallback = Config::default();
    let text = read(path).unwrap_or_default();
    if let Ok((config, _)) = Config::parse(&text, true) {
        return (config.socket, config.admin.listen);
    }
    let document: serde_yaml::Value = serde_yaml::from_str(&text).unwrap_or_default();
    let socket = document.get("socket").and_then(|v| v.as_str());
    let listen = document
        .get("admin")
        .and_then(|admin| admin.get("listen"))
        .and_then(|v| v.as_str())
        .and_then(|text| text.parse().ok());
    (
        socket.map_or(fallback.socket, PathBuf::from),
        listen.unwrap_or(fallback.admin.listen),
    )
}

/// The lock file beside a socket.
pub fn lock_path(socket: &Path) -> PathBuf {
    socket.with_file_name("sidecar.lock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_file_still_tells_where_to_listen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.v1.yaml");
        std::fs::write(
            &path,
            "socket: /x/s.sock\nadmin: {listen: \"127.0.0.1:1234\"}\nmemory: {szie: 1}\n",
        )
        .unwrap();
        assert!(matches!(
            load(Some(&path)),
            Err(ConfigFileError::Invalid { .. })
        ));
        let (socket, listen) = addresses(Some(&path));
        assert_eq!(socket, Path::new("/x/s.sock"));
        assert_eq!(listen, SocketAddr::from(([127, 0, 0, 1], 1234)));
        assert_eq!(lock_path(&socket), Path::new("/x/sidecar.lock"));
    }

    #[test]
    fn no_file_and_no_yaml_fall_back_to_the_defaults() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.yaml");
        assert!(matches!(
            load(Some(&path)),
            Err(ConfigFileError::Unreadable { .. })
        ));
        std::fs::write(&path, ": : :\n\t- {").unwrap();
        assert_eq!(addresses(Some(&path)).0, Config::default().socket);
        assert_eq!(load(None).unwrap().config, Config::default());
    }
}
