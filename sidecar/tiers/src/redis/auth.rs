//! Credentials for a server: from its URL, or from files that are read again for every new connection.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

const BYTES_MAX: usize = 4096;

/// User and password. Debug output hides them.
#[derive(Clone, PartialEq, Eq)]
pub struct Login {
    /// The ACL user; `None` for the default user.
    pub user: Option<String>,
    pub password: String,
}

impl fmt::Debug for Login {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Login(..)")
    }
}

/// Source of user and password.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Auth {
    None,
    Given(Login),
    /// Files `username` and `password` of a folder.
    Folder(PathBuf),
}

impl Auth {
    /// The current user and password. An error names the invalid file.
    pub async fn login(&self) -> Result<Option<Login>, String> {
        match self {
            Self::None => Ok(None),
            Self::Given(login) => Ok(Some(login.clone())),
            Self::Folder(folder) => Ok(Some(Login {
                user: read(&folder.join("username"))
                    .await?
                    .filter(|user| !user.is_empty()),
                password: password(&folder.join("password")).await?,
            })),
        }
    }
}

/// The password in a file. An error names the file.
pub async fn password(path: &Path) -> Result<String, String> {
    let missing = || format!("{}: the file does not exist", path.display());
    read(path).await?.ok_or_else(missing)
}

/// The text of a file without its final line end; `None` if the file does not exist.
async fn read(path: &Path) -> Result<Option<String>, String> {
    let shown = path.display();
    let text = match tokio::fs::read(path).await {
        Ok(text) => text,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(format!("{shown}: {e}")),
    };
    if text.len() > BYTES_MAX {
        return Err(format!("{shown}: longer than {BYTES_MAX} bytes"));
    }
    let text = String::from_utf8(text).map_err(|_| format!("{shown}: not valid UTF-8"))?;
    Ok(Some(text.trim_end_matches(['\r', '\n']).to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn files_are_read_anew_each_time_and_a_missing_password_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let auth = Auth::Folder(folder.path().into());
        let error = auth.login().await.unwrap_err();
        assert!(
            error.contains("password: the file does not exist"),
            "{error}"
        );
        for (user, password) in [(None, "one"), (Some("me"), "two"), (Some(""), "three")] {
            std::fs::write(folder.path().join("password"), format!("{password}\n")).unwrap();
            if let Some(user) = user {
                std::fs::write(folder.path().join("username"), user).unwrap();
            }
            let expected = Login {
                user: user.filter(|u| !u.is_empty()).map(str::to_string),
                password: password.into(),
            };
            assert_eq!(auth.login().await, Ok(Some(expected)));
        }
        std::fs::write(folder.path().join("password"), [b'x'; BYTES_MAX + 1]).unwrap();
        let error = auth.login().await.unwrap_err();
        assert!(
            error.contains("longer than") && !error.contains("xxx"),
            "{error}"
        );
    }
}
