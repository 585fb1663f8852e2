//! The settings of a pool's sidecars, as the operator computes them, for Jobs and sizes.

use super::read::{Cluster, failed};
use crate::api::KVCachePool;
use crate::defaults::Defaults;
use crate::desired::{config_map_name, job, settings};
use crate::inject::Settings;
use crate::names;
use crate::policy::Policy;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, ResourceExt};
use thiserror::Error;

/// Why a pool has no settings.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum SettingsError {
    /// The pool is invalid.
    #[error("NotAccepted: the pool's spec is invalid: {0}")]
    NotAccepted(String),
    /// The pool has no shared tier.
    #[error("NoSharedTier: pool {0} has no shared tier")]
    NoSharedTier(String),
    /// The image of sidecars is unknown.
    #[error("ImageUnknown: ConfigMap {0} does not have the image of sidecars; set --image")]
    ImageUnknown(String),
}

/// The settings of the pool's sidecars, with this image or that of new pods. The pool must have a shared tier.
pub async fn of_shared_tiers(
    cluster: &Cluster,
    pool: &KVCachePool,
    image: Option<&str>,
) -> Result<Settings, Box<dyn std::error::Error>> {
    let image = match image.filter(|i| !i.is_empty()) {
        Some(image) => image.to_owned(),
        None if !pool.spec.sidecar.image.is_empty() => pool.spec.sidecar.image.clone(),
        None => new_image(cluster, &pool.name_any()).await?,
    };
    let settings = accepted(pool, image)?;
    if !job::has_shared_tier(&settings.config) {
        return Err(SettingsError::NoSharedTier(pool.name_any()).into());
    }
    Ok(settings)
}

/// The settings of the pool's sidecars, with this default image.
pub fn accepted(pool: &KVCachePool, image: String) -> Result<Settings, SettingsError> {
    let defaults = Defaults {
        image,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        namespace: String::new(),
        redis_image: String::new(),
        redis_exporter_image: String::new(),
        redis_run_as_user: None,
        image_pull_secrets: Vec::new(),
        // The operator has accepted or refused the pool.
        policy: Policy::default(),
    };
    settings(pool, &defaults).map_err(|problems| {
        let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
        SettingsError::NotAccepted(all.join("; "))
    })
}

/// The image that the operator uses for new sidecars.
async fn new_image(cluster: &Cluster, pool: &str) -> Result<String, Box<dyn std::error::Error>> {
    let name = config_map_name(pool);
    let maps: Api<ConfigMap> = cluster.api();
    let map = maps
        .get_opt(&name)
        .await
        .map_err(failed(&format!("ConfigMap {name}")))?;
    let image = map.and_then(|map| map.annotations().get(names::IMAGE).cloned());
    Ok(image.ok_or(SettingsError::ImageUnknown(name))?)
}
