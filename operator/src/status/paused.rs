//! The breaker in the status: for webhooks, for the next leader, and as a message for people.

use super::conditions::{MESSAGE_BYTES_MAX, whole_seconds};
use crate::api::{InjectionPaused, PausedOwner};
use crate::pods::{Breaker, Cause, OWNERS_MAX, Owner, Pause, Position};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

/// Longest message of one owner in bytes. A status has up to sixteen.
const OWNER_MESSAGE_BYTES_MAX: usize = 300;
/// Longest name of a cause in characters.
const REASON_CHARS_MAX: usize = 63;

/// The breaker's state for webhooks, independent of what `InjectionReady` reports.
pub fn injection_paused(breaker: &Breaker) -> Option<InjectionPaused> {
    let mut message = sentence(breaker);
    message.truncate(message.floor_char_boundary(MESSAGE_BYTES_MAX));
    let owners = breaker.owners();
    let (first, owners) = match breaker.pool_pause() {
        Some(pause) => (pause, Vec::new()),
        None => (
            *owners.first()?,
            owners
                .iter()
                .take(OWNERS_MAX)
                .map(|p| of_owner(p))
                .collect(),
        ),
    };
    Some(InjectionPaused {
        hash: breaker.hash().to_owned(),
        since: time(first.since),
        trial: owners.is_empty() && first.position == Position::Probing,
        failed_probes: i64::from(first.failures),
        message,
        owners,
    })
}

fn of_owner(pause: &Pause) -> PausedOwner {
    let owner = pause.owner.as_ref();
    let text = |of: fn(&Owner) -> &str| owner.map(of).unwrap_or_default().to_owned();
    let mut message = cause(&pause.cause);
    message.truncate(message.floor_char_boundary(OWNER_MESSAGE_BYTES_MAX));
    PausedOwner {
        api_version: text(|o| &o.api_version),
        kind: text(|o| &o.kind),
        name: text(|o| &o.name),
        uid: text(|o| &o.uid),
        reason: pause.cause.reason.chars().take(REASON_CHARS_MAX).collect(),
        since: Some(time(pause.since)),
        trial: pause.position == Position::Probing,
        failed_probes: i64::from(pause.failures),
        message,
    }
}

fn time(at: Timestamp) -> Time {
    Time(whole_seconds(at))
}

/// A message about the paused owners, the cause and the next step; empty without a pause.
pub fn sentence(breaker: &Breaker) -> String {
    let owners = breaker.owners();
    let Some(pause) = breaker.pool_pause().or(owners.first().copied()) else {
        return String::new();
    };
    let which = match breaker.pool_pause() {
        Some(_) => "all new pods of the pool".to_owned(),
        None => which_pods(pause.owner.as_ref(), owners.len()),
    };
    let next = match pause.position {
        Position::Probing => "the next pod gets a sidecar as a probe",
        Position::Watching(_) => "one pod with a sidecar is running as a probe",
        _ => "a later pod gets a sidecar as a probe",
    };
    // The pause of a pool is restored with the sentence of the previous leader as its message.
    if pause.cause.reason.is_empty() {
        let before = &*pause.cause.message;
        let start = before.rsplit_once("; ").map_or(before, |(start, _)| start);
        return format!("{start}; {next}");
    }
    format!(
        "{which} start without a sidecar: {}; {next}",
        cause(&pause.cause)
    )
}

fn which_pods(owner: Option<&Owner>, owners: usize) -> String {
    let others = match owners {
        0 | 1 => String::new(),
        2 => " and of 1 other owner".to_owned(),
        more => format!(" and of {} other owners", more - 1),
    };
    match owner {
        Some(owner) => format!("new pods of {} {}{others}", owner.kind, owner.name),
        None => format!("new pods without an owner{others}"),
    }
}

/// A cause as text.
pub fn cause(cause: &Cause) -> String {
    // A restored cause has the text of the previous leader as its message.
    if cause.example.is_empty() && cause.message.starts_with(&*cause.reason) {
        return cause.message.to_string();
    }
    let pod = match &*cause.example {
        "" => String::new(),
        pod => format!(" (pod {pod})"),
    };
    let gap = if cause.message.is_empty() { "" } else { ": " };
    format!("{}{pod}{gap}{}", cause.reason, cause.message)
}

const _: () = assert!(OWNERS_MAX == 16, "api::status says so in the schema");
