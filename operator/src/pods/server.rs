//! A managed server of a pool, or the manager of its cluster, as the operator sees its pod.

/// A pod of a pool's managed servers, or of their manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub name: Box<str>,
    pub namespace: Box<str>,
    /// Name of the pool.
    pub pool: Box<str>,
    /// Of a manager: the shape that it gives the cluster. `None` of a server.
    pub shape: Option<Box<str>>,
    /// Its container answers its readiness probe, and the pod is not being deleted.
    pub ready: bool,
    /// Why it does not start or does not keep running: the scheduler's or the kubelet's reason and message.
    pub trouble: Option<(Box<str>, Box<str>)>,
}
