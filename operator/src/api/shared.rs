//! Tiers that all pods of a pool share: Redis, a file system and S3.

use super::{
    Duration, Size,
    schema::{self, is_default},
};
use k8s_openapi::api::core::v1::{
    Affinity, ResourceRequirements, Toleration, TopologySpreadConstraint,
};
use kvcachepool_protocol::config::{self, AddressingStyle, Checksums};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Tiers that all pods of the pool share.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Shared {
    /// Redis or Valkey.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redis: Option<Redis>,
    /// A file system that all pods mount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_system: Option<FileSystem>,
    /// An S3 bucket.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub s3: Option<S3>,
}

/// Redis or Valkey: exactly one of `managed` and `external`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Redis {
    /// Servers that the operator runs for this pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedRedis>,
    /// Existing servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<RedisEndpoint>,
    /// Chunks expire after this time without a read or a write.
    #[serde(default = "ttl")]
    pub ttl: Duration,
}

fn ttl() -> Duration {
    Duration(schema::default_of("redis.ttl").to_string())
}

/// Servers that the operator runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagedRedis {
    /// Standalone servers, or one Redis Cluster.
    #[serde(default)]
    pub mode: RedisMode,
    /// Number of servers, without replicas. Chunks are spread over them.
    #[serde(default = "one")]
    pub shards: i64,
    /// Replicas of each shard, which take over when its server is lost. Only with mode Cluster.
    #[serde(default)]
    pub replicas_per_shard: i64,
    /// Bytes of chunks in each server.
    pub memory_per_shard: Size,
    /// Image of the server. Default: the operator's choice.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::image")]
    pub image: String,
    /// Encrypt the traffic between sidecars and servers, with a certificate that the operator makes.
    #[serde(default, skip_serializing_if = "is_default")]
    pub tls: bool,
    /// Volumes that keep the chunks of servers that are replaced. Only with mode Standalone; replicas do it in a cluster. Default: a replaced
    /// server starts empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistence: Option<Persistence>,
    /// A container beside each server with its metrics for Prometheus. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exporter: Option<Exporter>,
    /// Resources of each server, as in a container.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(schema_with = "schema::bounded::<ResourceRequirements>")]
    pub resources: ResourceRequirements,
    /// Nodes that the servers may run on, as in a pod.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::labels")]
    pub node_selector: BTreeMap<String, String>,
    /// Tolerations of the servers, as in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<Toleration>>")]
    pub tolerations: Vec<Toleration>,
    /// Affinity of the servers, as in a pod.
    #[serde(default, skip_serializing_if = "is_default")]
    #[schemars(schema_with = "schema::bounded::<Affinity>")]
    pub affinity: Affinity,
    /// Spread of the servers, as in a pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::bounded::<Vec<TopologySpreadConstraint>>")]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Priority class of the servers, as in a pod.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::object_name")]
    pub priority_class_name: String,
    /// Labels and annotations of the servers' pods and of the manager's, such as those that an admission policy requires.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: PodMetadata,
}

/// Labels and annotations of pods, besides those of the operator.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PodMetadata {
    /// Labels of the pods, such as those of cost centers.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::pod_labels")]
    pub labels: BTreeMap<String, String>,
    /// Annotations of the pods, such as those of a service mesh.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::pod_annotations")]
    pub annotations: BTreeMap<String, String>,
}

fn one() -> i64 {
    1
}

/// A volume of each managed server. The server writes a snapshot of its chunks when it is stopped, and loads it when it starts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Persistence {
    /// Size of the volume, at least twice `memoryPerShard`: it holds the last snapshot beside the next one.
    pub size: Size,
    /// Storage class of the volume. Empty = the cluster's default class.
    #[serde(default)]
    #[schemars(schema_with = "schema::object_name")]
    pub storage_class_name: String,
    /// Time between further snapshots, which a server that crashes loads. They need twice the memory. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_interval: Option<Duration>,
}

/// A redis_exporter beside each managed server, on the port `metrics` (9121).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Exporter {
    /// Image of redis_exporter. Default: the operator's choice.
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::image")]
    pub image: String,
    /// Resources of the container, as in a pod.
    #[serde(skip_serializing_if = "is_default")]
    #[schemars(schema_with = "schema::bounded::<ResourceRequirements>")]
    pub resources: ResourceRequirements,
}

/// How managed servers work together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum RedisMode {
    /// Independent servers.
    #[default]
    Standalone,
    /// One Redis Cluster, which a manager pod forms, repairs and resizes.
    Cluster,
}

