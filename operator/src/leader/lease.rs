//! Reads, creates and replaces the Lease. Every write names the version that it replaces, so only one of two concurrent writers
//! succeeds.

use super::elect::{Record, Timing};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use std::time::Duration;

/// The Lease with a given name.
pub struct LeaseClient {
    api: Api<Lease>,
    name: String,
}

/// The holder that a write sets.
pub struct Holder<'a> {
    /// Empty to release the Lease.
    pub name: &'a str,
    pub timing: Timing,
    /// Another candidate held the Lease before.
    pub taken: bool,
}

impl LeaseClient {
    pub fn new(api: Api<Lease>, name: String) -> Self {
        Self { api, name }
    }

    pub async fn read(&self) -> Result<Option<Lease>, kube::Error> {
        self.api.get_opt(&self.name).await
    }

    /// Fails with 409 if another candidate created it first.
    pub async fn create(&self, holder: Holder<'_>) -> Result<Lease, kube::Error> {
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(self.name.clone()),
                ..ObjectMeta::default()
            },
            spec: None,
        };
        let lease = with(lease, holder);
        self.api.create(&PostParams::default(), &lease).await
    }

    /// Replaces the Lease that was read. Fails with 409 if that version is outdated.
    pub async fn replace(&self, read: Lease, holder: Holder<'_>) -> Result<Lease, kube::Error> {
        let lease = with(read, holder);
        self.api
            .replace(&self.name, &PostParams::default(), &lease)
            .await
    }
}

fn with(mut lease: Lease, holder: Holder<'_>) -> Lease {
    let spec = lease.spec.get_or_insert_with(LeaseSpec::default);
    let now = MicroTime(Timestamp::now());
    if holder.taken {
        spec.acquire_time = Some(now.clone());
        spec.lease_transitions = Some(spec.lease_transitions.unwrap_or(0).saturating_add(1));
    }
    spec.holder_identity = Some(holder.name.to_owned());
    spec.lease_duration_seconds = i32::try_from(holder.timing.lease_duration.as_secs().max(1)).ok();
    spec.renew_time = Some(now);
    lease
}

pub fn record(lease: &Lease) -> Record {
    let spec = lease.spec.clone().unwrap_or_default();
    Record {
        holder: spec.holder_identity.unwrap_or_default(),
        lease_duration: spec
            .lease_duration_seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .map(Duration::from_secs),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
    }
}
