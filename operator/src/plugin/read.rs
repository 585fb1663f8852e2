//! Reads the cluster for the plugin, with errors that say what to do.

use super::args::Kube;
use super::explain::{Evidence, PoolFound};
use crate::api::KVCachePool;
use crate::inject::requested_pool;
use crate::names;
use crate::pods::{Pod, STATUS_VALUES_MAX};
use crate::untrusted;
use axum::http::Request;
use jiff::Timestamp;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{DeserializeGuard, NamespaceResourceScope, PartialObjectMeta};
use kube::{Api, Client, Config, Resource, ResourceExt};
use kvcachepool_protocol::status::Status;
use serde_json::Value;
use std::error::Error;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of a query to a sidecar through the API server.
const SIDECAR_TIME_MAX: Duration = Duration::from_secs(5);

/// Why nothing can be shown.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The cluster cannot be reached.
    #[error("cannot connect to a cluster: {0}; set KUBECONFIG or --context")]
    Config(String),
    /// The file does not exist.
    #[error(
        "cannot connect to a cluster: there is no kubeconfig at {}; set KUBECONFIG or --kubeconfig",
        .0.display()
    )]
    NoKubeconfig(PathBuf),
    /// The API server refused a request.
    #[error("cannot read {what}: {source}")]
    Api {
        what: String,
        /// The API server's error.
        #[source]
        source: Box<kube::Error>,
    },
    /// The object does not exist.
    #[error("there is no {0}")]
    NotFound(String),
    /// The cluster does not have the kind of the object.
    #[error(
        "cannot read {0}: the cluster does not have this kind of object; check that kvcachepool is installed"
    )]
    UnknownKind(String),
    /// The object exists, but this version cannot read it.
    #[error("this version of the plugin cannot read {0}: {1}")]
    Broken(String, String),
    /// The argument is not a pod.
    #[error("{0} is not a pod; write pod/NAME")]
    NotAPod(String),
    /// The pod requests no pool.
    #[error("pod {0} has no label or annotation kvcachepool.io/pool, so it has no sidecar")]
    NoPool(String),
    /// The runtime or the output failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
    /// The result cannot be serialized.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The result cannot be serialized as YAML.
    #[error(transparent)]
    Yaml(#[from] serde_yaml::Error),
}

/// A cluster and a namespace.
pub struct Cluster {
    client: Client,
    namespace: String,
}

/// Pools, and the pods of the named pool.
pub struct Pools {
    /// Readable pools.
    pub pools: Vec<KVCachePool>,
    /// Unreadable pools: name and error.
    pub broken: Vec<(String, String)>,
    /// Pods of the pool, if one was named.
    pub pods: Option<Vec<Pod>>,
}

