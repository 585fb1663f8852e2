//! The files that a pool's sidecars read for shared tiers, and their paths in the config. Only names of Secrets pass through the operator.

use super::redis;
use crate::api::{CaSource, CaSourceKind, KVCachePool};
use crate::inject::{Files, Holder};
use crate::names::CONFIG_PATH;

/// Keys of a Redis Secret.
const REDIS_KEYS: [&str; 2] = ["username", "password"];
/// Keys of a Secret with a client's certificate.
const CLIENT_KEYS: [&str; 2] = ["tls.crt", "tls.key"];
/// Keys of a bucket's Secret.
const S3_KEYS: [&str; 3] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
];

/// Files of one shared tier.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Folder with credentials; empty = none.
    pub auth: String,
    /// File with certificates; empty = none.
    pub ca: String,
    /// Folder with the client's certificate and its key; empty = none.
    pub client_certificate: String,
    /// Sources of all.
    pub files: Vec<Files>,
}

/// Files of the Redis tier.
pub(super) fn of_redis(pool: &KVCachePool) -> Reads {
    let tier = pool.spec.shared.redis.as_ref();
    let external = tier.and_then(|redis| redis.external.as_ref());
    let given = external.and_then(|external| external.auth.as_ref());
    let managed = redis::managed(pool);
    let secret = match managed {
        Some(_) => Some(redis::secret_name(pool)),
        None => given.map(|secret| secret.secret_name.clone()),
    };
    let certificate = managed.filter(|redis| redis.tls).map(|_| CaSource {
        kind: CaSourceKind::Secret,
        name: redis::secret_name(pool),
        key: redis::CERTIFICATE.to_owned(),
    });
    let given = external.and_then(|external| external.ca.as_ref());
    let mut reads = reads("redis", secret, &REDIS_KEYS, certificate.as_ref().or(given));
    if let Some(client) = external.and_then(|external| external.client_certificate.as_ref()) {
        let folder = "redis-client";
        reads.client_certificate = format!("{CONFIG_PATH}/{folder}");
        reads
            .files
            .push(of_secret(&client.secret_name, folder, &CLIENT_KEYS));
    }
    reads
}

/// Files of the S3 tier.
pub(super) fn of_s3(pool: &KVCachePool) -> Reads {
    let s3 = pool.spec.shared.s3.as_ref();
    let secret = s3.and_then(|s3| Some(s3.auth.as_ref()?.secret_name.clone()));
    reads("s3", secret, &S3_KEYS, s3.and_then(|s3| s3.ca.as_ref()))
}

/// Keys of a Secret as files of a folder.
fn of_secret(name: &str, folder: &str, keys: &[&str]) -> Files {
    let file = |key: &&str| (key.to_string(), format!("{folder}/{key}"));
    Files {
        holder: Holder::Secret,
        name: name.to_owned(),
        keys: keys.iter().map(file).collect(),
    }
}

fn reads(tier: &str, secret: Option<String>, keys: &[&str], ca: Option<&CaSource>) -> Reads {
    let mut reads = Reads::default();
    if let Some(name) = secret {
        reads.auth = format!("{CONFIG_PATH}/{tier}");
        reads.files.push(of_secret(&name, tier, keys));
    }
    if let Some(ca) = ca {
        let file = format!("{tier}-ca.crt");
        reads.ca = format!("{CONFIG_PATH}/{file}");
        reads.files.push(Files {
            holder: match ca.kind {
                CaSourceKind::ConfigMap => Holder::ConfigMap,
                CaSourceKind::Secret => Holder::Secret,
            },
            name: ca.name.clone(),
            keys: vec![(ca.key.clone(), file)],
        });
    }
    reads
}
