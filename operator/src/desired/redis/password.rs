//! The Secret with the servers' password and certificate. The operator creates it and never reads it: it may not read Secrets of other
//! namespaces, and does not need to, because servers and sidecars mount the Secret by name.

use super::{is_cluster, managed, name, object, server_names};
use crate::api::KVCachePool;
use crate::pki::{PkiError, self_signed};
use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt;
use kube::api::{DynamicObject, TypeMeta};
use serde_json::json;

/// Key with the password, read by sidecars.
pub const PASSWORD: &str = "password";
/// Key with the password of the manager of a cluster, which sidecars do not get.
pub const MANAGER_PASSWORD: &str = "manager-password";

/// Key with the servers' certificate, which sidecars trust.
pub const CERTIFICATE: &str = "tls.crt";
/// Key with the private key of that certificate.
pub const KEY: &str = "tls.key";
/// Lifetime of the certificate in seconds: ten years. Deleting the Secret makes another one.
const LIFETIME: u64 = 10 * 365 * 24 * 60 * 60;

/// Name of the Secret. It contains the pool's uid: a deleted pool with the same name may still have a Secret, which is deleted with that
/// pool. That of a cluster has another name: the Secret of a pool that changed its mode lacks what only clusters need, and is kept.
pub fn secret_name(pool: &KVCachePool) -> String {
    let uid: String = pool.uid().unwrap_or_default().chars().take(8).collect();
    let suffix = match managed(pool) {
        Some(redis) if is_cluster(redis) => "-cluster",
        _ => "",
    };
    format!("{}-{uid}{suffix}", name(pool))
}

/// Random bytes of the passwords of sidecars and manager.
pub type Random = [[u8; 32]; 2];

/// The Secret, with passwords made from these random bytes and a certificate that is valid from now on (Unix seconds).
pub fn password(pool: &KVCachePool, random: &Random, now: u64) -> Result<DynamicObject, PkiError> {
    let types = TypeMeta {
        api_version: Secret::API_VERSION.to_string(),
        kind: Secret::KIND.to_string(),
    };
    let hex = |bytes: [u8; 32]| -> String { bytes.map(|byte| format!("{byte:02x}")).concat() };
    let [password, manager] = random.map(hex);
    let (certificate, key) = self_signed(&server_names(pool), now, now + LIFETIME)?;
    // Not immutable: kubelets would not notice that an immutable Secret was replaced.
    let data = json!({"type": "Opaque", "stringData": {
        PASSWORD: password, MANAGER_PASSWORD: manager, CERTIFICATE: certificate, KEY: key,
    }});
    Ok(object(pool, types, secret_name(pool), data))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::redis::tests::managing;
    use rustls::pki_types::CertificateDer;
    use rustls::pki_types::pem::PemObject;
    use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

    const NOW: u64 = 1_800_000_000;

    #[test]
    fn servers_and_sidecars_read_the_same_password() {
        let pool = managing(json!({}));
        let secret = password(&pool, &[[7; 32], [8; 32]], NOW).unwrap();
        assert_eq!(secret.name_any(), "kvcachepool-llama-0a1b2c3d");
        assert_eq!(secret.data["stringData"][PASSWORD], "07".repeat(32));
        assert_eq!(secret.data["stringData"][MANAGER_PASSWORD], "08".repeat(32));
        assert_eq!(secret.owner_references()[0].name, "llama");
    }

    #[test]
    fn the_certificate_is_for_every_server_of_the_pool() {
        let secret = password(&managing(json!({"shards": 300})), &[[7; 32]; 2], NOW).unwrap();
        let data = &secret.data["stringData"];
        let [certificate, key] = [CERTIFICATE, KEY].map(|name| data[name].as_str().unwrap());
        assert!(key.starts_with("-----BEGIN PRIVATE KEY-----"));
        let (count, ends) = crate::pki::last_expiry(certificate).unwrap();
        assert_eq!((count, ends), (1, NOW + LIFETIME));
        let der = CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap();
        let (_, parsed) = X509Certificate::from_der(&der).unwrap();
        let names = parsed.subject_alternative_name().unwrap().unwrap();
        let wanted = GeneralName::DNSName("*.kvcachepool-llama.serving.svc");
        assert_eq!(names.value.general_names, [wanted]);
        let usage = parsed.extended_key_usage().unwrap().unwrap().value;
        let both = usage.server_auth && usage.client_auth;
        assert!(both, "the servers of a cluster are clients of each other");
    }

    #[test]
    fn a_new_pool_with_an_old_name_has_its_own_secret() {
        let old = managing(json!({}));
        let mut new = old.clone();
        new.metadata.uid = Some("ffffffff-0000-4000-8000-000000000000".to_string());
        assert_ne!(secret_name(&old), secret_name(&new));
        let cluster = managing(json!({"mode": "Cluster", "shards": 3}));
        assert_ne!(secret_name(&old), secret_name(&cluster));
    }
}
