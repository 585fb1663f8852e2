//! What requests hold: their PROBEs with soft pins, and their read leases. Only the scheduler's session holds them.

use super::memory::{Handle, say};
use super::probe::Probe;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Limit on pinned answers per request: the early PROBE's, the one at the first poll, and one renewal.
const PROBES_PER_REQUEST_MAX: usize = 3;

#[derive(Debug, Clone, Default)]
struct Lease {
    probes: Vec<u64>,
    held: Vec<Handle>,
    /// Start of a load: vLLM reads what is held.
    load_began_ms: Option<u64>,
}

/// PROBEs and read leases of all requests.
#[derive(Debug, Default)]
pub(crate) struct Leases {
    /// By scheduler, then by request.
    of: BTreeMap<u64, BTreeMap<Arc<str>, Lease>>,
    /// By PROBE id, oldest first.
    probes: BTreeMap<u64, Probe>,
    next_probe: u64,
    /// PROBEs that wait for the digest check of a chunk.
    waiters: BTreeMap<Handle, Vec<u64>>,
    requests: u32,
}

impl Leases {
    /// True if the request may hold something: it does already, or fewer than `requests_max` do.
    pub fn has_room(&self, scheduler: u64, request: &str, requests_max: u32) -> bool {
        self.lease(scheduler, request).is_some() || self.requests < requests_max
    }

    /// The id of a new PROBE.
    pub fn next_probe(&mut self) -> u64 {
        self.next_probe += 1;
        self.next_probe - 1
    }

    /// Registers a PROBE under its request. Returns an older one that must end, because the request holds too many.
    pub fn keep(&mut self, id: u64, probe: Probe) -> Option<u64> {
        let of = self.of.entry(probe.question.scheduler).or_default();
        let lease = of.entry(probe.question.request.clone()).or_insert_with(|| {
            self.requests += 1;
            Lease::default()
        });
        lease.probes.push(id);
        let too_old = (lease.probes.len() > PROBES_PER_REQUEST_MAX).then(|| lease.probes[0]);
        self.probes.insert(id, probe);
        too_old
    }

    pub fn probe(&self, id: u64) -> Option<&Probe> {
        self.probes.get(&id)
    }

    pub fn probe_mut(&mut self, id: u64) -> Option<&mut Probe> {
        self.probes.get_mut(&id)
    }

    /// PROBEs with their ids, oldest first.
    pub fn probes(&self) -> impl Iterator<Item = (u64, &Probe)> {
        self.probes.iter().map(|(id, probe)| (*id, probe))
    }

    /// Takes a PROBE out to change it together with other parts. [`Leases::put_back`] must follow.
    pub fn take(&mut self, id: u64) -> Option<Probe> {
        self.probes.remove(&id)
    }

    pub fn put_back(&mut self, id: u64, probe: Probe) {
        self.probes.insert(id, probe);
    }

    /// Removes a PROBE that holds no pins.
    pub fn remove(&mut self, id: u64) {
        let Some(probe) = self.probes.remove(&id) else {
            return;
        };
        let (scheduler, request) = (probe.question.scheduler, probe.question.request);
        if let Some(lease) = self.lease_mut(scheduler, &request) {
            lease.probes.retain(|p| *p != id);
        }
        self.forget_if_empty(scheduler, &request);
    }

    /// PROBEs of a request, oldest first.
    pub fn probes_of(&self, scheduler: u64, request: &str) -> Vec<u64> {
        let lease = self.lease(scheduler, request);
        lease.map(|l| l.probes.clone()).unwrap_or_default()
    }

    /// Unanswered PROBEs of a scheduler.
    pub fn waiting_of(&self, scheduler: u64) -> Vec<u64> {
        let waits = |p: &Probe| p.question.scheduler == scheduler && !p.answered;
        let waiting = self.probes().filter(|(_, p)| waits(p));
        waiting.map(|(id, _)| id).collect()
    }

    /// The oldest PROBE before this one that has soft pins.
    pub fn oldest_pinned(&self, before: u64) -> Option<u64> {
        let mut older = self.probes.range(..before);
        let pinned = older.find(|(_, p)| p.pins.iter().any(Option::is_some));
        pinned.map(|(id, _)| *id)
    }

    /// Adds chunks to a request's lease.
    pub fn hold(&mut self, scheduler: u64, request: &str, chunks: &[Handle]) {
        if let Some(lease) = self.lease_mut(scheduler, request) {
            lease.held.extend_from_slice(chunks);
        }
    }

    /// vLLM begins to load what a request holds.
    pub fn load_begins(&mut self, now_ms: u64, scheduler: u64, request: &str) {
        let lease = self.lease_mut(scheduler, request);
        if let Some(lease) = lease.filter(|l| !l.held.is_empty()) {
            lease.load_began_ms.get_or_insert(now_ms);
        }
    }

