//! Injection: takes raw pod JSON and a pool's [`Settings`], and returns a minimal JSON patch or a named refusal. It is pure: no client, no
//! clock, no files. Fields that it does not change are never parsed into types. It converges: called again on its own result, whatever
//! other webhooks changed in between, it repairs the pod or does nothing.

mod additions;
mod check;
mod conflicts;
mod diff;
mod disk;
mod engine;
mod env;
mod files;
mod gpu;
mod hook;
mod json;
mod launch;
mod outcome;
mod overlay;
mod pod;
mod qos;
mod quantity;
mod reason;
mod resources;
mod settings;
mod shape;
mod shortfall;
mod target;
#[cfg(test)]
mod tests;
mod tool;

pub use additions::PROGRAM;
pub use disk::Disk;
pub use files::{Files, Holder};
pub use gpu::names_gpus;
pub use outcome::{Outcome, Report, Verdict};
pub use quantity::Quantity;
pub use reason::Reason;
pub use resources::with_memory;
pub use settings::Settings;
pub use shortfall::Reason as Shortfall;
pub use tool::tool;

use crate::api::Mode;
use crate::forms::within;
use crate::names;
use engine::Engine;
use json_patch::Patch;
use serde_json::Value;

/// Why a pod is not injected, with a message for this pod.
struct Refusal {
    reason: Reason,
    message: String,
}

impl Refusal {
    fn new(reason: Reason, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { reason, message }
    }
}

/// A shortfall of an injected pod, with a message for this pod.
#[derive(Debug, Clone, PartialEq)]
struct ShortfallDetail {
    reason: Shortfall,
    message: String,
}

/// The pool that a pod requests by label or annotation, if any.
pub fn requested_pool(pod: &Value) -> Option<&str> {
    json::label(pod, names::POOL)
        .filter(|name| !name.is_empty())
        .or_else(|| json::annotation(pod, names::POOL).filter(|name| !name.is_empty()))
}

/// The LeaderWorkerSet of the pod's group, if any.
pub fn leader_worker_set(pod: &Value) -> Option<&str> {
    json::label(pod, names::LEADER_WORKER_SET)
}

/// Whether an earlier call injected the pod. Then neither the breaker nor the pool's mode applies: changes by others must be repaired, or
/// the API server rejects the pod or it never starts.
pub fn is_injected(pod: &Value) -> bool {
    additions::are_present(pod)
}

/// Whether the container with the shared folder of an injected pod starts SGLang.
pub fn starts_sglang(pod: &Value) -> bool {
    pod.get("spec").is_some_and(|spec| {
        json::list(spec, "containers")
            .iter()
            .filter(|container| target::mounts_shared_volume(container))
            .any(|container| launch::Launch::of(container).engine() == Engine::Sglang)
    })
}

/// Decides about `pod` for the pool of `settings`. The caller has found the pool by [`requested_pool`].
pub fn inject(pod: &Value, settings: &Settings) -> Outcome {
    if is_mirror(pod) {
        return Outcome::Unchanged;
    }
    let planned = plan(pod, settings).and_then(|(after, shortfall)| {
        let patch = sound_patch(pod, &after)?;
        Ok((patch, shortfall))
    });
    match planned {
        Ok((patch, _)) if patch.is_empty() => Outcome::Unchanged,
        Ok((patch, shortfall)) => Outcome::Inject {
            patch,
            report: Report::injected(settings.hash(), shortfall.as_ref()),
            shortfall: shortfall.map(|shortfall| shortfall.reason),
        },
        Err(Refusal { reason, message }) => refuse(pod, reason, &message),
    }
}

/// Stamps the pod with a refusal. Also used for refusals that only the caller knows, such as a missing pool. A pod that was injected by an
/// earlier call keeps its sidecar and its stamp.
pub fn refuse(pod: &Value, reason: Reason, message: &str) -> Outcome {
    if is_mirror(pod) || additions::are_present(pod) {
        return Outcome::Unchanged;
    }
    Outcome::Refuse {
        reason,
        message: message.to_string(),
        patch: stamp(pod, &Report::refused(reason, message)).unwrap_or_default(),
    }
}

