//! The Secret with the servers' password. The operator creates it and never reads it: it may not read Secrets of other namespaces, and does
//! not need to, because servers and sidecars mount the Secret by name.

use super::{name, object};
use crate::api::KVCachePool;
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::json;

/// Key with the password, read by sidecars.
pub const PASSWORD: &str = "password";
/// Key with the list of users, read by the servers.
pub const USERS: &str = "users.acl";

/// What sidecars need (docs/guides/tiers.md), and what probes and people need to look at a server. No command deletes everything at once.
const COMMANDS: &str = "+get +getrange +set +mset +msetnx +del +exists +pexpire +persist +scan +info +watch +unwatch +multi +exec +ping +dbsize";

/// Name of the Secret. It contains the pool's uid: a deleted pool with the same name may still have a Secret, which is deleted with that
/// pool.
pub fn secret_name(pool: &KVCachePool) -> String {
    let uid: String = pool.uid().unwrap_or_default().chars().take(8).collect();
    format!("{}-{uid}", name(pool))
}

/// The Secret, with a password made from these random bytes.
pub fn password(pool: &KVCachePool, random: &[u8; 32]) -> DynamicObject {
    let types = TypeMeta {
        api_version: Secret::API_VERSION.to_string(),
        kind: Secret::KIND.to_string(),
    };
    let password: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let users = format!("user default on >{password} ~kvcp:* -@all {COMMANDS}\n");
    // Not immutable: kubelets would not notice that an immutable Secret was replaced.
    let data = json!({"type": "Opaque", "stringData": {PASSWORD: password, USERS: users}});
    object(pool, types, secret_name(pool), data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::redis::tests::managing;

    #[test]
    fn servers_and_sidecars_read_the_same_password() {
        let pool = managing(json!({}));
        let mut secret = password(&pool, &[7; 32]);
        assert_eq!(secret.name_any(), "kvcachepool-llama-0a1b2c3d");
        let text = secret.data["stringData"][PASSWORD].take();
        assert_eq!(text.as_str().unwrap(), "07".repeat(32));
        let users = secret.data["stringData"][USERS].as_str().unwrap();
        assert!(users.starts_with(&format!("user default on >{} ", "07".repeat(32))));
        assert!(users.contains(" ~kvcp:* -@all +get "), "its own keys only");
        assert!(!users.contains("flush") && !users.contains("+@"), "{users}");
        assert_eq!(secret.owner_references()[0].name, "llama");
    }

    #[test]
    fn a_new_pool_with_an_old_name_has_its_own_secret() {
        let old = managing(json!({}));
        let mut new = old.clone();
        new.metadata.uid = Some("ffffffff-0000-4000-8000-000000000000".to_string());
        assert_ne!(secret_name(&old), secret_name(&new));
    }
}
