//! What this process knows of a lower tier, and how status says it.

use super::slow::Slow;
use kvcachepool_protocol::status::{State, Tier, TierServer};
use kvcachepool_tiers::layers::Layered;
use kvcachepool_tiers::{Kind, Server, TierError, Usage};

#[derive(Default)]
pub struct TierState {
    /// `None` until the tier is open.
    pub layers: Option<Layered>,
    /// Usage at the last check.
    pub usage: Option<Usage>,
    /// Why the tier is down.
    pub down: Option<String>,
    /// Why a clear could not remove the tier's objects.
    pub uncleared: Option<String>,
    /// Why the tier keeps its previous configuration.
    pub unchanged: Option<TierError>,
    pub slow: Slow,
}

impl TierState {
    /// Completes the core's status of the tier. `objects` says which objects could not be used.
    pub fn fill(&self, kind: Kind, objects: Vec<String>, tier: &mut Tier) {
        let why = self.down.as_ref().or(self.uncleared.as_ref());
        tier.message = why.cloned().unwrap_or_default();
        if tier.state == State::Ready {
            match self.trouble(kind) {
                Some(e) => {
                    tier.state = State::Degraded;
                    tier.reason = e.cause.name().into();
                    tier.message = e.detail;
                }
                None => {
                    let info = self.layers.as_ref().map(|layers| layers.tier.info());
                    let remark = info.and_then(|info| info.remark.clone());
                    let remarks = self.foreign_files().into_iter().chain(remark);
                    let remarks = remarks.chain(objects);
                    tier.message = remarks.collect::<Vec<_>>().join("; ");
                }
            }
        }
        let servers = self
            .layers
            .as_ref()
            .map(|layers| layers.tier.info().servers.now());
        tier.servers = servers.into_iter().flatten().map(server).collect();
        if let Some(usage) = self.usage {
            tier.used_bytes = usage.bytes;
            tier.capacity_bytes = usage.capacity_bytes;
        }
    }

    /// Why a tier that is up is degraded: its changed configuration is invalid, it takes no writes, or it is slow. `None` when it is not.
    fn trouble(&self, kind: Kind) -> Option<TierError> {
        let shut = || self.layers.as_ref()?.guarded.breaker.writes().shut();
        let unchanged = self.unchanged.clone();
        unchanged.or_else(shut).or_else(|| self.slow.why(kind))
    }

    fn foreign_files(&self) -> Option<String> {
        let counters = self.layers.as_ref()?.tier.info().counters.now();
        let mut foreign = counters.iter().filter(|(event, _)| *event == "ForeignFile");
        let (event, count) = foreign.find(|(_, count)| *count > 0)?;
        Some(format!(
            "{event}: {count} foreign files in the folder; the sidecar leaves them alone"
        ))
    }
}

fn server(known: Server) -> TierServer {
    TierServer {
        name: known.name,
        state: match (known.up, &known.trouble) {
            (true, None) => State::Ready,
            (true, Some(_)) => State::Degraded,
            (false, _) => State::Off,
        },
        message: known.trouble.unwrap_or_default(),
    }
}