impl Cluster {
    /// Connects with a kubeconfig, or from within a pod.
    pub async fn connect(kube: &Kube) -> Result<Self, ReadError> {
        let config = config(kube).await.map_err(|e| unconfigured(&*e))?;
        let namespace = kube
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|e| ReadError::Config(e.to_string()))?;
        Ok(Self { client, namespace })
    }

    /// The client, for reads outside of the namespace.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Name of the namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The same cluster with another namespace.
    pub fn within(&self, namespace: &str) -> Self {
        Self {
            client: self.client.clone(),
            namespace: namespace.to_owned(),
        }
    }

    /// The API for a kind of object in the namespace.
    pub fn api<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub async fn one(&self, name: &str) -> Result<KVCachePool, ReadError> {
        let what = format!("KVCachePool {name} in namespace {}", self.namespace);
        match self.pool(name).await? {
            PoolFound::Yes(pool) => Ok(*pool),
            PoolFound::No => Err(ReadError::NotFound(what)),
            PoolFound::Broken(error) => Err(ReadError::Broken(what, error)),
        }
    }

    /// Names of the pools of the namespace.
    pub async fn names(&self) -> Result<Vec<String>, ReadError> {
        let api: Api<PartialObjectMeta<KVCachePool>> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let found = api.list_metadata(&ListParams::default()).await;
        let pools = found.map_err(failed("KVCachePools"))?.items;
        Ok(pools.iter().map(ResourceExt::name_any).collect())
    }

    /// All pools, or one with its pods.
    pub async fn pools(&self, name: Option<&str>, everywhere: bool) -> Result<Pools, ReadError> {
        let api: Api<DeserializeGuard<KVCachePool>> = match everywhere {
            true => Api::all(self.client.clone()),
            false => Api::namespaced(self.client.clone(), &self.namespace),
        };
        let found = match name {
            None => {
                api.list(&ListParams::default())
                    .await
                    .map_err(failed("KVCachePools"))?
                    .items
            }
            Some(name) => {
                let what = format!("KVCachePool {name} in namespace {}", self.namespace);
                let pool = api.get_opt(name).await.map_err(failed(&what))?;
                vec![pool.ok_or(ReadError::NotFound(what))?]
            }
        };
        let (mut pools, mut broken) = (Vec::new(), Vec::new());
        for pool in found {
            match pool.0 {
                Ok(pool) => pools.push(pool),
                Err(e) => broken.push((e.metadata.name.clone().unwrap_or_default(), e.error)),
            }
        }
        let pods = match name {
            Some(name) => Some(self.pods(name).await?),
            None => None,
        };
        Ok(Pools {
            pools,
            broken,
            pods,
        })
    }

    /// The pods with the label of a pool, in the order of their names.
    pub async fn pods(&self, pool: &str) -> Result<Vec<Pod>, ReadError> {
        let pods = self.raw_pods(&format!("{}={pool}", names::POOL)).await?;
        Ok(pods.into_iter().filter_map(Pod::read).collect())
    }

    /// Pods as stored, by a label selector, in the order of their names.
    pub async fn raw_pods(&self, selector: &str) -> Result<Vec<Value>, ReadError> {
        let params = ListParams::default().labels(selector);
        let list = self.pod_api().list(&params).await.map_err(failed("pods"))?;
        Ok(list.items.into_iter().map(raw).collect())
    }

    /// The pods of a pool, or the one of pod/NAME, which must have a pool.
    pub async fn pods_of(&self, of: &str) -> Result<Vec<Pod>, ReadError> {
        let Some((kind, _)) = of.split_once('/') else {
            self.one(of).await?;
            return self.pods(of).await;
        };
        if matches!(kind, "kvcachepool" | "kvcachepools" | "kvpool") {
            return Err(ReadError::NotAPod(of.to_owned()));
        }
        let name = pod_name(of)?;
        let pod = self.raw_pod(name).await?;
        let without = || ReadError::NoPool(name.to_owned());
        Ok(vec![Pod::read(pod).ok_or_else(without)?])
    }

    async fn raw_pod(&self, name: &str) -> Result<Value, ReadError> {
        let what = format!("pod {name} in namespace {}", self.namespace);
        let found = self.pod_api().get_opt(name).await.map_err(failed(&what))?;
        Ok(raw(found.ok_or(ReadError::NotFound(what))?))
    }

    /// Everything that is needed to explain a pod.
    pub async fn evidence(&self, pod: &str) -> Result<Evidence, ReadError> {
        let name = pod_name(pod)?;
        let pod = self.raw_pod(name).await?;
        let pool = match requested_pool(&pod) {
            Some(name) => Some(self.pool(name).await?),
            None => None,
        };
        let sidecar = match Pod::read(pod.clone()) {
            Some(slim) if slim.address().is_some() => Some(self.sidecar(name).await),
            _ => None,
        };
        Ok(Evidence {
            pod,
            pool,
            sidecar,
            now: Timestamp::now(),
        })
    }

    async fn pool(&self, name: &str) -> Result<PoolFound, ReadError> {
        let api: Api<DeserializeGuard<KVCachePool>> =
            Api::namespaced(self.client.clone(), &self.namespace);
        let what = format!("KVCachePool {name}");
        Ok(match api.get_opt(name).await.map_err(failed(&what))? {
            None => PoolFound::No,
            Some(DeserializeGuard(Ok(pool))) => PoolFound::Yes(Box::new(pool)),
            Some(DeserializeGuard(Err(e))) => PoolFound::Broken(e.error),
        })
    }

    /// Queries a sidecar through the API server, because pods are seldom reachable from a user's machine.
    pub async fn sidecar(&self, pod: &str) -> Result<Status, String> {
        let text = self.proxied(pod, names::ADMIN_PORT, "v1/status").await?;
        untrusted::from_slice(text.as_bytes(), STATUS_VALUES_MAX)
            .map_err(|e| format!("its status cannot be read: {e}"))
    }

    /// Reads a path of a pod's HTTP server through the API server.
    pub async fn proxied(&self, pod: &str, port: u16, path: &str) -> Result<String, String> {
        let path = format!(
            "/api/v1/namespaces/{}/pods/{pod}:{port}/proxy/{path}",
            self.namespace
        );
        let request = Request::get(path)
            .body(Vec::new())
            .map_err(|e| e.to_string())?;
        match timeout(SIDECAR_TIME_MAX, self.client.request_text(request)).await {
            Ok(Ok(text)) => Ok(text),
            Ok(Err(kube::Error::Api(status))) if status.code == 403 => {
                Err("you lack the permission `get` on `pods/proxy` in this namespace".to_owned())
            }
            Ok(Err(e)) => Err(e.to_string()),
            Err(_) => Err(format!("no answer within {SIDECAR_TIME_MAX:?}")),
        }
    }

    fn pod_api(&self) -> Api<DynamicObject> {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        Api::namespaced_with(self.client.clone(), &self.namespace, &kind)
    }
}

