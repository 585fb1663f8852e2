//! Decides the next step for authorities, trust and the replica's own leaf. Pure. Times are Unix seconds.
//!
//! A new authority is stored, then trusted (its certificate is added to the caBundle), then recorded as trusted. Replicas sign with it only
//! after `settle`, when every API server has seen it. The old authority stays trusted until all of its leaves have expired. A Secret that
//! was lost or restored from a backup does not break this: a trusted authority that is not stored may have leaves in use, and a stored
//! authority that is not trusted starts its time of trust again.

use serde::{Deserialize, Serialize};

/// Lifetimes in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// Lifetime of an authority. It is replaced when a third of it is left.
    pub authority: u64,
    /// Lifetime of a leaf. It is replaced when a third of it is left.
    pub leaf: u64,
    /// Time from a change of the caBundle until every API server uses it.
    pub settle: u64,
}

impl Default for Lifetimes {
    fn default() -> Self {
        Self {
            authority: 365 * 24 * 3600,
            leaf: 72 * 3600,
            settle: 120,
        }
    }
}

/// A stored certificate authority.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Authority {
    /// Certificate, PEM.
    pub certificate: String,
    /// Private key, PEM.
    pub key: String,
    /// It must not sign after this time.
    pub ends: u64,
    /// Time when its certificate was first seen in the caBundle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trusted_since: Option<u64>,
}

impl Authority {
    fn lives(&self, now: u64) -> bool {
        now < self.ends
    }

    fn settled(&self, now: u64, lifetimes: Lifetimes) -> bool {
        self.trusted_since
            .is_some_and(|since| now >= since.saturating_add(lifetimes.settle))
    }
}

/// The next step of the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Store a new authority after the others.
    Make,
    /// Remove these authorities from the store, by certificate.
    Forget(Vec<String>),
    /// Set the caBundle to these certificates.
    Trust(Vec<String>),
    /// Record that the authority with this certificate is trusted as of now.
    Note(String),
    /// Record that the authority with this certificate is not trusted: it was removed from the caBundle, or an old store was restored.
    Doubt(String),
    /// Nothing to do before the next check.
    Wait,
}

/// The next step of the leader. `authorities` are ordered oldest first; `bundle` has the certificates of the caBundle.
pub fn next(authorities: &[Authority], bundle: &[String], now: u64, lifetimes: Lifetimes) -> Step {
    let due = |a: &Authority| a.ends.saturating_sub(now) <= lifetimes.authority / 3;
    // At most one new authority: while the newest is not in use yet, another one would not help.
    let wanting = match authorities.last() {
        None => true,
        Some(newest) => !newest.lives(now) || (due(newest) && newest.settled(now, lifetimes)),
    };
    if wanting {
        return Step::Make;
    }
    let forgotten: Vec<String> = authorities
        .iter()
        .enumerate()
        .filter(|(i, a)| !a.lives(now) || superseded(&authorities[i + 1..], now, lifetimes))
        .map(|(_, a)| a.certificate.clone())
        .collect();
    if !forgotten.is_empty() {
        return Step::Forget(forgotten);
    }
    let noted = |a: &&Authority| a.trusted_since.is_some();
    let mut noted = authorities.iter().filter(noted);
    if let Some(a) = noted.find(|a| !bundle.contains(&a.certificate)) {
        return Step::Doubt(a.certificate.clone());
    }
    let wanted = wanted(authorities, bundle, now, lifetimes);
    if wanted != bundle {
        return Step::Trust(wanted);
    }
    match authorities.iter().find(|a| a.trusted_since.is_none()) {
        Some(a) => Step::Note(a.certificate.clone()),
        None => Step::Wait,
    }
}

/// Whether every leaf of other authorities has expired, because replicas have signed with one of these for longer than a leaf lives.
fn superseded(newer: &[Authority], now: u64, lifetimes: Lifetimes) -> bool {
    newer
        .iter()
        .filter_map(|a| a.trusted_since)
        .any(|since| now >= since + 2 * lifetimes.settle + lifetimes.leaf)
}

/// The certificates that the caBundle should have.
pub fn wanted(
    authorities: &[Authority],
    bundle: &[String],
    now: u64,
    lifetimes: Lifetimes,
) -> Vec<String> {
    let own = authorities.iter().map(|a| &a.certificate);
    // A trusted authority that is not stored may have signed leaves. It stays until a stored authority has outlived all of them.
    let fresh = !superseded(authorities, now, lifetimes);
    let kept = bundle
        .iter()
        .filter(|c| fresh && !authorities.iter().any(|a| a.certificate == **c));
    kept.chain(own).cloned().collect()
}

/// The authorities, with the time of trust of this one set.
pub fn noted(
    mut authorities: Vec<Authority>,
    certificate: &str,
    since: Option<u64>,
) -> Vec<Authority> {
    let this = |a: &&mut Authority| a.certificate == certificate;
    for a in authorities.iter_mut().filter(this) {
        a.trusted_since = since;
    }
    authorities
}

/// The leaf that a replica serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// Certificate of the authority that signed it.
    pub signer: String,
    /// Expiry.
    pub ends: u64,
}

/// The authority with which a replica must sign a new leaf now. `None` if its current leaf suffices.
pub fn sign<'a>(
    leaf: Option<&Leaf>,
    authorities: &'a [Authority],
    now: u64,
    lifetimes: Lifetimes,
) -> Option<&'a Authority> {
    let living = || authorities.iter().filter(|a| a.lives(now));
    let leaf = leaf.filter(|leaf| now < leaf.ends);
    let Some(signer) = living().rfind(|a| a.settled(now, lifetimes)) else {
        // No authority is known to be trusted everywhere. Keep the current leaf, or use the authority that was trusted first.
        return match leaf {
            Some(_) => None,
            None => living()
                .find(|a| a.trusted_since.is_some())
                .or_else(|| living().next()),
        };
    };
    let Some(leaf) = leaf else {
        return Some(signer);
    };
    let due = leaf.ends - now <= lifetimes.leaf / 3 && ends(signer, now, lifetimes) > leaf.ends;
    (leaf.signer != signer.certificate || due).then_some(signer)
}

/// Expiry of a leaf that this authority signs now. A leaf never outlives its authority.
pub fn ends(signer: &Authority, now: u64, lifetimes: Lifetimes) -> u64 {
    signer.ends.min(now.saturating_add(lifetimes.leaf))
}
