//! The password of a pool's own servers: made once, by create alone. One that is there already is kept, whatever it says: it cannot be
//! read, nor need it be.

use super::apply::ApplyError;
use crate::api::KVCachePool;
use crate::desired::redis;
use kube::api::{Api, DynamicObject, PostParams};
use kube::{Client, ResourceExt};
use std::time::{Duration, Instant};

/// How often it is made sure that there is one: somebody may have deleted it.
const AGAIN: Duration = Duration::from_secs(300);

/// Makes sure that the pool's Secret is there. `made`: when that was done last.
pub async fn ensure(
    client: &Client,
    pool: &KVCachePool,
    made: &mut Option<Instant>,
) -> Result<(), ApplyError> {
    if made.is_some_and(|at| at.elapsed() < AGAIN) {
        return Ok(());
    }
    let mut random = [0; 32];
    let provider = rustls::crypto::aws_lc_rs::default_provider();
    if provider.secure_random.fill(&mut random).is_err() {
        return Err(ApplyError::NoRandom);
    }
    let secret = redis::password(pool, &random);
    let kind = super::apply::resource(&secret.types.clone().unwrap_or_default());
    let namespace = pool.namespace().unwrap_or_default();
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &kind);
    match api.create(&PostParams::default(), &secret).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(source) => {
            return Err(ApplyError::Api {
                kind: kind.kind,
                name: secret.name_any(),
                source: Box::new(source),
            });
        }
    }
    *made = Some(Instant::now());
    Ok(())
}
