//! Credentials for a server: from its URL, or from files that are read again for every new connection.

use parking_lot::Mutex;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const BYTES_MAX: usize = 4096;
/// Logins that are remembered: the current one and the one before.
const ACCEPTED_MAX: usize = 2;

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
    Files(Arc<Files>),
}

impl Auth {
    /// The files `username` and `password` of a folder.
    pub fn folder(folder: &Path) -> Self {
        Self::files(User::File(folder.join("username")), folder.join("password"))
    }

    /// This user, or `None` for the default user, and the file with its password.
    pub fn password_file(user: Option<String>, file: PathBuf) -> Self {
        Self::files(User::Named(user), file)
    }

    fn files(user: User, password: PathBuf) -> Self {
        let accepted = Mutex::default();
        Self::Files(Arc::new(Files {
            user,
            password,
            accepted,
        }))
    }

    /// The current user and password. An error names the invalid file.
    pub async fn login(&self) -> Result<Option<Login>, String> {
        match self {
            Self::None => Ok(None),
            Self::Given(login) => Ok(Some(login.clone())),
            Self::Files(files) => files.login().await.map(Some),
        }
    }

    /// Others than this one that a server accepted lately. After a change of the files, not all servers accept the new login at the same
    /// time.
    pub fn others(&self, login: &Login) -> Vec<Login> {
        let Self::Files(files) = self else {
            return Vec::new();
        };
        let accepted = files.accepted.lock();
        accepted.iter().filter(|l| *l != login).cloned().collect()
    }

    /// Remembers that a server accepted this login.
    pub fn accepted(&self, login: &Login) {
        if let Self::Files(files) = self {
            let mut accepted = files.accepted.lock();
            accepted.retain(|other| other != login);
            accepted.insert(0, login.clone());
            accepted.truncate(ACCEPTED_MAX);
        }
    }
}

/// Files with user and password, and what servers accepted lately, newest first.
#[derive(Debug)]
pub struct Files {
    user: User,
    password: PathBuf,
    accepted: Mutex<Vec<Login>>,
}

#[derive(Debug, PartialEq, Eq)]
enum User {
    File(PathBuf),
    Named(Option<String>),
}

impl PartialEq for Files {
    fn eq(&self, other: &Self) -> bool {
        (&self.user, &self.password) == (&other.user, &other.password)
    }
}

impl Eq for Files {}

impl Files {
    async fn login(&self) -> Result<Login, String> {
        let user = match &self.user {
            User::File(path) => read(path).await?.filter(|user| !user.is_empty()),
            User::Named(user) => user.clone(),
        };
        let missing = || format!("{}: the file does not exist", self.password.display());
        let password = read(&self.password).await?.ok_or_else(missing)?;
        Ok(Login { user, password })
    }
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
        let auth = Auth::folder(folder.path());
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
