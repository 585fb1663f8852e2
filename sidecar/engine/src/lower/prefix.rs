//! Selects the chunks of a PROBE to fetch, in prefix order, up to the first missing chunk.

use super::super::memory::Handle;
use super::super::mistake::Mistake;
use super::super::probe::Probe;
use super::super::table::Table;
use super::super::{Engine, Time};
use super::ask::{Asking, Stand, set};
use super::stats::count;

impl<T: Table> Engine<T> {
    /// The prefix ends at an undelivered chunk: cancels the wait for all chunks behind it.
    pub(super) fn cut(&mut self, id: u64, probe: &Probe, asking: &mut Asking, from: usize) {
        let mut asked = false;
        for at in from..asking.stands.len() {
            let stand = asking.stands.get(at).copied().unwrap_or_default();
            let key = probe.question.keys.get(at).copied().unwrap_or_default();
            match stand {
                Stand::Memory | Stand::Came(_) => continue,
                Stand::Asked(_) => asked = true,
                Stand::Coming(_) => {
                    let name = asking.name(key);
                    self.leave_want(&name, id, at);
                }
                Stand::Absent if at == from => continue,
                Stand::Open | Stand::There(_) | Stand::Absent | Stand::Cut => {}
            }
            set(asking, at, Stand::Cut);
        }
        let before = asking.stands.get(..from).unwrap_or_default();
        if asked
            && !before.iter().any(|s| matches!(s, Stand::Asked(_)))
            && let Some(lookup) = asking.lookup.take()
            && let Some(lookup) = self.forget_lookup(lookup)
        {
            let chunks = lookup.ats.len() as u64;
            self.lower
                .stat(lookup.tier, |s| count(&mut s.lookups, "cancelled", chunks));
        }
    }

    /// Requests a fetch of every available chunk, in prefix order, up to the first missing one. Returns true if a tier rejected a chunk, so
    /// that the next tier can be asked for it.
    pub(super) fn want_all(
        &mut self,
        now: Time,
        id: u64,
        probe: &mut Probe,
        asking: &mut Asking,
    ) -> bool {
        if !asking.fetches() {
            return false;
        }
        let worth = self.worth(now, probe, asking);
        self.choose(now, probe, asking, worth);
        for at in asking.first..asking.end {
            match asking.stands.get(at).copied().unwrap_or_default() {
                Stand::Memory | Stand::Came(_) | Stand::Coming(_) => {}
                Stand::Open | Stand::Asked(_) => {
                    if !T::makes(Mistake::FetchHoles) {
                        return false;
                    }
                }
                Stand::Absent | Stand::Cut => {
                    if !T::makes(Mistake::FetchHoles) {
                        self.cut(id, probe, asking, at);
                        return false;
                    }
                }
                Stand::There(_) if at >= worth.until && !T::makes(Mistake::FetchHoles) => {
                    if let Some(why) = worth.declined {
                        self.decline(asking, why);
                        self.cut(id, probe, asking, worth.there);
                    }
                    return false;
                }
                Stand::There(tier) => {
                    let stand = self.want(now, id, at, probe, asking, tier);
                    set(asking, at, stand);
                    asking.changed = true;
                    if stand == Stand::Cut && !T::makes(Mistake::FetchHoles) {
                        self.cut(id, probe, asking, at);
                        return false;
                    }
                    if stand == Stand::Open {
                        return asking.lookup.is_none();
                    }
                }
            }
        }
        false
    }

    /// Marks a chunk for a waiting PROBE: fetched if it is in memory, else `otherwise`.
    pub(super) fn tell_waiter(
        &mut self,
        now: Time,
        id: u64,
        at: usize,
        came: Option<(Handle, Stand)>,
        otherwise: Stand,
    ) {
        let Some(mut probe) = self.leases.take(id) else {
            return;
        };
        if let Some(mut asking) = probe.asking.take() {
            let mut stand = if came.is_some() {
                Stand::Cut
            } else {
                otherwise
            };
            if let Some((handle, from)) = came
                && self.pin_softly(handle, id)
                && let Some(pin) = probe.pins.get_mut(at)
            {
                *pin = Some(handle);
                stand = from;
                if self.must_check(handle.entry, probe.asked_ms) {
                    probe.waits.insert(handle);
                    self.leases.wait(handle, id);
                    self.start_check(now, handle.entry, true, false);
                }
            }
            set(&mut asking, at, stand);
            asking.changed = true;
            probe.asking = Some(asking);
        }
        self.leases.put_back(id, probe);
        self.go_on(now, id);
    }
}
