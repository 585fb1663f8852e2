//! The managed servers of a pool: how many are ready, and why one is not.

use super::Observation;
use super::counts::size;
use crate::api::ManagedServers;
use crate::desired::redis::managed;
use crate::pods::Server;

/// `None` without managed servers.
pub fn count(observed: &Observation<'_>) -> Option<ManagedServers> {
    let desired = managed(observed.pool)?.shards;
    let ready = observed.servers.iter().filter(|s| s.ready).count();
    Some(ManagedServers {
        desired,
        // A scale-down ends later than the change of the pool.
        ready: size(ready).min(desired),
    })
}

/// A managed server that does not start or does not keep running.
pub fn failing<'a>(observed: &Observation<'a>) -> Option<&'a Server> {
    managed(observed.pool)?;
    let mut servers = observed.servers.iter();
    servers.find(|s| s.trouble.is_some()).map(|s| &**s)
}
