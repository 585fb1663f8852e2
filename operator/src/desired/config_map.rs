//! The ConfigMap from which running sidecars read a newer config.

use super::object;
use crate::api::KVCachePool;
use crate::inject::Settings;
use crate::names;
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use kvcachepool_protocol::config::FILE_NAME;
use serde_json::json;

/// Name of a pool's ConfigMap. The pods of the pool mount it if it exists.
pub fn config_map_name(pool: &str) -> String {
    format!("kvcachepool-{pool}")
}

/// The config of new pods, for pods that are already running. A pod keeps its own memory size, socket and admin address. The image is
/// included for command-line tools, which know only the pool.
pub(super) fn config_map(pool: &KVCachePool, settings: &Settings) -> DynamicObject {
    let types = TypeMeta {
        api_version: ConfigMap::API_VERSION.to_string(),
        kind: ConfigMap::KIND.to_string(),
    };
    let data = json!({"data": {FILE_NAME: settings.config.to_yaml()}});
    let mut map = object(pool, types, config_map_name(&pool.name_any()), data);
    let image = (names::IMAGE.to_owned(), settings.image.clone());
    map.annotations_mut().extend([image]);
    map
}

#[cfg(test)]
mod tests {
    use crate::desired::desired;
    use crate::desired::tests::{defaults, pool};
    use kvcachepool_protocol::config::Config;
    use serde_json::json;

    #[test]
    fn the_config_of_a_pool_is_a_file_that_the_sidecar_reads() {
        let pool = pool(json!({"cache": {"chunkTokens": 512}, "sidecar": {"logLevel": "debug"}}));
        let mut objects = desired(&pool, &defaults()).unwrap();
        let file = objects[0].data["data"]["config.v1.yaml"].take();
        insta::assert_yaml_snapshot!(objects[0]);
        let (config, unknown) = Config::parse(file.as_str().unwrap(), false).unwrap();
        assert_eq!(unknown, []);
        assert_eq!(config.cache.chunk_tokens, 512);
        assert!(config.managed);
    }
}
