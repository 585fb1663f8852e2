//! Credentials from the files of a mounted Secret, named as in the environment, and read again when they change.

use crate::{Cause, Kind, TierError};
use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{ProvideCredentials, future};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::Mutex;

const ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";
/// Credentials are cached for this long.
const FRESH: Duration = Duration::from_secs(1);
/// Most reads until two in a row are equal: the files of a Secret change together, but are not read together.
const READS: usize = 4;

/// A folder with credentials.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    read: Mutex<Option<(Instant, Credentials)>>,
}

impl Folder {
    /// Opens the files of this folder, which must exist.
    pub async fn open(path: &Path) -> Result<Self, TierError> {
        let folder = Self {
            path: path.to_owned(),
            read: Mutex::default(),
        };
        match folder.credentials().await {
            Ok(_) => Ok(folder),
            Err(detail) => Err(TierError::new(Kind::S3, Cause::Unauthenticated, detail)),
        }
    }

    async fn credentials(&self) -> Result<Credentials, String> {
        // One request reads while concurrent ones wait for it: each read takes a thread.
        let mut fresh = self.read.lock().await;
        if let Some((at, read)) = &*fresh
            && at.elapsed() < FRESH
        {
            return Ok(read.clone());
        }
        let mut last = self.files().await?;
        for _ in 1..READS {
            let files = self.files().await?;
            if files == last {
                let [id, secret, token] = files;
                let token = (!token.is_empty()).then_some(token);
                let read = Credentials::new(id, secret, token, None, "s3.auth");
                *fresh = Some((Instant::now(), read.clone()));
                return Ok(read);
            }
            last = files;
        }
        Err(format!(
            "s3.auth: the files in {} keep changing",
            self.path.display()
        ))
    }

    async fn files(&self) -> Result<[String; 3], String> {
        let mut texts = [const { String::new() }; 3];
        for (text, name) in texts.iter_mut().zip([ID, SECRET, TOKEN]) {
            let path = self.path.join(name);
            let shown = path.display();
            *text = match tokio::fs::read_to_string(&path).await {
                Ok(read) => read.trim().to_string(),
                Err(e) if e.kind() == io::ErrorKind::NotFound && name == TOKEN => String::new(),
                Err(e) => return Err(format!("s3.auth: {shown}: {e}")),
            };
            if text.is_empty() && name != TOKEN {
                return Err(format!("s3.auth: {shown} is empty"));
            }
        }
        Ok(texts)
    }
}

impl ProvideCredentials for Folder {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(async move {
            let read = self.credentials().await;
            read.map_err(CredentialsError::not_loaded)
        })
    }
}
