//! One sidecar from the exchange of its image until it has run with the new one for a while.

use super::pod::{Exchange, Pod, SidecarState, same_image};
use jiff::{SignedDuration, Timestamp};

/// How long a sidecar may be away before its old image is put back.
const UP_WITHIN: SignedDuration = SignedDuration::from_secs(60);
/// How long it must run before others follow: an image that crashes runs for seconds, again and again.
const STEADY: SignedDuration = SignedDuration::from_secs(30);
/// How long the first one may then take to say that it serves.
const ANSWERS_WITHIN: SignedDuration = SignedDuration::from_secs(30);

/// A pod's sidecar before the exchange, and what was seen since.
#[derive(Debug, Clone)]
pub struct Away {
    /// Image of the sidecar.
    pub image: Box<str>,
    /// Hash of its settings; empty when unknown.
    pub hash: Box<str>,
    /// It answered that it serves nothing.
    pub serves_nothing: bool,
    restarts: u32,
    /// Start of the sidecar; `None` when it did not run.
    running: Option<Timestamp>,
    /// When the image was changed.
    at: Timestamp,
    /// When it was first seen to run with the new image.
    up: Option<Timestamp>,
}

/// What is wrong with the new sidecar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// It was not up in time.
    NotUp,
    /// It came up, and ended again.
    DidNotStay,
    /// It runs and answers nothing, or that it serves nothing.
    DoesNotServe,
}

impl Away {
    /// Before the exchange.
    pub fn of(pod: &Pod, now: Timestamp) -> Self {
        let sidecar = pod.sidecar.as_ref();
        Self {
            image: sidecar.map_or_else(Box::default, |s| s.image.clone()),
            hash: pod.hash().into(),
            serves_nothing: false,
            restarts: sidecar.map_or(0, |s| s.restarts),
            running: running_since(pod),
            at: now,
            up: None,
        }
    }

    /// An exchange of somebody else, of which nothing is known but its stamp.
    pub fn adopted(pod: &Pod, exchange: &Exchange, now: Timestamp) -> Self {
        Self {
            image: exchange.image.clone(),
            hash: exchange.hash.clone(),
            running: None,
            ..Self::of(pod, now)
        }
    }

    /// It has run with the new image for long enough.
    pub fn is_steady(&mut self, pod: &Pod, image: &str, now: Timestamp) -> bool {
        if !self.is_up(pod, image) {
            return false;
        }
        now.duration_since(*self.up.get_or_insert(now)) >= STEADY
    }

    /// Its sidecar runs with the image: by its name, or, as runtimes give one image many names, because it was started since.
    fn is_up(&self, pod: &Pod, image: &str) -> bool {
        let Some(sidecar) = pod.sidecar.as_ref().filter(|s| *s.image == *image) else {
            return false;
        };
        let started = running_since(pod);
        started.is_some() && (started != self.running || same_image(&sidecar.image_in_use, image))
    }

    /// It was started more than the once that the exchange costs, or came up and ended.
    pub fn crashed(&self, pod: &Pod) -> bool {
        let restarts = pod.sidecar.as_ref().map_or(0, |s| s.restarts);
        restarts > self.restarts.saturating_add(1)
            || (self.up.is_some() && running_since(pod).is_none())
    }

    /// Why it shall have its old image again.
    pub fn trouble(&self, pod: &Pod, proven: bool, now: Timestamp) -> Option<Trouble> {
        let since = |at: Timestamp| now.duration_since(at);
        if self.crashed(pod) {
            return Some(Trouble::DidNotStay);
        }
        match self.up {
            None if since(self.at) >= UP_WITHIN => Some(Trouble::NotUp),
            Some(up) if !proven && since(up) >= STEADY + ANSWERS_WITHIN => {
                Some(Trouble::DoesNotServe)
            }
            _ => None,
        }
    }
}

impl Trouble {
    /// What there is to say of a pod.
    pub fn sentence(self, pod: &Pod, image: &str) -> String {
        let why = match pod.fault() {
            Some(fault) if fault.message.is_empty() => format!(" ({})", fault.reason),
            Some(fault) => format!(" ({}: {})", fault.reason, fault.message),
            None => String::new(),
        };
        match self {
            Self::NotUp => format!("was not up with image {image} within 60 s{why}"),
            Self::DidNotStay => format!("did not stay up with image {image}{why}"),
            Self::DoesNotServe => {
                format!("does not answer on port 9797 that it serves, with image {image}{why}")
            }
        }
    }
}

fn running_since(pod: &Pod) -> Option<Timestamp> {
    match pod.sidecar.as_ref()?.state {
        SidecarState::Running { since } => Some(since),
        _ => None,
    }
}
