//! Quotas, if there are any: the share of the arena that the opaque objects of one namespace may hold. Beyond it the namespace's oldest
//! objects are evicted.

use super::MemoryTier;
use super::check::say;
use super::entry::{Entry, Handle};
use super::grant::GrantContext;
use crate::name::FastMap;
use crate::table::Table;
use kvcachepool_protocol::key::{KeyKind, NamespaceId};
use kvcachepool_protocol::message as wire;
use std::collections::VecDeque;

/// Stale handles that a namespace's list may have besides as many as it has objects.
const STALE_MAX: usize = 64;

#[derive(Debug, Default)]
struct Namespace {
    bytes: u64,
    objects: usize,
    /// Oldest first. Handles of removed objects stay until they are pruned.
    order: VecDeque<Handle>,
}

/// Bytes of opaque objects, by namespace.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    of: FastMap<NamespaceId, Namespace>,
}

impl Quotas {
    /// An object was removed.
    pub fn remove(&mut self, e: &Entry) {
        let Some((namespace, bytes)) = e.quota else {
            return;
        };
        if let Some(n) = self.of.get_mut(&namespace) {
            n.bytes = n.bytes.saturating_sub(bytes);
            n.objects = n.objects.saturating_sub(1);
            if n.objects == 0 {
                self.of.remove(&namespace);
            }
        }
    }
}

impl<T: Table> MemoryTier<T> {
    /// Counts an object to its namespace.
    pub(super) fn count_to_quota(&mut self, entry: u32, namespace: NamespaceId, bytes: u64) {
        self.index[entry].quota = Some((namespace, bytes));
        let handle = self.index.handle(entry);
        let n = self.quotas.of.entry(namespace).or_default();
        n.bytes += bytes;
        n.objects += 1;
        n.order.push_back(handle);
        if n.order.len() > 2 * n.objects + STALE_MAX {
            n.order.retain(|handle| self.index.get(*handle).is_some());
        }
    }

    /// Evicts a namespace's oldest objects until it has room for the object to grant. Otherwise the result of a GRANT.
    pub(super) fn make_quota(&mut self, context: &GrantContext<'_>, tokens: u32) -> Option<u8> {
        let percent = self.config.limits.namespace_percent_max;
        if context.kind != KeyKind::Opaque || percent >= 100 {
            return None;
        }
        let (quota, bytes) = (self.share(percent), context.plan.slot_bytes(tokens));
        if bytes > quota {
            return Some(wire::GRANT_TOO_LARGE);
        }
        let over = |n: &Namespace| n.bytes + bytes > quota;
        let mut kept = Vec::new();
        while let Some(n) = self
            .quotas
            .of
            .get_mut(&context.namespace)
            .filter(|n| over(n))
        {
            let Some(oldest) = n.order.pop_front() else {
                break;
            };
            if self.index.get(oldest).is_none() {
                continue;
            }
            if self.evictable(oldest.entry) {
                self.evict(oldest.entry);
            } else {
                kept.push(oldest);
            }
        }
        let n = self.quotas.of.get_mut(&context.namespace)?;
        for handle in kept.into_iter().rev() {
            n.order.push_front(handle);
        }
        over(n).then_some(wire::GRANT_QUOTA)
    }

    /// Namespaces count the objects that are there.
    pub(super) fn check_quotas(&self) -> Result<(), String> {
        let mut of: FastMap<NamespaceId, (u64, usize)> = FastMap::default();
        for (_, e) in self.index.live() {
            if let Some((namespace, bytes)) = e.quota {
                let counted = of.entry(namespace).or_default();
                *counted = (counted.0 + bytes, counted.1 + 1);
            }
        }
        let counted = self
            .quotas
            .of
            .iter()
            .map(|(id, n)| (*id, (n.bytes, n.objects)));
        let counted: FastMap<_, _> = counted.collect();
        say(counted == of, "NamespacesAreCounted", || {
            format!("{counted:?} counted, {of:?} there")
        })
    }
}
