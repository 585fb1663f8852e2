//! Explains why a pod is cached or not: the steps from its label to its engine, each with a result. Pure.

use crate::api::KVCachePool;
use crate::inject::{Report, Shortfall, Verdict, requested_pool, starts_sglang};
use crate::names;
use crate::pods::{Phase, Pod, SidecarState};
use crate::status::{ACCEPTED, INJECTION_READY, condition};
use jiff::Timestamp;
use kube::Resource;
use kvcachepool_protocol::status::{State, Status};
use serde::Serialize;
use serde_json::Value;

/// The input of an explanation.
pub struct Evidence {
    /// The pod as stored.
    pub pod: Value,
    /// The pool that the pod requests. `None` if it requests none.
    pub pool: Option<PoolFound>,
    /// The status of its sidecar. `None` if no sidecar runs.
    pub sidecar: Option<Result<Status, String>>,
    pub now: Timestamp,
}

/// The pool that a pod requests.
pub enum PoolFound {
    /// It exists.
    Yes(Box<KVCachePool>),
    /// It exists, but cannot be read.
    Broken(String),
    /// It does not exist.
    No,
}

/// Result of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Found {
    /// As required.
    Ok,
    /// The pod is not cached because of this step.
    No,
    /// Not as expected, but without consequences for this pod; or unknown.
    Unclear,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    /// What was checked.
    pub step: &'static str,
    pub found: Found,
    /// Name of the reason, if any.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// What it means and what to do.
    pub message: String,
}

/// The whole explanation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// Name of the pod.
    pub pod: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Whether an engine in the pod uses the cache. `None` if its sidecar did not answer.
    pub attached: Option<bool>,
    /// The steps, up to the one that failed.
    pub steps: Vec<Step>,
}

/// A step without a reason. Its name is in the table of `explain`.
fn found(found: Found, message: impl Into<String>) -> Step {
    Step {
        step: "",
        found,
        reason: String::new(),
        message: message.into(),
    }
}

fn ok(message: impl Into<String>) -> Step {
    found(Found::Ok, message)
}

fn no(message: impl Into<String>) -> Step {
    found(Found::No, message)
}

fn unclear(message: impl Into<String>) -> Step {
    found(Found::Unclear, message)
}

fn because(reason: impl Into<String>, step: Step) -> Step {
    let reason = reason.into();
    Step { reason, ..step }
}

/// Checks one step. `None` if it does not apply.
type Check = fn(&Evidence) -> Option<Step>;

/// Checks one step after the other until one fails.
pub fn explain(evidence: &Evidence) -> Explained {
    let text = |pointer: &str| {
        let found = evidence.pod.pointer(pointer).and_then(Value::as_str);
        found.unwrap_or_default().to_owned()
    };
    let mut steps = Vec::new();
    let checks: [(_, Check); 8] = [
        ("label", label),
        ("pool", pool),
        ("accepted", accepted),
        ("webhook", webhook),
        ("injection", injection),
        ("container", container),
        (ANSWER, answer),
        (ATTACHED, attached),
    ];
    for (name, check) in checks {
        let Some(step) = check(evidence) else {
            continue;
        };
        let ends = step.found == Found::No;
        steps.push(Step { step: name, ..step });
        if ends {
            break;
        }
    }
    let last = steps.last();
    Explained {
        pod: text("/metadata/name"),
        namespace: text("/metadata/namespace"),
        attached: match (&evidence.sidecar, last) {
            (Some(Err(_)), Some(last)) if last.step == ANSWER => None,
            (_, last) => Some(last.is_some_and(|s| s.step == ATTACHED && s.found == Found::Ok)),
        },
        steps,
    }
}

const ANSWER: &str = "sidecar";
const ATTACHED: &str = "attached";

fn slim(evidence: &Evidence) -> Option<Pod> {
    Pod::read(evidence.pod.clone())
}

/// The result for an invalid pool: a pod that has its sidecar does not depend on it.
fn without_valid_pool(evidence: &Evidence) -> Found {
    match slim(evidence).is_some_and(|p| p.sidecar.is_some()) {
        true => Found::Unclear,
        false => Found::No,
    }
}

fn label(evidence: &Evidence) -> Option<Step> {
    Some(match requested_pool(&evidence.pod) {
        Some(name) => ok(format!("the pod requests pool {name}")),
        None => no(
            "the pod has no label kvcachepool.io/pool; add it to the pod template of its workload",
        ),
    })
}

