//! What to do next about authorities, trust and the own leaf. Pure. Times are Unix seconds.
//!
//! A new authority is stored, then trusted (its certificate joins the caBundle), then noted as trusted; only when that is `settle` ago,
//! so that every API server has seen it, do replicas sign with it. The old one stays trusted until all of its leaves have ended.
//! A Secret that was lost or restored from a backup changes nothing about that: what is trusted and not stored may have leaves in use, and what
//! is stored and not trusted has its time of trust begin anew.

use serde::{Deserialize, Serialize};

/// How long things last, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    /// An authority; a new one follows when a third of it is left.
    pub authority: u64,
    /// A leaf; a new one follows when a third of it is left.
    pub leaf: u64,
    /// From a change of the caBundle until every API server acts on it.
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

/// A certificate authority as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Authority {
    /// Certificate, PEM.
    pub certificate: String,
    /// Private key, PEM.
    pub key: String,
    /// It may sign nothing after this.
    pub ends: u64,
    /// When its certificate was seen in the caBundle.
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

/// The next thing that the leader does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Store a new authority behind the others.
    Make,
    /// Take these authorities out of the store; by certificate.
    Forget(Vec<String>),
    /// Make the caBundle consist of these certificates.
    Trust(Vec<String>),
    /// Store that the authority with this certificate is trusted as of now.
    Note(String),
    /// Store that the authority with this certificate is not trusted: somebody took it out of the caBundle, or brought an old store back.
    Doubt(String),
    /// Nothing before the next look.
    Rest,
}

/// What the leader does next. `authorities`: oldest first. `bundle`: the certificates of the caBundle.
pub fn next(authorities: &[Authority], bundle: &[String], now: u64, lifetimes: Lifetimes) -> Step {
    let due = |a: &Authority| a.ends.saturating_sub(now) <= lifetimes.authority / 3;
    // One at a time: while the newest is not in use yet, another one would not help.
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
        None => Step::Rest,
    }
}

/// Whether every leaf of other authorities has ended, because replicas have signed with one of these for longer than a leaf lasts.
fn superseded(newer: &[Authority], now: u64, lifetimes: Lifetimes) -> bool {
    newer
        .iter()
        .filter_map(|a| a.trusted_since)
        .any(|since| now >= since + 2 * lifetimes.settle + lifetimes.leaf)
}

/// The certificates that the caBundle shall have.
pub fn wanted(
    authorities: &[Authority],
    bundle: &[String],
    now: u64,
    lifetimes: Lifetimes,
) -> Vec<String> {
    let own = authorities.iter().map(|a| &a.certificate);
    // Nobody knows who signed with what is trusted and not stored: it stays until a stored authority has outlasted every leaf of it.
    let fresh = !superseded(authorities, now, lifetimes);
    let kept = bundle
        .iter()
        .filter(|c| fresh && !authorities.iter().any(|a| a.certificate == **c));
    kept.chain(own).cloned().collect()
}

/// The authorities with this one's time of trust set.
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
    /// It is worth nothing after this.
    pub ends: u64,
}

/// The authority that a replica has to sign a new leaf with now; `None` while the leaf it has will do.
pub fn sign<'a>(
    leaf: Option<&Leaf>,
    authorities: &'a [Authority],
    now: u64,
    lifetimes: Lifetimes,
) -> Option<&'a Authority> {
    let living = || authorities.iter().filter(|a| a.lives(now));
    let leaf = leaf.filter(|leaf| now < leaf.ends);
    let Some(signer) = living().rfind(|a| a.settled(now, lifetimes)) else {
        // None is known to be trusted everywhere: the leaf at hand is as good as any, else the one that was trusted first.
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

/// When a leaf ends that this authority signs now: no leaf outlives its authority.
pub fn ends(signer: &Authority, now: u64, lifetimes: Lifetimes) -> u64 {
    signer.ends.min(now.saturating_add(lifetimes.leaf))
}
