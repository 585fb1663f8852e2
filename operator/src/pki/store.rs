//! The Secret with the authorities. The leader writes it and every replica reads it. It is created with create, not with apply, because two
//! writers must not merge their keys.

use super::authority;
use super::plan::Authority;
use super::{PkiError, in_time};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, ObjectMeta, PostParams};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tracing::{error, info};

/// Key in the Secret's data.
const KEY: &str = "authorities.json";

#[derive(Default, Serialize, Deserialize)]
struct Content {
    authorities: Vec<Authority>,
}

pub struct Store {
    api: Api<Secret>,
    name: String,
}

/// The stored authorities at the time of the read.
#[derive(Default)]
pub struct Stored {
    secret: Option<Secret>,
    /// Oldest first.
    pub authorities: Vec<Authority>,
}

impl Store {
    pub fn new(api: Api<Secret>, name: String) -> Self {
        Self { api, name }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    fn failed(&self, e: kube::Error) -> PkiError {
        PkiError::Secret {
            name: self.name.clone(),
            source: Box::new(e),
        }
    }

    /// Reads the current state. Entries that are unreadable or cannot sign are skipped; the leader then creates new ones.
    pub async fn read(&self) -> Result<Stored, PkiError> {
        let secret = in_time(self.api.get_opt(&self.name)).await;
        let secret = secret.map_err(|e| self.failed(e))?;
        let data = secret.as_ref().and_then(|s| s.data.as_ref()?.get(KEY));
        let mut authorities = match data.map(|data| serde_json::from_slice::<Content>(&data.0)) {
            None => Vec::new(),
            Some(Ok(content)) => content.authorities,
            Some(Err(e)) => {
                error!(secret = self.name, key = KEY, reason = %e, "stored certificate authorities cannot be read");
                Vec::new()
            }
        };
        authorities.retain(|a| match authority::usable(a) {
            Ok(()) => true,
            Err(e) => {
                error!(secret = self.name, reason = %e, "a stored certificate authority cannot sign; ignoring it");
                false
            }
        });
        Ok(Stored {
            secret,
            authorities,
        })
    }

    /// Replaces the authorities that were read. Returns false if the Secret changed in between.
    pub async fn write(&self, read: Stored, authorities: Vec<Authority>) -> Result<bool, PkiError> {
        let content = serde_json::to_vec(&Content { authorities })
            .map_err(|e| PkiError::Certificate(e.to_string()))?;
        let data = BTreeMap::from([(KEY.to_owned(), ByteString(content))]);
        let params = PostParams::default();
        let written = match read.secret {
            Some(mut secret) => {
                secret.data = Some(data);
                in_time(self.api.replace(&self.name, &params, &secret)).await
            }
            None => {
                let secret = Secret {
                    metadata: ObjectMeta {
                        name: Some(self.name.clone()),
                        ..ObjectMeta::default()
                    },
                    data: Some(data),
                    ..Secret::default()
                };
                in_time(self.api.create(&params, &secret)).await
            }
        };
        match written {
            Ok(_) => Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 => {
                info!(secret = self.name, "Secret was written by another replica");
                Ok(false)
            }
            Err(e) => Err(self.failed(e)),
        }
    }
}