/// The name of a pod, from NAME or pod/NAME.
pub fn pod_name(of: &str) -> Result<&str, ReadError> {
    match of.split_once('/') {
        None => Ok(of),
        Some(("pod" | "pods" | "po", name)) => Ok(name),
        Some(_) => Err(ReadError::NotAPod(of.to_owned())),
    }
}

/// Why there is no connection. Outside of a cluster, kube's own message begins with variables that only pods have.
fn unconfigured(error: &(dyn Error + 'static)) -> ReadError {
    let causes = std::iter::successors(Some(error), |&e| e.source());
    let mut causes = causes.filter_map(|e| e.downcast_ref::<KubeconfigError>());
    match causes.next() {
        Some(KubeconfigError::ReadConfig(e, path)) if e.kind() == ErrorKind::NotFound => {
            ReadError::NoKubeconfig(path.clone())
        }
        _ => ReadError::Config(error.to_string()),
    }
}

/// The connection that the flags describe.
async fn config(kube: &Kube) -> Result<Config, Box<dyn Error>> {
    let options = KubeConfigOptions {
        context: kube.context.clone(),
        cluster: kube.cluster.clone(),
        user: kube.user.clone(),
    };
    let named = [&kube.context, &kube.cluster, &kube.user];
    let mut config = match &kube.kubeconfig {
        Some(path) => {
            Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?
        }
        None if named.iter().any(|name| name.is_some()) => {
            Config::from_custom_kubeconfig(Kubeconfig::read()?, &options).await?
        }
        None => Config::infer().await?,
    };
    if let Some(user) = &kube.impersonate {
        config.auth_info.impersonate = Some(user.clone());
        config.auth_info.impersonate_groups = Some(kube.impersonate_groups.clone());
    }
    if !kube.request_timeout.is_zero() {
        let limit = Some(kube.request_timeout);
        (config.connect_timeout, config.read_timeout) = (limit, limit);
        config.write_timeout = limit;
        config.reset_reader_on_write = true;
    }
    Ok(config)
}

/// The pod as raw JSON.
fn raw(pod: DynamicObject) -> Value {
    serde_json::to_value(pod).unwrap_or_default()
}

/// Names what could not be read.
pub fn failed(what: &str) -> impl FnOnce(kube::Error) -> ReadError {
    let what = what.to_owned();
    move |source| match source {
        kube::Error::Api(status) if status.code == 404 => ReadError::UnknownKind(what),
        source => ReadError::Api {
            what,
            source: Box::new(source),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_missing_kubeconfig_is_named() {
        let kube = Kube {
            kubeconfig: Some("/nowhere/config".into()),
            ..Kube::default()
        };
        let error = Cluster::connect(&kube).await.err().unwrap().to_string();
        assert_eq!(
            error,
            "cannot connect to a cluster: there is no kubeconfig at /nowhere/config; set KUBECONFIG or --kubeconfig"
        );
        let empty = tempfile::NamedTempFile::new().unwrap();
        let kube = Kube {
            kubeconfig: Some(empty.path().to_owned()),
            ..Kube::default()
        };
        let error = Cluster::connect(&kube).await.err().unwrap().to_string();
        assert!(error.ends_with("; set KUBECONFIG or --context"), "{error}");
    }
}