    /// The load of a request ended. Returns when it began.
    pub fn load_ends(&mut self, scheduler: u64, request: &str) -> Option<u64> {
        self.lease_mut(scheduler, request)?.load_began_ms.take()
    }

    /// Ends a request's lease. Returns its chunks.
    pub fn release(&mut self, scheduler: u64, request: &str) -> Vec<Handle> {
        let lease = self.lease_mut(scheduler, request);
        let held = lease.map(|l| std::mem::take(&mut l.held));
        self.forget_if_empty(scheduler, request);
        held.unwrap_or_default()
    }

    /// Requests of a scheduler that are not named.
    pub fn not_named(&self, scheduler: u64, named: &[String]) -> Vec<Arc<str>> {
        let named: BTreeSet<&str> = named.iter().map(String::as_str).collect();
        let all = self.of.get(&scheduler).into_iter().flat_map(|of| of.keys());
        let other = all.filter(|request| !named.contains(&***request));
        other.cloned().collect()
    }

    /// A PROBE waits for the check of a chunk. False if it waits for it already.
    pub fn wait(&mut self, chunk: Handle, id: u64) -> bool {
        let waiters = self.waiters.entry(chunk).or_default();
        let new = waiters.last() != Some(&id);
        if new {
            waiters.push(id);
        }
        new
    }

    /// True if a PROBE waits for the check of a chunk.
    pub fn is_awaited(&self, chunk: Handle) -> bool {
        self.waiters.contains_key(&chunk)
    }

    /// Takes out the PROBEs that wait for the check of a chunk.
    pub fn take_waiters(&mut self, chunk: Handle) -> Vec<u64> {
        self.waiters.remove(&chunk).unwrap_or_default()
    }

    /// A PROBE does not wait for the check of a chunk any more.
    pub fn forget_waiter(&mut self, chunk: Handle, id: u64) {
        if let Some(list) = self.waiters.get_mut(&chunk) {
            list.retain(|p| *p != id);
            if list.is_empty() {
                self.waiters.remove(&chunk);
            }
        }
    }

    fn lease(&self, scheduler: u64, request: &str) -> Option<&Lease> {
        self.of.get(&scheduler)?.get(request)
    }

    fn lease_mut(&mut self, scheduler: u64, request: &str) -> Option<&mut Lease> {
        self.of.get_mut(&scheduler)?.get_mut(request)
    }

    /// Forgets a request that holds nothing.
    fn forget_if_empty(&mut self, scheduler: u64, request: &str) {
        let empty = |l: &Lease| l.probes.is_empty() && l.held.is_empty();
        if self.lease(scheduler, request).is_none_or(|l| !empty(l)) {
            return;
        }
        if let Some(of) = self.of.get_mut(&scheduler) {
            of.remove(request);
            self.requests -= 1;
            if of.is_empty() {
                self.of.remove(&scheduler);
            }
        }
    }

    /// Soft pins and read leases by chunk.
    pub fn held(&self) -> (BTreeMap<Handle, u32>, BTreeMap<Handle, u32>) {
        let (mut soft, mut leased) = (BTreeMap::new(), BTreeMap::new());
        for chunk in self.probes.values().flat_map(|p| p.pins.iter().flatten()) {
            *soft.entry(*chunk).or_default() += 1;
        }
        let leases = self.of.values().flat_map(BTreeMap::values);
        for chunk in leases.flat_map(|l| &l.held) {
            *leased.entry(*chunk).or_default() += 1;
        }
        (soft, leased)
    }

    /// Requests, PROBEs and waiters name each other.
    pub fn check(&self) -> Result<(), String> {
        let requests: usize = self.of.values().map(BTreeMap::len).sum();
        say(
            requests == self.requests as usize,
            "RequestsAreCounted",
            || format!("{} counted, {requests} there", self.requests),
        )?;
        let mut listed = 0;
        for lease in self.of.values().flat_map(BTreeMap::values) {
            let holds = !lease.probes.is_empty() || !lease.held.is_empty();
            say(holds, "RequestsHoldSomething", || format!("{lease:?}"))?;
            listed += lease.probes.len();
            let known = lease.probes.iter().all(|id| self.probes.contains_key(id));
            say(known, "ProbesOfRequestsExist", || format!("{lease:?}"))?;
        }
        say(listed == self.probes.len(), "ProbesHaveRequests", || {
            format!("{listed} of {}", self.probes.len())
        })?;
        for (chunk, ids) in &self.waiters {
            let waits = |id: &u64| {
                let probe = self.probes.get(id);
                probe.is_some_and(|p| p.waits.contains(chunk))
            };
            say(ids.iter().all(waits), "WaitersWait", || {
                format!("{ids:?} for {chunk:?}")
            })?;
        }
        Ok(())
    }
}
