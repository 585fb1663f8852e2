//! What a scheduler's connector makes of answers, refusals and a lost connection.

use super::counts::Fault;
use super::scheduler::{Answered, State};
use super::world::{World, say};
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{
    self, AbortReply, CHUNK_PENDING, CHUNK_READY, GRANT_GRANTED, GRANT_NO_ROOM, GrantReply,
    ProbeReply,
};
use kvcachepool_protocol::refs;

impl World {
    /// Its connection broke: open PROBEs and GRANTs count as unanswered.
    pub fn scheduler_lost(&mut self, instance: usize) {
        self.scheduler(instance).ready = false;
        let mut at = 0;
        while let Some(r) = self.instances[instance].scheduler.requests.get(at) {
            let (load, state, tag) = (r.load, r.state, r.tag);
            match (load, state) {
                (true, State::Asked) => self.end_request(instance, at, "connection"),
                (false, State::Asked) => {
                    self.take_back(instance, tag, Vec::new());
                    self.end_request(instance, at, "");
                }
                _ => at += 1,
            }
        }
        for back in &mut self.scheduler(instance).back {
            back.asked = back.asked.map(|_| u64::MAX);
        }
    }

    /// A question was refused by name.
    pub fn scheduler_refused(&mut self, instance: usize, tag: u64) {
        let at = self.instances[instance]
            .scheduler
            .requests
            .iter()
            .position(|r| r.tag == tag && r.state == State::Asked);
        if let Some(at) = at {
            self.end_request(instance, at, "refused");
        }
    }

    /// An answer came in.
    pub fn scheduler_reads(
        &mut self,
        instance: usize,
        op: Op,
        partial: bool,
        tag: u64,
        body: &[u8],
    ) {
        match op {
            Op::Probe => self.read_probe(instance, partial, tag, body),
            Op::Grant => self.read_grant(instance, tag, body),
            Op::Abort => {
                let _: AbortReply = message::decode(body).unwrap();
                self.scheduler(instance)
                    .back
                    .retain(|b| b.asked != Some(tag));
            }
            _ => {}
        }
    }

    /// Which of a scheduler's requests waits for the answer with this tag.
    fn asked(&mut self, instance: usize, tag: u64) -> Option<usize> {
        self.scheduler(instance)
            .requests
            .iter()
            .position(|r| r.tag == tag && r.state == State::Asked)
    }

    fn read_probe(&mut self, instance: usize, partial: bool, tag: u64, body: &[u8]) {
        let reply: ProbeReply = message::decode(body).unwrap();
        let Some(at) = self.asked(instance, tag) else {
            return;
        };
        if partial {
            self.hit(Fault::PartialAnswer);
            // pending chunks are mostly worth waiting for
            if reply.states.contains(&CHUNK_PENDING) && (!self.faults_on || self.rng.chance(800)) {
                return;
            }
        }
        // the first poll: what the engine holds is known now, and what tiers have is to be fetched
        let r = &mut self.instances[instance].scheduler.requests[at];
        if r.early && reply.states.contains(&CHUNK_PENDING) {
            r.early = false;
            self.hit(Fault::EarlyProbe);
            self.ask(instance, at);
            return;
        }
        let all = refs::unpack(&reply.refs).unwrap();
        let ready = reply.states.iter().filter(|s| **s == CHUNK_READY).count();
        let sections = all.len().checked_div(ready).unwrap_or(0);
        let r = &mut self.instances[instance].scheduler.requests[at];
        let mut given = all.chunks(sections.max(1));
        r.answered.clear();
        for (n, state) in reply.states.iter().enumerate() {
            let refs = if *state == CHUNK_READY {
                given.next()
            } else {
                None
            };
            if n < r.local {
                continue;
            }
            let Some(refs) = refs else { break };
            r.answered.push(Answered {
                piece: r.pieces[n],
                refs: refs.to_vec(),
                tier: reply.tiers[n],
            });
        }
        r.region = reply.region;
        let (id, found) = (r.id, r.answered.len());
        say!(
            self,
            "scheduler {instance} reads that {found} chunks of request {id} are ready: {:?} {} refs {:?} partial {partial}",
            reply.states,
            reply.reason,
            all.len()
        );
        if found == 0 && partial {
            return;
        }
        if found == 0 {
            self.end_request(instance, at, "absent");
        } else {
            self.instances[instance].scheduler.requests[at].state = State::Have;
        }
    }

    fn read_grant(&mut self, instance: usize, tag: u64, body: &[u8]) {
        let reply: GrantReply = message::decode(body).unwrap();
        let Some(at) = self.asked(instance, tag) else {
            return;
        };
        if reply.results.contains(&GRANT_NO_ROOM) {
            self.hit(Fault::NoRoom);
        }
        let all = refs::unpack(&reply.refs).unwrap();
        let granted = reply
            .results
            .iter()
            .filter(|s| **s == GRANT_GRANTED)
            .count();
        let sections = all.len().checked_div(granted).unwrap_or(0);
        let mut given = all.chunks(sections.max(1));
        let r = &mut self.instances[instance].scheduler.requests[at];
        r.region = reply.region;
        for (n, result) in reply.results.iter().enumerate() {
            if *result == GRANT_GRANTED
                && let Some(refs) = given.next()
            {
                r.answered.push(Answered {
                    piece: r.pieces[n],
                    refs: refs.to_vec(),
                    tier: 1,
                });
            }
        }
        let (id, none) = (r.id, r.answered.is_empty());
        say!(
            self,
            "scheduler {instance} reads GRANT's answer for {id}: {:?}",
            reply.results
        );
        if none {
            self.end_request(instance, at, "");
        } else {
            self.instances[instance].scheduler.requests[at].state = State::Have;
        }
    }
}