/// A mirror pod represents a pod that the kubelet runs from a file. Changes to it have no effect.
fn is_mirror(pod: &Value) -> bool {
    json::annotation(pod, "kubernetes.io/config.mirror").is_some()
}

/// The injected pod and its shortfall.
fn plan(pod: &Value, settings: &Settings) -> Result<(Value, Option<ShortfallDetail>), Refusal> {
    if settings.mode == Mode::Disabled && !additions::are_present(pod) {
        return Err(Refusal::new(
            Reason::PoolDisabled,
            format!(
                "pool {} has injection.mode: Disabled; set it to Enabled and create the pod again",
                settings.pool
            ),
        ));
    }
    if !is_label(&settings.pool) {
        return Err(Refusal::new(
            Reason::AnnotationInvalid,
            format!(
                "annotation {}: {:?} is not a valid label value; write at most 63 letters, digits, - and .",
                names::POOL,
                settings.pool
            ),
        ));
    }
    shape::check(pod).map_err(|problem| Refusal::new(Reason::InjectionBroken, problem))?;
    let spec = &pod["spec"];
    conflicts::place(spec, settings.config.admin.listen.port())?;
    let target = target::target(pod, spec, settings)?;
    additions::names_are_free(spec, target)?;
    let launch = launch::Launch::of(&spec["containers"][target]);
    conflicts::multi_node(pod, &launch)?;
    conflicts::isolated_python(&launch)?;
    match launch.engine() {
        Engine::Vllm => conflicts::connector(&launch, settings.existing_connector)?,
        Engine::Sglang => engine::sglang(&launch)?,
    }
    let overrides = pod::Overrides::of(pod, settings)?;
    pod::injected(pod, settings, target, &overrides)
}

/// Maximum bytes of a pod as JSON: etcd's default limit. The API server's encoding is smaller.
const POD_BYTES: usize = 3 << 19;

/// The patch from `before` to `after`, after a check that it produces `after` and that the API server would accept it.
fn sound_patch(before: &Value, after: &Value) -> Result<Patch, Refusal> {
    let broken = |problem: String| Refusal::new(Reason::InjectionBroken, problem);
    check::check(after).map_err(broken)?;
    check::check_class(before, after).map_err(broken)?;
    let patch = diff::diff(before, after);
    if patch.is_empty() {
        return Ok(patch);
    }
    let bytes = serde_json::to_vec(after).map_or(usize::MAX, |text| text.len());
    if bytes > POD_BYTES {
        return Err(Refusal::new(
            Reason::PodTooLarge,
            format!(
                "with the sidecar the pod would have {bytes} bytes, and the limit is {POD_BYTES}; shorten its annotations or environment variables"
            ),
        ));
    }
    proven(before, after, patch).map_err(broken)
}

fn proven(before: &Value, after: &Value, patch: Patch) -> Result<Patch, String> {
    let mut result = before.clone();
    json_patch::patch(&mut result, &patch).map_err(|e| format!("the patch does not apply: {e}"))?;
    if result == *after {
        Ok(patch)
    } else {
        Err("the patch does not produce the expected pod".to_string())
    }
}

/// The patch that records a refusal: the annotation, and the label if the pod requested the pool by annotation, because the operator finds
/// pods by label. `None` if the pod cannot be patched.
fn stamp(pod: &Value, report: &Report) -> Option<Patch> {
    shape::check_metadata(pod).ok()?;
    let mut after = pod.clone();
    let metadata = json::entry(&mut after, "metadata");
    json::set_text(
        json::entry(metadata, "annotations"),
        names::INJECTION,
        &report.text(),
    );
    if let Some(pool) = requested_pool(pod).filter(|pool| is_label(pool)) {
        json::set_text(json::entry(metadata, "labels"), names::POOL, pool);
    }
    check::check_annotations(&after).ok()?;
    proven(pod, &after, diff::diff(pod, &after)).ok()
}

fn is_label(name: &str) -> bool {
    name.len() <= 63 && within(name, u8::is_ascii_alphabetic, b"-_.")
}
