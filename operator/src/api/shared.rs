//! Tiers that all pods of a pool share: Redis and S3.

use super::{
    Duration, Quantity,
    schema::{self, is_default},
};
use k8s_openapi::api::core::v1::{
    Affinity, ResourceRequirements, Toleration, TopologySpreadConstraint,
};
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
    /// Servers that are there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub external: Option<RedisEndpoint>,
    /// After this time without being written or read a chunk goes.
    #[serde(default = "a_day")]
    pub ttl: Duration,
}

fn a_day() -> Duration {
    Duration("24h".to_string())
}

/// Servers that the operator runs: standalone, without persistence. It is a cache.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagedRedis {
    /// Number of servers; chunks are spread over them.
    #[serde(default = "one")]
    pub shards: i64,
    /// Bytes of chunks in each server.
    pub memory_per_shard: Quantity,
    /// Image of the server, instead of the operator's choice.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::image")]
    pub image: String,
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
}

fn one() -> i64 {
    1
}

/// Servers that are there already: exactly one of `url` and `urls`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RedisEndpoint {
    /// Where it is: redis:// or rediss:// (TLS); redis-sentinel://host,host/name or redis-cluster://host,host where several servers are one, with ?tls=true behind it for TLS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::url")]
    pub url: Option<String>,
    /// Several servers that know nothing of each other, in place of url: chunks are spread over them by these names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::urls")]
    pub urls: Vec<String>,
    /// A Secret with the key password, and username where the server has users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<SecretName>,
    /// Certificates that the server's is checked against, instead of the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaSource>,
}

/// A Secret of the pool's namespace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretName {
    /// Its name.
    #[schemars(schema_with = "schema::object_name")]
    pub secret_name: String,
}

/// A key of a ConfigMap or Secret with certificates as PEM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CaSource {
    /// What holds it.
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

/// What holds certificates.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CaSourceKind {
    /// A ConfigMap.
    #[default]
    ConfigMap,
    /// A Secret.
    Secret,
}

/// An S3 bucket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct S3 {
    /// Name of the bucket.
    #[schemars(schema_with = "schema::bucket")]
    pub bucket: String,
    /// Its region.
    #[serde(default = "us_east_1")]
    #[schemars(schema_with = "schema::short")]
    pub region: String,
    /// Address of the service, for others than AWS.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::url")]
    pub endpoint: String,
    /// Before the name of every object. Pools with the same bucket and prefix share what they hold.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(schema_with = "schema::prefix")]
    pub prefix: String,
    /// Where the bucket's name goes: into the host, the path, or as the endpoint needs it.
    #[serde(default)]
    pub addressing_style: AddressingStyle,
    /// Whether the Transfer Acceleration endpoint of AWS is used.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accelerate: bool,
    /// A Secret with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and AWS_SESSION_TOKEN where there is one; absent = the pod's own identity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<SecretName>,
    /// Certificates that the service's is checked against, instead of the public ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca: Option<CaSource>,
    /// Which requests carry checksums.
    #[serde(default)]
    pub checksums: Checksums,
    /// HTTP version.
    #[serde(default)]
    pub http_version: HttpVersion,
    /// Requests at a time, per pod.
    #[serde(default = "sixty_four")]
    pub max_concurrency: i64,
    /// Bytes that the pool may hold in the bucket; absent = no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Quantity>,
    /// At this share of the capacity objects begin to go, in percent.
    #[serde(default = "ninety")]
    pub evict_at_percent: i64,
    /// Down to this share of the capacity, in percent.
    #[serde(default = "eighty")]
    pub evict_to_percent: i64,
    /// An object goes this long after its last write; absent = never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expire_after: Option<Duration>,
}

/// No bucket.
impl Default for S3 {
    fn default() -> Self {
        Self {
            bucket: String::new(),
            region: String::new(),
            endpoint: String::new(),
            prefix: String::new(),
            addressing_style: AddressingStyle::default(),
            accelerate: false,
            auth: None,
            ca: None,
            checksums: Checksums::default(),
            http_version: HttpVersion::default(),
            max_concurrency: sixty_four(),
            capacity: None,
            evict_at_percent: ninety(),
            evict_to_percent: eighty(),
            expire_after: None,
        }
    }
}

fn us_east_1() -> String {
    "us-east-1".to_string()
}
fn sixty_four() -> i64 {
    64
}
fn ninety() -> i64 {
    90
}
fn eighty() -> i64 {
    80
}

/// Where a bucket's name goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AddressingStyle {
    /// As the endpoint needs it.
    #[default]
    Auto,
    /// Into the path.
    Path,
    /// Into the host.
    VirtualHost,
}

/// Which requests carry checksums.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Checksums {
    /// Those that must.
    #[default]
    WhenRequired,
    /// All that can.
    WhenSupported,
}

/// HTTP version.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum HttpVersion {
    /// HTTP/1.1: objects are long, and each has a connection of its own.
    #[default]
    Auto,
    /// HTTP/1.1.
    #[serde(rename = "HTTP1")]
    Http1,
    /// HTTP/2.
    #[serde(rename = "HTTP2")]
    Http2,
}
