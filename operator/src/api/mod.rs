//! The `KVCachePool` resource: types, schema, rules, and the description of every field. A stored object may be older than a rule, so sizes
//! and times are read as text and validated by [`check`]. This module does not make decisions about objects or pods, and does not use a
//! cluster.

mod choices;
mod injection;
mod local;
mod pool;
mod reason;
mod reference;
mod rules;
mod schema;
mod shared;
mod sidecar;
mod status;
mod text;

pub use choices::{ExistingConnector, GpuAccess, Mode};
pub use injection::{Injection, OnMissed};
pub use local::{Disk, Ephemeral, Local, Memory, NodeDirectory};
pub use pool::{
    Cache, DeletionPolicy, KVCachePool, KVCachePoolSpec, Monitoring, PodMonitor, Write,
};
pub use reason::Reason;
pub use reference::reference;
pub use rules::{Problem, Rule, check, rules};
pub use schema::{at, crd};
pub use shared::{
    CaSource, CaSourceKind, ClaimName, Exporter, FileSystem, ManagedRedis, Persistence, Redis,
    RedisEndpoint, RedisMode, S3, SecretName, Shared,
};
pub use sidecar::{ImagePullPolicy, Sidecar, UpdateStrategy, UpdateStrategyType};
pub use status::{
    InjectionPaused, KVCachePoolStatus, ManagedServers, PausedOwner, Pods, Skipped, Tier,
    TierState, Version,
};
pub use text::{Duration, Size};
