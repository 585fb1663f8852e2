//! The handler: reads a body within limits, calls the decider, and answers in time. Every path answers a review.

use super::review::{Answer, Review};
use crate::metrics::Metrics;
use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::StreamExt;
use json_patch::Patch;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;
use tracing::{info, warn};

/// Path in the webhook's configuration.
pub const PATH: &str = "/inject";

/// Limits of one request. Their sum stays well below the 3 s after which the API server continues without an answer.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Largest body: a review of the largest pod that the API server stores (1.5 MiB), with room for JSON escapes.
    pub body_bytes_max: usize,
    /// Maximum bytes of all bodies together. A parsed pod and its copies take several times as much.
    pub bodies_bytes_max: usize,
    /// Longest wait for a whole body, including the wait for room.
    pub body_time_max: Duration,
    /// Longest wait for the next bytes of a body. An API server sends them at once, and a slow client occupies room.
    pub body_pause_max: Duration,
    /// Longest decision. After that the review is answered without a patch.
    pub decision_time_max: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes_max: 4 << 20,
            bodies_bytes_max: 16 << 20,
            body_time_max: Duration::from_millis(1200),
            body_pause_max: Duration::from_millis(400),
            decision_time_max: Duration::from_millis(1000),
        }
    }
}

/// The decision about a pod.
#[derive(Debug)]
pub struct Decision {
    /// `Injected`, `Unchanged`, `Refused`, `Skipped`.
    pub result: &'static str,
    /// Name of the reason; may be empty.
    pub reason: &'static str,
    pub patch: Option<Patch>,
}

impl Decision {
    /// The pod is unchanged, for a reason in the review itself.
    pub fn skipped(reason: &'static str) -> Self {
        Self {
            result: "Skipped",
            reason,
            patch: None,
        }
    }
}

/// Decides about the pod of a review.
pub trait Decide: Send + Sync + 'static {
    /// Decides about `review.object`, a pod that is being created.
    fn decide(&self, review: Review) -> impl Future<Output = Decision> + Send;
}

/// Room is reserved in steps of this many bytes.
const ROOM_STEP_BYTES: usize = 64 << 10;

const ABOUT: &str = "kvcachepool webhook: POST an AdmissionReview to /inject\n";

struct Webhook<D> {
    decide: D,
    limits: Limits,
    room: Semaphore,
    metrics: Arc<Metrics>,
}

/// The routes of the webhook's port.
pub fn router<D: Decide>(decide: D, limits: Limits, metrics: Arc<Metrics>) -> Router {
    let webhook = Webhook {
        decide,
        limits,
        room: Semaphore::new(limits.bodies_bytes_max),
        metrics,
    };
    Router::new()
        // For clients that check whether the port answers: the replica itself, people.
        .route("/", get(async || ABOUT).fallback(handle))
        .fallback(handle)
        .with_state(Arc::new(webhook))
}

/// Why a request has no readable review.
struct NoReview {
    status: StatusCode,
    reason: &'static str,
    message: String,
}

impl NoReview {
    fn too_large(limits: &Limits) -> Self {
        Self {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            reason: "TooLarge",
            message: format!("the request body exceeds {} bytes", limits.body_bytes_max),
        }
    }

    fn too_slow(what: &str, time: Duration) -> Self {
        Self {
            status: StatusCode::REQUEST_TIMEOUT,
            reason: "TooSlow",
            message: format!("{what} did not arrive within {time:?}"),
        }
    }

    fn broken_off(error: impl std::fmt::Display) -> Self {
        Self {
            status: StatusCode::BAD_REQUEST,
            reason: "BrokenOff",
            message: error.to_string(),
        }
    }
}

async fn handle<D: Decide>(State(webhook): State<Arc<Webhook<D>>>, request: Request) -> Response {
    let known = request.uri().path() == PATH;
    let (review, began, _room) = match webhook.read(request.into_body()).await {
        Ok(read) => read,
        Err(no) => {
            webhook
                .metrics
                .add("webhook_unreadable_total", &[no.reason], 1);
            warn!(
                reason = no.reason,
                detail = no.message,
                "unreadable admission review"
            );
            return (no.status, format!("{}\n", no.message)).into_response();
        }
    };
    let uid = review.uid.clone();
    let dry_run = review.dry_run;
    let decision = webhook.decision(known, review).await;
    let answer = Answer::allow(uid, decision.patch.as_ref()).and_then(|a| serde_json::to_vec(&a));
    if !dry_run {
        webhook
            .metrics
            .add("injections_total", &[decision.result, decision.reason], 1);
    }
    webhook
        .metrics
        .observe("injection_seconds", &[], began.elapsed());
    match answer {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(e) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{e}\n")).into_response(),
    }
}

