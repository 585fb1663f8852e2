//! REGISTER: ranks and scheduler of an instance describe themselves. Once all agree, the instance has a domain and is served.

use super::core::{Asked, Core};
use super::seam::{Host, Output};
use kvcachepool_protocol::domain::{Domain, RankPart, SchedulerPart, join, opaque};
use kvcachepool_protocol::message::{self, ErrorBody, ErrorCode, Register, RegisterReply, Role};
use kvcachepool_protocol::table::ROW_BYTES;
use std::collections::BTreeMap;
use std::sync::Arc;

/// One EngineCore: its scheduler, its ranks, and their domain once all agree.
#[derive(Debug, Default)]
pub(super) struct Instance {
    pub scheduler: Option<(u64, SchedulerPart)>,
    pub ranks: BTreeMap<u32, (u64, Arc<RankPart>)>,
    pub domain: Option<Arc<Domain>>,
}

/// A served instance.
#[derive(Debug, Clone)]
pub(super) struct Ready {
    pub domain: Arc<Domain>,
    /// Lock number of the writer, per section.
    pub writers: Vec<u32>,
}

impl<H: Host> Core<H> {
    pub(super) fn register(
        &mut self,
        asked: Asked,
        session: u64,
        body: &[u8],
        out: &mut Vec<Output>,
    ) -> Result<(), ErrorBody> {
        let register: Register = message::decode(body)?;
        let Some((role, rank, instance)) = self
            .peers
            .sessions
            .get(&session)
            .map(|s| (s.role, s.rank, s.instance.clone()))
        else {
            return Ok(());
        };
        let part = match role {
            Role::Worker => Some(self.register_rank(session, rank, &instance, &register)?),
            _ => {
                let part = SchedulerPart::check(&register)?;
                let known = self.instances.entry(instance.clone()).or_default();
                not_replaced(session, known.scheduler.as_ref().map(|(newer, _)| *newer))?;
                if known.scheduler.as_ref() != Some(&(session, part.clone())) {
                    known.scheduler = Some((session, part));
                    known.domain = None;
                }
                None
            }
        };
        self.join_parts(&instance)?;
        let domain = self.instances.get(&instance).and_then(|i| i.domain.clone());
        let (transfer, transfer_reason) = match &part {
            Some(_) => self.choose_transfer(session, &register),
            None => ("", String::new()),
        };
        let reply = RegisterReply {
            layout_id: part
                .as_ref()
                .map(|p| p.layout_id.0.to_vec())
                .unwrap_or_default(),
            model_id: domain
                .as_ref()
                .map(|d| d.model_id.0.to_vec())
                .unwrap_or_default(),
            slot_bytes: part.as_ref().map(|p| slot_bytes(p)).unwrap_or_default(),
            transfer: transfer.into(),
            transfer_reason,
            ready: self.ready(&instance).is_some(),
        };
        self.reply(asked, 0, &reply, Vec::new(), out);
        Ok(())
    }

    fn register_rank(
        &mut self,
        session: u64,
        rank: u32,
        instance: &str,
        register: &Register,
    ) -> Result<Arc<RankPart>, ErrorBody> {
        let process = self.peers.process_of_session(session);
        let maps = process.and_then(|p| p.lock.and(p.maps));
        let (Some(region), Some(engine)) = (self.region(), &self.engine) else {
            return Err(ErrorBody::later(ErrorCode::NoArena, self.no_arena.0));
        };
        if maps != Some(region) {
            return Err(ErrorBody::later(
                ErrorCode::NoArena,
                "this process does not map the current arena; send HELLO first",
            ));
        }
        let part = RankPart::check(register)?;
        if rank >= part.world {
            return Err(ErrorBody::new(
                ErrorCode::BadBody,
                format!(
                    "rank {rank} does not exist: this vLLM has {} ranks",
                    part.world
                ),
            ));
        }
        let (longest, segment) = (
            part.plan.longest_section_bytes(),
            engine.geometry().segment_bytes,
        );
        if longest > segment {
            return Err(ErrorBody::new(
                ErrorCode::SectionTooLarge,
                format!(
                    "a section of {longest} bytes does not fit into a segment of {segment} bytes: raise memory.size or lower cache.chunkTokens"
                ),
            ));
        }
        let gpu = part.gpu;
        if let Some(id) = self.peers.sessions.get(&session).map(|s| s.process)
            && let Some(p) = self.peers.processes.get_mut(&id)
        {
            // once a GPU wrote for the process, its death requires the quarantine
            p.gpu = Some(p.gpu.unwrap_or(false) || gpu);
        }
        let known = self.instances.entry(instance.to_owned()).or_default();
        not_replaced(session, known.ranks.get(&rank).map(|(newer, _)| *newer))?;
        if let Some((old, same)) = known.ranks.get(&rank)
            && *old == session
            && **same == part
        {
            return Ok(same.clone());
        }
        let part = Arc::new(part);
        known.ranks.insert(rank, (session, part.clone()));
        known.domain = None;
        Ok(part)
    }