fn pool(evidence: &Evidence) -> Option<Step> {
    let name = requested_pool(&evidence.pod)?;
    Some(match evidence.pool.as_ref()? {
        PoolFound::Yes(_) => ok(format!("pool {name} exists")),
        PoolFound::Broken(error) => because(
            "Malformed",
            found(
                without_valid_pool(evidence),
                format!("pool {name} cannot be read: {error}"),
            ),
        ),
        PoolFound::No => because(
            "PoolNotFound",
            found(
                without_valid_pool(evidence),
                format!(
                    "there is no KVCachePool {name} in the pod's namespace; create it, then create the pod again"
                ),
            ),
        ),
    })
}

fn readable(evidence: &Evidence) -> Option<&KVCachePool> {
    match evidence.pool.as_ref()? {
        PoolFound::Yes(pool) => Some(pool),
        PoolFound::Broken(_) | PoolFound::No => None,
    }
}

fn accepted(evidence: &Evidence) -> Option<Step> {
    of_condition(evidence, ACCEPTED)
}

fn webhook(evidence: &Evidence) -> Option<Step> {
    of_condition(evidence, INJECTION_READY)
}

/// The current state of a condition only hints at its state when the pod was created, so it never ends the explanation.
fn of_condition(evidence: &Evidence, type_: &str) -> Option<Step> {
    let pool = readable(evidence)?;
    let conditions = pool
        .status
        .as_ref()
        .map(|s| &*s.conditions)
        .unwrap_or_default();
    Some(match condition(conditions, type_) {
        Some(c) if c.status == "True" => ok(format!("{type_} is True")),
        Some(c) => because(
            &c.reason,
            unclear(format!("{type_} is {}: {}", c.status, c.message)),
        ),
        None => unclear(format!(
            "the pool has no condition {type_}: check that an operator is running"
        )),
    })
}

fn injection(evidence: &Evidence) -> Option<Step> {
    let has_sidecar = slim(evidence).is_some_and(|p| p.sidecar.is_some());
    Some(match Report::of(&evidence.pod) {
        Some(report) if has_sidecar && has_shortfall(&report) => because(
            report.reason,
            unclear(format!("the pod has a sidecar, but {}", report.message)),
        ),
        _ if has_sidecar => ok("the pod has a sidecar"),
        Some(report) if report.result == Verdict::Refused => because(
            report.reason,
            no(format!("the pod was not injected: {}", report.message)),
        ),
        Some(_) => no(
            "the annotation kvcachepool.io/injection says Injected, but the pod has no sidecar: it was changed afterwards, or is a copy. Create it again",
        ),
        None => missed(evidence),
    })
}

/// Whether the injected pod has a shortfall.
fn has_shortfall(report: &Report) -> bool {
    report.result == Verdict::Injected && !report.reason.is_empty()
}

fn requests_by_annotation(evidence: &Evidence) -> bool {
    let labels = evidence.pod.pointer("/metadata/labels");
    labels.and_then(|l| l.get(names::POOL)).is_none()
}

fn missed(evidence: &Evidence) -> Step {
    let created = slim(evidence).map(|p| p.created);
    let pool = readable(evidence).and_then(|p| p.meta().creation_timestamp.as_ref().map(|t| t.0));
    match (created, pool) {
        _ if requests_by_annotation(evidence) => because(
            "Missed",
            no(
                "the webhook was not called when the pod was created. The pod requests the pool by annotation, and the operator counts, reports and evicts only pods with the label. Create the pod again",
            ),
        ),
        (Some(pod), Some(pool)) if pod < pool => because(
            "PoolNotFound",
            no("the pod was created before its pool; create it again"),
        ),
        _ => because(
            "Missed",
            no(
                "the webhook was not called when the pod was created, or the label was added later; create the pod again",
            ),
        ),
    }
}

fn container(evidence: &Evidence) -> Option<Step> {
    let pod = slim(evidence)?;
    let sidecar = pod.sidecar.as_ref()?;
    if matches!(pod.phase, Phase::Succeeded | Phase::Failed) {
        return Some(no("the pod has ended"));
    }
    if let Some(fault) = pod.fault() {
        return Some(because(
            fault.reason,
            no(format!("the sidecar does not start: {}", fault.message)),
        ));
    }
    Some(match &sidecar.state {
        SidecarState::Running { since } => {
            let seconds = evidence.now.duration_since(*since).as_secs();
            ok(format!(
                "the sidecar has run for {seconds} s, {} restarts",
                sidecar.restarts
            ))
        }
        SidecarState::Unseen => {
            no("the pod is not on a node yet, or its own init containers run before the sidecar")
        }
        SidecarState::Waiting { reason, message } => because(
            &**reason,
            no(format!("the sidecar's container is waiting: {message}")),
        ),
        SidecarState::Terminated { reason } => because(
            &**reason,
            no("the sidecar has ended and was not restarted yet"),
        ),
    })
}

