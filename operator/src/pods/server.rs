//! A managed server of a pool, as the operator sees its pod.

/// A pod of a pool's managed servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    pub name: Box<str>,
    pub namespace: Box<str>,
    /// Name of the pool.
    pub pool: Box<str>,
    /// Its container answers its readiness probe, and the pod is not being deleted.
    pub ready: bool,
    /// Why it does not start or does not keep running: the scheduler's or the kubelet's reason and message.
    pub trouble: Option<(Box<str>, Box<str>)>,
}