/// Existing servers: exactly one of `url` and `urls`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RedisEndpoint {
    /// Address: redis:// or rediss:// (TLS), redis-sentinel://host,host/name or redis-cluster://host,host. The latter two take ?tls=true
    /// for TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::url")]
    pub url: Option<String>,
    /// Several independent servers, instead of url. Chunks are spread over them by these names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::urls")]
    pub urls: Vec<String>,
    /// A Secret with the key password, and username if the server has users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<SecretName>,
    /// Certificates of the authorities that are trusted for the server. Default: the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaSource>,
    /// A Secret with the keys tls.crt and tls.key, for servers that ask clients for a certificate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_certificate: Option<SecretName>,
}

/// A Secret in the pool's namespace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretName {
    /// Name of the Secret.
    #[schemars(schema_with = "schema::object_name")]
    pub secret_name: String,
}

/// A key of a ConfigMap or Secret with PEM certificates.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CaSource {
    /// Kind of the object.
    #[serde(default)]
    pub kind: CaSourceKind,
    /// Name of the object.
    #[schemars(schema_with = "schema::object_name")]
    pub name: String,
    /// Key in the object.
    #[serde(default = "ca_crt")]
    #[schemars(schema_with = "schema::object_name")]
    pub key: String,
}

fn ca_crt() -> String {
    "ca.crt".to_string()
}

/// Kind of an object with certificates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CaSourceKind {
    /// A ConfigMap.
    #[default]
    ConfigMap,
    /// A Secret.
    Secret,
}

/// A file system that all pods mount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FileSystem {
    /// The volume with the objects. Only the sidecars mount it. Pods start only if the claim exists and is bound.
    pub persistent_volume_claim: ClaimName,
    /// Bytes that the pool may store in the volume. The oldest objects are removed. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Size>,
    /// Percent of the capacity at which removal begins.
    #[serde(default = "file_system_evict_at_percent")]
    pub evict_at_percent: i64,
    /// Percent of the capacity at which removal ends.
    #[serde(default = "file_system_evict_to_percent")]
    pub evict_to_percent: i64,
    /// Objects are removed this long after they were written. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_after: Option<Duration>,
}

fn file_system_evict_at_percent() -> i64 {
    config::FileSystem::default().evict_at_percent.into()
}
fn file_system_evict_to_percent() -> i64 {
    config::FileSystem::default().evict_to_percent.into()
}

/// A PersistentVolumeClaim in the pool's namespace, of access mode ReadWriteMany.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimName {
    /// Name of the PersistentVolumeClaim.
    #[schemars(schema_with = "schema::object_name")]
    pub claim_name: String,
}

/// An S3 bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct S3 {
    /// Name of the bucket.
    #[schemars(schema_with = "schema::bucket")]
    pub bucket: String,
    /// Region of the bucket.
    #[serde(default = "region")]
    #[schemars(schema_with = "schema::short")]
    pub region: String,
    /// Address of a service other than AWS.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::url")]
    pub endpoint: String,
    /// Prefix of all object names. Pools with the same bucket and prefix share their objects.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::prefix")]
    pub prefix: String,
    /// Where the bucket's name is in URLs: in the host, in the path, or chosen by endpoint.
    #[serde(default)]
    #[schemars(schema_with = "schema::choice::<AddressingStyle>")]
    pub addressing_style: AddressingStyle,
    /// Use AWS Transfer Acceleration.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accelerate: bool,
    /// A Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, optionally, AWS_SESSION_TOKEN. Default: the pod's own identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<SecretName>,
    /// Certificates of the authorities that are trusted for the service. Default: the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaSource>,
    /// When S3's own checksums are sent and checked.
    #[serde(default)]
    #[schemars(schema_with = "schema::choice::<Checksums>")]
    pub checksums: Checksums,
    /// Requests in flight, per pod.
    #[serde(default = "max_concurrency")]
    pub max_concurrency: i64,
    /// Bytes that the pool may store in the bucket. The oldest objects are removed. Default: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Size>,
    /// Percent of the capacity at which removal begins.
    #[serde(default = "evict_at_percent")]
    pub evict_at_percent: i64,
    /// Percent of the capacity at which removal ends.
    #[serde(default = "evict_to_percent")]
    pub evict_to_percent: i64,
    /// Objects are removed this long after they were written. Default: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_after: Option<Duration>,
}

fn region() -> String {
    schema::default_of("s3.region").to_string()
}
fn max_concurrency() -> i64 {
    config::S3::default().max_concurrency.into()
}
fn evict_at_percent() -> i64 {
    config::S3::default().evict_at_percent.into()
}
fn evict_to_percent() -> i64 {
    config::S3::default().evict_to_percent.into()
}
