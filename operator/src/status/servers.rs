//! The managed servers of a pool: how many are ready, and why one is not.

use super::Observation;
use super::counts::size;
use crate::api::{ManagedRedis, ManagedServers};
use crate::desired::redis::{self, managed};
use crate::pods::{Refused, Server};
use std::sync::Arc;

/// `None` without managed servers.
pub fn count(observed: &Observation<'_>) -> Option<ManagedServers> {
    let desired = redis::servers(managed(observed.pool)?);
    let ready = servers(observed).filter(|s| s.ready).count();
    Some(ManagedServers {
        desired,
        // A scale-down ends later than the change of the pool.
        ready: size(ready).min(desired),
    })
}

fn servers<'a>(observed: &Observation<'a>) -> impl Iterator<Item = &'a Arc<Server>> {
    let servers = observed.servers.iter();
    servers.filter(|server| server.shape.is_none())
}

/// A managed server that does not start or does not keep running; without a sidecar's report, also the manager of a cluster.
pub fn failing<'a>(observed: &Observation<'a>, reported: bool) -> Option<&'a Server> {
    managed(observed.pool)?;
    let mut servers = observed.servers.iter();
    let counts = |s: &Server| s.shape.is_none() || !reported;
    let failing = servers.find(|s| s.trouble.is_some() && counts(s));
    failing.map(|s| &**s)
}

/// The last refusal of a server's pod, while servers are missing; without a sidecar's report, also of the manager's.
pub fn refused<'a>(observed: &Observation<'a>, reported: bool) -> Option<&'a Refused> {
    let redis = managed(observed.pool)?;
    let existing = size(servers(observed).count());
    let managed = observed.servers.iter().any(|s| s.shape.is_some());
    let mut refused = observed.refused_servers.iter().rev();
    refused.find(|refused| match &*refused.owner.kind {
        "StatefulSet" => existing < redis::servers(redis),
        _ => redis::is_cluster(redis) && !managed && !reported,
    })
}

/// Whether the servers are a cluster whose manager has not finished.
pub fn are_joining(observed: &Observation<'_>) -> bool {
    managed(observed.pool)
        .is_some_and(|redis| redis::is_cluster(redis) && !is_complete(observed.servers, redis))
}

/// Whether the servers form the cluster that the pool wants and no other server is part of it, as its manager says.
pub fn is_complete(servers: &[Arc<Server>], redis: &ManagedRedis) -> bool {
    let shape = redis::shape(redis);
    let mut servers = servers.iter();
    servers.any(|server| server.ready && server.shape.as_deref() == Some(shape.as_str()))
}
