//! How the sidecar's container sees the GPUs of vLLM's. A pod that has none to see is injected all the same, and says so. No device is
//! ever requested for the sidecar: it would be another one than vLLM's, and taken from everybody.

use super::quantity::Quantity;
use super::{Lack, Settings, Shortfall, json};
use k8s_openapi::api::core::v1::EnvVar;
use kvcachepool_protocol::config::{ByteSize, CONTEXT_BYTES, Config, TransferMode};
use serde_json::{Value, json};

/// How the sidecar's container sees the GPUs of vLLM's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum GpuAccess {
    /// Not at all.
    #[default]
    None,
    /// By what the container runtime of NVIDIA reads in its environment.
    VisibleDevices,
    /// By the resource claims of vLLM's container.
    ResourceClaim,
}

impl GpuAccess {
    /// As a pool writes it.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::VisibleDevices => "VisibleDevices",
            Self::ResourceClaim => "ResourceClaim",
        }
    }
}

/// What comes of it in one pod.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Gpu {
    /// Nothing was wanted that needs one.
    Unwanted,
    /// There is none to see.
    Lacking(Lack),
    /// These variables.
    Variables([(&'static str, String); 2]),
    /// These claims, which vLLM's container has.
    Claims(Vec<Value>),
}

const DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";
/// No device is known by name when a pod is made: a device plugin chooses vLLM's later, on the node, and tells vLLM's container alone.
const ALL: &str = "all";
const CAPABILITIES: &str = "NVIDIA_DRIVER_CAPABILITIES";
/// libcuda, and the NVML that the doctor asks.
const COMPUTE: &str = "compute,utility";

impl Gpu {
    /// What the pool's wish comes to in a pod whose container `target` runs vLLM.
    pub(super) fn of(spec: &Value, target: usize, settings: &Settings) -> Self {
        let vllm = json::list(spec, "containers")
            .get(target)
            .unwrap_or(&Value::Null);
        match settings.gpu_access {
            GpuAccess::None if wants_window(settings) => Self::without_access(spec, vllm),
            GpuAccess::None => Self::Unwanted,
            GpuAccess::VisibleDevices => {
                let own = own_devices(vllm);
                // Who names devices for the sidecar has said that there are some.
                if own.is_none() && !requests_gpu(vllm) && !names(&settings.env, DEVICES) {
                    let asks = "asks for no NVIDIA GPU";
                    return Self::lacking(Shortfall::GpuNotRequested, vllm, asks);
                }
                let devices = own.unwrap_or(ALL).to_string();
                Self::Variables([(DEVICES, devices), (CAPABILITIES, COMPUTE.to_string())])
            }
            GpuAccess::ResourceClaim => match claims(spec, vllm) {
                none if none.is_empty() => {
                    Self::lacking(Shortfall::NoResourceClaim, vllm, "uses no resource claim")
                }
                claims => Self::Claims(claims),
            },
        }
    }

    /// For a vLLM on a GPU a window is memory of that GPU; for one on CPUs it is the host's, for which the sidecar has to see none.
    fn without_access(spec: &Value, vllm: &Value) -> Self {
        let why = if own_devices(vllm).is_some() || requests_gpu(vllm) {
            "asks for a GPU, which the pool does not let the sidecar see"
        } else if !claims(spec, vllm).is_empty() {
            "uses resource claims, which the pool does not let the sidecar share"
        } else {
            return Self::Unwanted;
        };
        Self::lacking(Shortfall::NoGpuAccess, vllm, why)
    }

    fn lacking(reason: Shortfall, vllm: &Value, why: &str) -> Self {
        let message = format!(
            "container {} {why}, so the sidecar has no GPU",
            json::name(vllm)
        );
        Self::Lacking(Lack { reason, message })
    }

    /// What the pod's annotation says of it.
    pub(super) fn lack(&self) -> Option<&Lack> {
        match self {
            Self::Lacking(lack) => Some(lack),
            Self::Unwanted | Self::Variables(_) | Self::Claims(_) => None,
        }
    }

    /// Keeps memory free for what CUDA takes of the container's, where there is a GPU: as much as the pool says, or the default.
    pub(super) fn reckon(&self, config: &mut Config) {
        let given = matches!(self, Self::Variables(_) | Self::Claims(_));
        let chosen = config.gpu.context_memory;
        config.gpu.context_memory = match given {
            true if chosen == ByteSize(0) => ByteSize(CONTEXT_BYTES),
            true => chosen,
            false => ByteSize(0),
        };
    }

    /// Puts it into the sidecar's container, in which all else is as it shall be. What a call before this one put there and what has
    /// no ground any more goes: a claim that the pod lacks would have it refused.
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

    /// A variable that is there already stays as it is, whoever set it: the pool's own, or a policy of the cluster that hides devices.
    fn put_variables(&self, sidecar: &mut Value, of_pool: &[EnvVar]) {
        let Self::Variables(wanted) = self else {
            let ours = [(DEVICES, ALL), (CAPABILITIES, COMPUTE)];
            if sidecar.get("env").is_some() {
                json::list_mut(sidecar, "env").retain(|one| {
                    let said = (json::name(one), json::text(one, "value"));
                    let is_ours = |(name, value)| said == (name, Some(value));
                    names(of_pool, said.0) || !ours.into_iter().any(is_ours)
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

/// A pool that wants a window, and says nothing of devices itself.
fn wants_window(settings: &Settings) -> bool {
    settings.config.transfer.mode == TransferMode::CudaWindow && !names(&settings.env, DEVICES)
}

fn names(variables: &[EnvVar], name: &str) -> bool {
    variables.iter().any(|variable| variable.name == name)
}

/// Devices that vLLM's container names itself: then the sidecar sees the same ones and no others. A text that refers to other
/// variables of that container says nothing in ours.
fn own_devices(vllm: &Value) -> Option<&str> {
    const NO_DEVICE: [&str; 3] = ["", "none", "void"];
    let variables = json::list(vllm, "env").iter();
    // Of several of one name the last counts.
    let own = variables.rev().find(|one| json::name(one) == DEVICES)?;
    json::text(own, "value").filter(|text| !NO_DEVICE.contains(text) && !text.contains("$("))
}

/// Vendors whose GPUs no runtime of NVIDIA hands out.
const OTHER_VENDORS: [&str; 2] = ["amd.com", "intel.com"];

/// Whether vLLM's container asks a device plugin for a GPU, or a part of one, of NVIDIA; some plugins have a domain of their own.
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

/// The claims of vLLM's container that the pod declares, with nothing but what says which part of which claim they are.
fn claims(spec: &Value, vllm: &Value) -> Vec<Value> {
    let declared = json::list(spec, "resourceClaims");
    let used = vllm.get("resources").unwrap_or(&Value::Null);
    let used = json::list(used, "claims").iter();
    used.filter(|claim| json::position(declared, json::name(claim)).is_some())
        .map(|claim| {
            let mut same = json!({"name": json::name(claim)});
            if let Some(request) = json::text(claim, "request").filter(|text| !text.is_empty()) {
                json::set_text(&mut same, "request", request);
            }
            same
        })
        .collect()
}
