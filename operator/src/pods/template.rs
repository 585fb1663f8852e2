//! Which pool the pods of a workload will ask for: what its template says.

use crate::names;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};

/// The label (or annotation) in the workload's template; `None`: it has neither. Kinds that may not be read are an error.
pub async fn template_pool(
    client: Client,
    api_version: &str,
    kind: &str,
    namespace: &str,
    name: &str,
) -> Result<Option<String>, kube::Error> {
    let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
    let api: Api<DynamicObject> = Api::namespaced_with(client, namespace, &kind);
    let workload = api.get(name).await?;
    let meta = workload.data.pointer("/spec/template/metadata");
    Ok(["labels", "annotations"].iter().find_map(|place| {
        let pool = meta?.get(place)?.get(names::POOL)?.as_str()?;
        Some(pool.to_owned())
    }))
}
