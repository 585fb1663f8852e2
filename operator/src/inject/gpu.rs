//! Access of the sidecar's container to the GPUs of vLLM's container. A pod without GPUs is injected too, and its annotation reports that.
//! The sidecar never requests a device: it would get another one than vLLM, and block it for others.

use super::quantity::Quantity;
use super::{Settings, Shortfall, ShortfallDetail, json};
use crate::api::GpuAccess;
use k8s_openapi::api::core::v1::EnvVar;
use kvcachepool_protocol::config::{ByteSize, CONTEXT_BYTES, Config, TransferMode};
use serde_json::{Value, json};
use std::collections::HashSet;

/// The resulting access in one pod.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Gpu {
    /// Not requested, and not needed.
    NotRequested,
    /// Requested or needed, but the pod has no GPU to share.
    Unavailable(ShortfallDetail),
    /// By these environment variables.
    Variables([(&'static str, String); 2]),
    /// By these claims of vLLM's container.
    Claims(Vec<Value>),
}

const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// Its values that name no device.
const NO_DEVICE: [&str; 3] = ["", "none", "void"];
/// No device is known by name when a pod is created: a device plugin assigns vLLM's devices later, on the node, and only vLLM's container
/// learns them.
const ALL: &str = "all";
const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";
/// Driver capabilities: libcuda, and the NVML for `doctor`.
const COMPUTE: &str = "compute,utility";

impl Gpu {
    /// The access for a pod whose container with index `target` runs vLLM.
    pub(super) fn of(spec: &Value, target: usize, settings: &Settings) -> Self {
        let vllm = json::list(spec, "containers")
            .get(target)
            .unwrap_or(&Value::Null);
        match settings.gpu_access {
            GpuAccess::None if wants_window(settings) => Self::without_access(spec, vllm),
            GpuAccess::None => Self::NotRequested,
            GpuAccess::VisibleDevices => {
                let own = own_devices(vllm);
                // Devices named for the sidecar by the user imply that there are some.
                if own.is_none() && !requests_gpu(vllm) && !names(&settings.env, DEVICES) {
                    let why = "requests no NVIDIA GPU";
                    return Self::unavailable(Shortfall::GpuNotRequested, vllm, why);
                }
                let devices = own.unwrap_or(ALL).to_string();
                Self::Variables([(DEVICES, devices), (CAPABILITIES, COMPUTE.to_string())])
            }
            GpuAccess::ResourceClaim => match claims(spec, vllm) {
                none if none.is_empty() => {
                    Self::unavailable(Shortfall::NoResourceClaim, vllm, "uses no resource claim")
                }
                claims => Self::Claims(claims),
            },
        }
    }

    /// A vLLM on a GPU needs a window in that GPU's memory. A vLLM on CPUs uses host memory, for which the sidecar needs no GPU.
    fn without_access(spec: &Value, vllm: &Value) -> Self {
        let why = if own_devices(vllm).is_some() || requests_gpu(vllm) {
            "requests a GPU, which the pool does not let the sidecar use"
        } else if !claims(spec, vllm).is_empty() {
            "uses resource claims, which the pool does not let the sidecar use"
        } else {
            return Self::NotRequested;
        };
        Self::unavailable(Shortfall::NoGpuAccess, vllm, why)
    }

    fn unavailable(reason: Shortfall, vllm: &Value, why: &str) -> Self {
        let message = format!(
            "container {} {why}, so the sidecar has no GPU",
            json::name(vllm)
        );
        Self::Unavailable(ShortfallDetail { reason, message })
    }

    /// The shortfall for the pod's annotation.
    pub(super) fn shortfall(&self) -> Option<&ShortfallDetail> {
        match self {
            Self::Unavailable(shortfall) => Some(shortfall),
            Self::NotRequested | Self::Variables(_) | Self::Claims(_) => None,
        }
    }

    /// Reserves container memory for CUDA contexts if there is a GPU: the pool's amount, or the default.
    pub(super) fn reserve_memory(&self, config: &mut Config) {
        let given = matches!(self, Self::Variables(_) | Self::Claims(_));
        let chosen = config.gpu.context_memory;
        config.gpu.context_memory = match given {
            true if chosen == ByteSize(0) => ByteSize(CONTEXT_BYTES),
            true => chosen,
            false => ByteSize(0),
        };
    }

    /// Sets the access in the sidecar's container, which is complete otherwise. Removes the access that an earlier call added and that is
    /// no longer valid, because the API server rejects unknown claims.
    pub(super) fn put(&self, sidecar: &mut Value, settings: &Settings) {
        match settings.gpu_access {
            GpuAccess::None => {}
            GpuAccess::VisibleDevices => self.put_variables(sidecar, &settings.env),
            GpuAccess::ResourceClaim => {
                let resources = json::object(json::entry(sidecar, "resources"));
                match self {
                    Self::Claims(claims) => resources.insert("claims".to_string(), json!(claims)),
                    _ => resources.remove("claims"),
                };
            }
        }
    }

    /// Existing variables are kept: the pool or a policy of the cluster, such as one that hides devices, may have set them.
    fn put_variables(&self, sidecar: &mut Value, of_pool: &[EnvVar]) {
        let Self::Variables(wanted) = self else {
            let own = [(DEVICES, ALL), (CAPABILITIES, COMPUTE)];
            if sidecar.get("env").is_some() {
                json::list_mut(sidecar, "env").retain(|one| {
                    let present = (json::name(one), json::text(one, "value"));
                    let is_added = |(name, value)| present == (name, Some(value));
                    names(of_pool, present.0) || !own.into_iter().any(is_added)
                });
            }
            return;
        };
        let variables = json::list_mut(sidecar, "env");
        for (name, value) in wanted {
            if json::position(variables, name).is_none() {
                variables.push(json!({"name": name, "value": value}));
            }
        }
    }
}

/// Whether the pool requests a window and does not name devices itself.
fn wants_window(settings: &Settings) -> bool {
    settings.config.transfer.mode == TransferMode::CudaWindow && !names(&settings.env, DEVICES)
}

/// Whether variables of the pool give the sidecar access to GPUs, as `gpuAccess: VisibleDevices` does.
pub fn names_gpus(variables: &[EnvVar]) -> bool {
    variables.iter().any(|variable| {
        let value = variable.value.as_deref().unwrap_or_default();
        variable.name == DEVICES && (variable.value_from.is_some() || !NO_DEVICE.contains(&value))
    })
}

fn names(variables: &[EnvVar], name: &str) -> bool {
    variables.iter().any(|variable| variable.name == name)
}

/// Devices that vLLM's container names itself; the sidecar gets exactly these. Values that refer to other variables of that container are
/// ignored, because the sidecar does not have those variables.
fn own_devices(vllm: &Value) -> Option<&str> {
    let variables = json::list(vllm, "env").iter();
    // If a name occurs several times, the last one counts.
    let own = variables.rev().find(|one| json::name(one) == DEVICES)?;
    json::text(own, "value").filter(|text| !NO_DEVICE.contains(text) && !text.contains("$("))
}

/// Vendors whose GPUs are not managed by NVIDIA's runtime.
const OTHER_VENDORS: [&str; 2] = ["amd.com", "intel.com"];

/// Whether vLLM's container requests an NVIDIA GPU, or a part of one, from a device plugin. Some plugins have their own domain.
fn requests_gpu(vllm: &Value) -> bool {
    let of_nvidia = |resource: &str| {
        let resource = resource.to_ascii_lowercase();
        let Some((domain, name)) = resource.split_once('/') else {
            return false;
        };
        (name.contains("gpu") || name.starts_with("mig-"))
            && !OTHER_VENDORS.iter().any(|other| domain.ends_with(other))
    };
    ["limits", "requests"].iter().any(|kind| {
        let amounts = vllm.pointer(&format!("/resources/{kind}"));
        let mut amounts = amounts.and_then(Value::as_object).into_iter().flatten();
        amounts.any(|(name, amount)| {
            of_nvidia(name) && Quantity::of(amount).is_some_and(|amount| amount.is_positive())
        })
    })
}

/// The claims of vLLM's container that the pod declares, reduced to their names and requests.
fn claims(spec: &Value, vllm: &Value) -> Vec<Value> {
    let declared = json::list(spec, "resourceClaims");
    let used = vllm.get("resources").unwrap_or(&Value::Null);
    let used = json::list(used, "claims").iter();
    let declared: HashSet<&str> = declared.iter().map(json::name).collect();
    used.filter(|claim| declared.contains(json::name(claim)))
        .map(|claim| {
            let mut same = json!({"name": json::name(claim)});
            if let Some(request) = json::text(claim, "request").filter(|text| !text.is_empty()) {
                json::set_text(&mut same, "request", request);
            }
            same
        })
        .collect()
}
