//! The config on disk: reading it, and noticing changes. The protocol crate defines the keys and their meaning.

mod files;

pub use self::files::{Files, INJECTED_FOLDER};

use kvcachepool_protocol::config::{Config, ConfigError, UnknownKey};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    #[error("ConfigUnreadable: {path}: {source}")]
    Unreadable {
        path: PathBuf,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The file was read and is invalid; every problem is named.
    #[error("ConfigInvalid: {path}: {source}")]
    Invalid { path: PathBuf, source: ConfigError },
}

impl ConfigFileError {
    /// Reason name in metrics and status.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "ConfigUnreadable",
            Self::Invalid { .. } => "ConfigInvalid",
        }
    }
}

#[derive(Debug)]
pub struct Loaded {
    pub config: Config,
    /// Unknown keys (managed mode only: in a file written by hand they are errors).
    pub unknown: Vec<UnknownKey>,
    /// Why the pool's file is not used; the pod's is in effect then.
    pub pool_refused: Option<ConfigFileError>,
}

/// Reads one file; no path means all defaults.
pub fn load(path: Option<&Path>) -> Result<Loaded, ConfigFileError> {
    parse(path, false)
}

fn parse(path: Option<&Path>, managed: bool) -> Result<Loaded, ConfigFileError> {
    let text = read(path)?;
    match Config::parse(&text, managed) {
        Ok((config, unknown)) => Ok(Loaded {
            config,
            unknown,
            pool_refused: None,
        }),
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

/// The socket, even from a file that is otherwise invalid. `None`: there is no readable file, or its value is invalid.
pub fn socket(path: Option<&Path>) -> Option<PathBuf> {
    value(
        path,
        |config| config.socket,
        |document| {
            let alone: serde_yaml::Mapping = document
                .into_iter()
                .filter(|(key, _)| key.as_str() == Some("socket"))
                .collect();
            let (config, _) = Config::parse(&serde_yaml::to_string(&alone).ok()?, true).ok()?;
            Some(config.socket)
        },
    )
}

/// The admin address, even from a file that is otherwise invalid: a sidecar with an invalid config must be reachable to report it.
/// `None`: there is no readable file, or its value is invalid.
pub fn admin_listen(path: Option<&Path>) -> Option<SocketAddr> {
    value(
        path,
        |config| config.admin.listen,
        |document| match document.get("admin").and_then(|admin| admin.get("listen")) {
            Some(listen) => listen.as_str()?.parse().ok(),
            None => Some(Config::default().admin.listen),
        },
    )
}

/// One value of a file: from its config, or parsed alone if the file is invalid.
fn value<T>(
    path: Option<&Path>,
    of_config: impl FnOnce(Config) -> T,
    by_itself: impl FnOnce(serde_yaml::Mapping) -> Option<T>,
) -> Option<T> {
    let text = read(path).ok()?;
    match Config::parse(&text, true) {
        Ok((config, _)) => Some(of_config(config)),
        Err(_) => by_itself(kvcachepool_protocol::config::mapping(&text)?),
    }
}

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
        let socket = socket(Some(&path)).unwrap();
        assert_eq!(socket, Path::new("/x/s.sock"));
        assert_eq!(
            admin_listen(Some(&path)),
            Some(SocketAddr::from(([127, 0, 0, 1], 1234)))
        );
        assert_eq!(lock_path(&socket), Path::new("/x/sidecar.lock"));
    }

    #[test]
    fn a_file_that_cannot_say_which_socket_or_port_names_none() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("none.yaml");
        assert!(matches!(
            load(Some(&path)),
            Err(ConfigFileError::Unreadable { .. })
        ));
        assert_eq!(socket(Some(&path)), None);
        assert_eq!(admin_listen(Some(&path)), None);
        let far = "x".repeat(200);
        for text in [
            ": : :\n\t- {",
            "- 1\n",
            "socket: {}\n",
            &format!("socket: /{far}\n"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(socket(Some(&path)), None, "{text}");
        }
        for text in [": : :\n\t- {", "- 1\n", "admin: {listen: here}\n"] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(admin_listen(Some(&path)), None, "{text}");
        }
        std::fs::write(&path, "memory: {szie: 1}\n").unwrap();
        for path in [Some(path.as_path()), None] {
            assert_eq!(socket(path), Some(Config::default().socket));
            assert_eq!(admin_listen(path), Some(Config::default().admin.listen));
        }
        assert_eq!(load(None).unwrap().config, Config::default());
    }
}