fn answer(evidence: &Evidence) -> Option<Step> {
    Some(match evidence.sidecar.as_ref()? {
        // A sidecar that cannot be reached ends the explanation, but not the pod's use of the cache.
        Err(why) => because(
            "Unreachable",
            no(format!(
                "the sidecar did not answer: {why}. Check `kubectl logs` of the container kvcachepool"
            )),
        ),
        Ok(status) => {
            let waits = Some(&status.memory.resize_waits).filter(|why| !why.is_empty());
            let reasons: Vec<String> = status
                .reasons
                .iter()
                .map(|r| format!("{}: {}", r.code, r.message))
                .chain(
                    waits.map(|why| format!("its memory has another size than its config: {why}")),
                )
                .collect();
            let first = status
                .reasons
                .first()
                .map(|r| r.code.clone())
                .unwrap_or_default();
            let (result, sentence) = match status.state {
                State::Ready => (Found::Ok, "the sidecar serves as configured"),
                State::Degraded => (
                    Found::Unclear,
                    "the sidecar serves, but not everything that is configured",
                ),
                State::Starting => (Found::Unclear, "the sidecar is starting"),
                State::Draining => (Found::Unclear, "the sidecar is shutting down"),
                State::Off => (Found::No, "the sidecar serves nothing"),
            };
            because(
                first,
                found(
                    result,
                    [vec![sentence.to_owned()], reasons].concat().join("; "),
                ),
            )
        }
    })
}

fn attached(evidence: &Evidence) -> Option<Step> {
    let Ok(status) = evidence.sidecar.as_ref()? else {
        return None;
    };
    let on = status
        .sessions
        .iter()
        .filter(|s| s.registered && s.connected)
        .count();
    if on > 0 {
        let counters = &status.counters;
        let hit: u64 = counters
            .hit_tokens
            .values()
            .fold(0, |a, b| a.saturating_add(*b));
        let engine = if starts_sglang(&evidence.pod) {
            "SGLang"
        } else {
            "vLLM"
        };
        let message = format!(
            "{engine} is attached with {on} sessions; {hit} of {} requested tokens came from the cache",
            counters.requested_tokens
        );
        return Some(ok(message));
    }
    if starts_sglang(&evidence.pod) {
        return Some(sglang_is_absent(evidence, !status.sessions.is_empty()));
    }
    Some(match status.sessions.iter().find(|s| !s.off.is_empty()) {
        Some(off) => because(
            &off.off,
            no(
                "vLLM has registered with the sidecar, but its connector has switched the cache off. Search vLLM's log for kvcachepool",
            ),
        ),
        None if !status.sessions.is_empty() => no(
            "vLLM has contacted the sidecar but is not registered and connected: it is loading its model, or it has ended",
        ),
        None => no(
            "no vLLM has contacted the sidecar: it is not up yet, or it does not find the connector (PYTHONPATH must contain /kvcachepool; an image with its own PYTHONPATH needs the annotation kvcachepool.io/python-path). Search vLLM's log for kvcachepool",
        ),
    })
}

/// Why an SGLang is not attached. `seen`: it has contacted the sidecar.
fn sglang_is_absent(evidence: &Evidence, seen: bool) -> Step {
    let lacking = Shortfall::SglangArgumentsMissing.name();
    let report = Report::of(&evidence.pod);
    match report.filter(|report| report.reason == lacking) {
        _ if seen => no(
            "SGLang has contacted the sidecar but is not connected: it is starting, or it has ended",
        ),
        Some(report) => because(lacking, no(report.message)),
        None => no(
            "SGLang has not contacted the sidecar: it is not up yet, its arguments do not name the storage backend kvcachepool.sglang, or it does not find that module (PYTHONPATH must contain /kvcachepool; an image with its own PYTHONPATH needs the annotation kvcachepool.io/python-path). Search SGLang's log for kvcachepool",
        ),
    }
}

impl Explained {
    /// The explanation as text.
    pub fn text(&self) -> String {
        let verdict = match self.attached {
            Some(true) => "attached",
            Some(false) => "not attached",
            None => "unknown whether attached",
        };
        let mut text = format!(
            "pod/{} in namespace {}: {verdict}\n\n",
            self.pod, self.namespace
        );
        for step in &self.steps {
            let mark = match step.found {
                Found::Ok => "ok",
                Found::No => "NO",
                Found::Unclear => "?",
            };
            let gap = if step.reason.is_empty() { "" } else { ": " };
            text.push_str(&format!(
                "  {mark:3} {:10} {}{gap}{}\n",
                step.step, step.reason, step.message
            ));
        }
        text
    }
}

#[cfg(test)]
#[path = "explain_tests.rs"]
mod tests;