impl<D: Decide> Webhook<D> {
    /// A review, the time of its last byte, and its reserved room, which is held until the answer.
    async fn read(&self, body: Body) -> Result<(Review, Instant, SemaphorePermit<'_>), NoReview> {
        let limits = &self.limits;
        let announced = HttpBody::size_hint(&body).exact();
        if announced.is_some_and(|bytes| bytes > limits.body_bytes_max as u64) {
            return Err(NoReview::too_large(limits));
        }
        let (body, room) = timeout(limits.body_time_max, self.receive(body))
            .await
            .unwrap_or_else(|_| {
                Err(NoReview::too_slow("the request body", limits.body_time_max))
            })?;
        let began = Instant::now();
        let review = Review::read(&body).map_err(|e| NoReview {
            status: StatusCode::BAD_REQUEST,
            reason: e.name(),
            message: format!("{e}; POST an AdmissionReview of admission.k8s.io/v1 to {PATH}"),
        })?;
        Ok((review, began, room))
    }

    /// Reads the bytes of a body. Room is reserved for received bytes, not for announced ones, which cost a client nothing. Bodies that
    /// wait for each other's room end with their timeout.
    async fn receive(&self, body: Body) -> Result<(Vec<u8>, SemaphorePermit<'_>), NoReview> {
        let limits = &self.limits;
        let mut chunks = body.into_data_stream();
        let mut bytes = Vec::new();
        let mut room = self.take(0).await?;
        loop {
            let chunk = timeout(limits.body_pause_max, chunks.next()).await;
            let slow =
                |_| NoReview::too_slow("the next part of the request body", limits.body_pause_max);
            let Some(chunk) = chunk.map_err(slow)? else {
                return Ok((bytes, room));
            };
            let chunk = chunk.map_err(NoReview::broken_off)?;
            let whole = bytes.len() + chunk.len();
            if whole > limits.body_bytes_max {
                return Err(NoReview::too_large(limits));
            }
            let wanted = whole.next_multiple_of(ROOM_STEP_BYTES);
            let wanted = wanted.min(limits.body_bytes_max);
            if wanted > room.num_permits() {
                room.merge(self.take(wanted - room.num_permits()).await?);
            }
            bytes.extend_from_slice(&chunk);
        }
    }

    async fn take(&self, bytes: usize) -> Result<SemaphorePermit<'_>, NoReview> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = self.room.acquire_many(permits).await;
        room.map_err(NoReview::broken_off)
    }

    async fn decision(&self, known_path: bool, review: Review) -> Decision {
        if !known_path {
            return Decision::skipped("UnknownPath");
        }
        if review.operation != "CREATE" {
            return Decision::skipped("OtherOperation");
        }
        if (review.group.as_str(), review.kind.as_str()) != ("", "Pod")
            || !review.sub_resource.is_empty()
        {
            return Decision::skipped("OtherKind");
        }
        if review.object.is_none() {
            return Decision::skipped("NoObject");
        }
        let namespace = review.namespace.clone();
        let pod = pod_name(&review);
        let decide = self.decide.decide(review);
        let decision = match timeout(self.limits.decision_time_max, decide).await {
            Ok(decision) => decision,
            Err(_) => Decision::skipped("TooSlow"),
        };
        if decision.result != "Unchanged" {
            let Decision { result, reason, .. } = decision;
            info!(namespace, pod, result, reason, "pod reviewed");
        }
        decision
    }
}

fn pod_name(review: &Review) -> String {
    let metadata = review.object.as_ref().and_then(|pod| pod.get("metadata"));
    ["name", "generateName"]
        .iter()
        .filter_map(|key| metadata?.get(key)?.as_str())
        .find(|name| !name.is_empty())
        .unwrap_or_default()
        .to_owned()
}
