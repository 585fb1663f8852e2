//! Finds the pool that the pods of a workload will request, from its template.

use crate::names;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind};
use kube::{Api, Client};

/// The label (or annotation) in the workload's template. `None` if it has neither. Errors: a kind that may not be read.
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