    /// Joins an instance's parts once all have registered.
    fn join_parts(&mut self, instance: &str) -> Result<(), ErrorBody> {
        let Some(known) = self.instances.get_mut(instance) else {
            return Ok(());
        };
        let Some((_, scheduler)) = &known.scheduler else {
            return Ok(());
        };
        let all = (0..scheduler.world).all(|rank| known.ranks.contains_key(&rank));
        if known.domain.is_some() || !all {
            return Ok(());
        }
        let fidelity = self.config.fidelity;
        let ranks: Vec<&RankPart> = known.ranks.values().map(|(_, part)| &**part).collect();
        // Some ranks know the weights while others still hash them. They agree once the others have registered again.
        let provisional = ranks.iter().filter(|part| part.is_provisional()).count();
        if provisional != 0 && provisional != ranks.len() {
            return Ok(());
        }
        known.domain = Some(Arc::new(join(scheduler, &ranks, fidelity)?));
        Ok(())
    }

    /// The instance, if it is served PROBE and GRANT: all ranks and the scheduler are alive, agree, and map the live arena.
    pub(super) fn ready(&self, instance: &str) -> Option<Ready> {
        let region = self.region()?;
        let known = self.instances.get(instance)?;
        let domain = known.domain.clone()?;
        let (scheduler, _) = known.scheduler.as_ref()?;
        if !self.peers.sessions.contains_key(scheduler) {
            return None;
        }
        let mut writers = vec![0; domain.plan.sections() as usize];
        for (session, part) in known.ranks.values() {
            let process = self.peers.process_of_session(*session)?;
            let lock = process.lock.filter(|_| process.maps == Some(region))?;
            for section in part.written_sections() {
                if let Some(writer) = writers.get_mut(section as usize) {
                    *writer = lock;
                }
            }
        }
        Some(Ready { domain, writers })
    }

    /// The domain and the writers of a session, if it is served.
    pub(super) fn ready_for(&self, session: u64) -> Option<Ready> {
        let s = self.peers.sessions.get(&session)?;
        if s.role != Role::Opaque {
            return self.ready(&s.instance);
        }
        let region = self.region()?;
        let process = self.peers.process_of_session(session)?;
        let lock = process.lock.filter(|_| process.maps == Some(region))?;
        let domain = opaque()?;
        let writers = vec![lock; domain.plan.sections() as usize];
        Some(Ready { domain, writers })
    }

    /// A rank or scheduler has left: its instance is not served until it is replaced.
    pub(super) fn leave_instance(&mut self, session: u64) {
        let Some(name) = self
            .peers
            .sessions
            .get(&session)
            .map(|s| s.instance.clone())
        else {
            return;
        };
        let Some(instance) = self.instances.get_mut(&name) else {
            return;
        };
        let before = (instance.ranks.len(), instance.scheduler.is_some());
        instance.ranks.retain(|_, (s, _)| *s != session);
        if instance
            .scheduler
            .as_ref()
            .is_some_and(|(s, _)| *s == session)
        {
            instance.scheduler = None;
        }
        if before != (instance.ranks.len(), instance.scheduler.is_some()) {
            instance.domain = None;
        }
        if instance.ranks.is_empty() && instance.scheduler.is_none() {
            self.instances.remove(&name);
        }
    }
}

/// Rejects a REGISTER of a replaced session. A connector restarted in the same process may have registered already, and a frame of its
/// earlier self, still in the socket, must not replace it. Session numbers rise in order.
fn not_replaced(session: u64, registered: Option<u64>) -> Result<(), ErrorBody> {
    match registered {
        Some(newer) if newer > session => Err(ErrorBody::new(
            ErrorCode::StaleHello,
            "a newer session of this role has registered",
        )),
        _ => Ok(()),
    }
}

/// Slot bytes of a full chunk's section, per group.
fn slot_bytes(part: &RankPart) -> Vec<u64> {
    (0..part.plan.groups().len())
        .map(|group| part.plan.full_bytes(group).next_multiple_of(ROW_BYTES))
        .collect()
}
