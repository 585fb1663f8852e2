//! The keys that open the port: one per line of a file, which is read at each HELLO, so that a rotated Secret works at once.

use std::path::{Path, PathBuf};

/// Shorter keys could be guessed.
const KEY_BYTES_MIN: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot read the key file {path}: {source}")]
    Unreadable {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "the key file {path} has no key: write one key of {KEY_BYTES_MIN} or more characters per line"
    )]
    Empty { path: PathBuf },
    #[error(
        "the key file {path} has a key of {length} characters; a key needs {KEY_BYTES_MIN} or more"
    )]
    TooShort { path: PathBuf, length: usize },
    /// Says nothing about the server to a client without a key.
    #[error("the key is not one of the server's key file")]
    Wrong,
}

/// The keys of the file.
pub fn load(path: &Path) -> Result<Vec<String>, KeyError> {
    let text = std::fs::read_to_string(path).map_err(|source| KeyError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    let keys: Vec<String> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    if let Some(short) = keys.iter().find(|key| key.len() < KEY_BYTES_MIN) {
        return Err(KeyError::TooShort {
            path: path.to_owned(),
            length: short.len(),
        });
    }
    if keys.is_empty() {
        return Err(KeyError::Empty {
            path: path.to_owned(),
        });
    }
    Ok(keys)
}

/// Whether the file has the presented key.
pub fn check(path: &Path, presented: &str) -> Result<(), KeyError> {
    let keys = load(path).map_err(|e| {
        tracing::error!(error = %e, "no client can connect: the key file is unusable");
        KeyError::Wrong
    })?;
    // Hashes of equal length are compared, so that the timing reveals nothing about the keys.
    let presented = blake3::hash(presented.as_bytes());
    match keys
        .iter()
        .any(|key| blake3::hash(key.as_bytes()) == presented)
    {
        true => Ok(()),
        false => Err(KeyError::Wrong),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_key_of_the_file_opens_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        std::fs::write(&file, "0123456789abcdef\n\n  fedcba9876543210  \n").unwrap();
        assert!(check(&file, "0123456789abcdef").is_ok());
        assert!(check(&file, "fedcba9876543210").is_ok());
        for wrong in ["", "0123456789abcde", "0123456789abcdeF", "\n"] {
            assert!(
                matches!(check(&file, wrong), Err(KeyError::Wrong)),
                "{wrong}"
            );
        }
    }

    #[test]
    fn a_file_without_a_good_key_opens_to_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        assert!(matches!(load(&file), Err(KeyError::Unreadable { .. })));
        assert!(matches!(check(&file, ""), Err(KeyError::Wrong)));
        std::fs::write(&file, "\n \n").unwrap();
        assert!(matches!(load(&file), Err(KeyError::Empty { .. })));
        assert!(matches!(check(&file, ""), Err(KeyError::Wrong)));
        std::fs::write(&file, "0123456789abcdef\nshort").unwrap();
        assert!(matches!(
            load(&file),
            Err(KeyError::TooShort { length: 5, .. })
        ));
    }
}
