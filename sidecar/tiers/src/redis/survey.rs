//! Listings and sums over all servers of the tier.

use super::fault::Fault;
use super::pool::Lane;
use super::scan::{self, Place};
use super::{Now, stopped};
use crate::{Page, TierError, Usage};
use tokio::task::JoinSet;

const PAGE_MAX: usize = 4096;
/// SCAN replies per page: a page ends in bounded time, however few of the keys are ours.
const SCANS_MAX: usize = 64;

impl Now {
    /// Objects from a position on, one server after the other. Objects that exist all the time are returned. An object that is written or
    /// removed meanwhile may be missing, and when a server's table grows, one may be returned twice.
    pub(super) async fn page(self, from: Option<String>, limit: usize) -> Result<Page, TierError> {
        let mut place: Place = match from {
            Some(text) => text.parse()?,
            None => Place::of(0),
        };
        let learned = self.servers.learn().await;
        learned.map_err(|fault| self.servers.error(None, fault, None, false))?;
        let nodes = self.servers.known();
        let (mut page, limit) = (Page::default(), limit.clamp(1, PAGE_MAX));
        for _ in 0..SCANS_MAX {
            let Some(node) = nodes.get(place.server) else {
                return Ok(page);
            };
            let room = limit - page.objects.len();
            if room == 0 {
                break;
            }
            let part = async {
                let mut c = node.take(Lane::Questions).await?;
                if place.found.is_empty() {
                    page.foreign += scan::find(&mut c, &mut place, limit).await?;
                }
                let told = place.found.drain(..room.min(place.found.len()));
                let told: Vec<String> = told.collect();
                page.foreign += scan::describe(&mut c, &told, &mut page.objects).await?;
                Ok::<_, Fault>(())
            };
            let part = part.await;
            node.ended(false, part.as_ref().err());
            part.map_err(|fault| self.servers.error(Some(node), fault, None, false))?;
            if place.is_done() {
                place = Place::of(place.server + 1);
            }
        }
        page.next = (place.server < nodes.len()).then(|| place.to_string());
        Ok(page)
    }

    /// Sum of used memory and limits over all servers that answer.
    pub(super) async fn sum(self) -> Result<Usage, TierError> {
        let learned = self.servers.learn().await;
        learned.map_err(|fault| self.servers.error(None, fault, None, false))?;
        let nodes = self.servers.known();
        let mut asked = JoinSet::new();
        for node in nodes {
            asked.spawn(async move {
                let used = match node.take_to_ask().await {
                    Ok(mut c) => scan::memory(&mut c).await,
                    Err(fault) => Err(fault),
                };
                (used, node)
            });
        }
        let (mut sum, mut failed, mut bounded) = (None::<Usage>, None, true);
        while let Some(answered) = asked.join_next().await {
            let Ok((usage, node)) = answered else {
                failed = failed.or_else(|| Some(stopped()));
                continue;
            };
            node.ended(false, usage.as_ref().err());
            match usage {
                Ok(usage) => {
                    bounded &= usage.capacity_bytes > 0;
                    let sum = sum.get_or_insert_default();
                    sum.bytes += usage.bytes;
                    sum.capacity_bytes += usage.capacity_bytes;
                }
                Err(fault) => {
                    self.servers.failed(&fault);
                    let error = self.servers.error(Some(&node), fault, None, false);
                    failed = failed.or(Some(error));
                }
            }
        }
        match sum {
            Some(sum) if bounded => Ok(sum),
            // One server without a limit makes the sum unlimited.
            Some(sum) => Ok(Usage {
                capacity_bytes: 0,
                ..sum
            }),
            None => Err(failed.unwrap_or_else(stopped)),
        }
    }
}
