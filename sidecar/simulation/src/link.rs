//! A part's session: numbered HELLOs, the lock, what the answer says about memory, REGISTER.

use super::counts::Fault;
use super::memory::FdObject;
use super::rules::Rule;
use super::text::{BLOCK_TOKENS, CHUNK_TOKENS};
use super::world::{Conn, Link, Part, Phase, Wire, World, say};
use kvcachepool_protocol::frame::{FLAG_ERROR, FLAG_PARTIAL, Op};
use kvcachepool_protocol::message::{
    self, ErrorBody, ErrorCode, Group, Hashing, Hello, HelloReply, Memory, Register, RegisterReply,
    Role,
};
use kvcachepool_protocol::table::ROW_BYTES;
use serde_json::json;
use std::collections::VecDeque;

impl World {
    /// One step of a part's session, if there is any to take.
    pub fn link_step(&mut self, part: Part) -> bool {
        let link = self.link_of(part);
        let pid = self.pid(part);
        if self.procs[pid].off || self.now < link.at {
            return false;
        }
        match link.phase {
            Phase::Off => self.connect(part),
            Phase::Between if self.procs[pid].unmapping => false,
            Phase::Between => self.say_hello(part),
            Phase::Up if link.again => self.say_hello(part),
            Phase::Up if !link.registered && link.register_tag == 0 => self.say_register(part),
            _ => false,
        }
    }

    fn connect(&mut self, part: Part) -> bool {
        let pid = self.pid(part);
        if !self.listening() || self.procs[pid].unmapping {
            return false;
        }
        if self.procs[pid].greeting.is_some_and(|g| g != part) {
            return false;
        }
        let id = self.next_conn;
        self.next_conn += 1;
        self.conns.push(Conn {
            id,
            part,
            pid,
            accepted: false,
            client_open: true,
            server_open: true,
            lags_until: 0,
            up: VecDeque::new(),
            down: VecDeque::new(),
        });
        *self.link(part) = Link {
            conn: Some(id),
            ..Link::default()
        };
        self.say_hello(part)
    }

    fn say_hello(&mut self, part: Part) -> bool {
        let pid = self.pid(part);
        if self.procs[pid].greeting.is_some_and(|g| g != part) {
            return false;
        }
        let tag = self.tag(part);
        let mapped = self.procs[pid].region;
        let region_number = mapped.map(|at| self.memory.borrow().regions[at].geometry.region);
        let instance = &self.instances[part.instance];
        let (grants, requests) = match part.rank {
            None => (Vec::new(), instance.scheduler.held()),
            Some(rank) => (instance.workers[rank].held(region_number), Vec::new()),
        };
        let p = &mut self.procs[pid];
        let role = part.rank.map_or(Role::Scheduler, |_| Role::Worker);
        let number = &mut p.hello[usize::from(part.rank.is_some())];
        *number += 1;
        let (number, lock, incarnation) = (*number, p.lock, p.incarnation);
        p.greeting = Some(part);
        let mut fds = vec![FdObject::Pidfd(pid)];
        let mut names = vec!["pidfd".to_owned()];
        if let Some(at) = mapped {
            fds.extend([FdObject::Arena(at), FdObject::Table(at)]);
            names.extend(["arena".to_owned(), "table".to_owned()]);
        }
        say!(
            self,
            "{part:?} says HELLO {number}: lock {lock:?}, region {region_number:?}, {} slots, requests {requests:?}",
            grants.len() / 16
        );
        let hello = Hello {
            version: kvcachepool_protocol::PROTOCOL_VERSION,
            role,
            engine: "vllm".into(),
            engine_version: "0.32.0".into(),
            instance: self.instances[part.instance].name.clone(),
            incarnation: incarnation.to_vec(),
            number,
            rank: part.rank.unwrap_or(0) as u32,
            fds: names,
            lock,
            region: region_number,
            grants,
            requests,
            watches_shrinks: true,
            off: None,
        };
        let body = message::encode(&hello).unwrap();
        self.send(part, Op::Hello, tag, body, fds);
        let link = self.link(part);
        link.phase = Phase::Greeting;
        link.hello_tag = tag;
        link.again = false;
        link.registered = false;
        link.register_tag = 0;
        if part.rank.is_none() {
            self.repeat_aborts(part.instance);
        }
        true
    }

    fn say_register(&mut self, part: Part) -> bool {
        let tag = self.tag(part);
        let body = message::encode(&self.register_of(part)).unwrap();
        self.send(part, Op::Register, tag, body, Vec::new());
        self.link(part).register_tag = tag;
        true
    }

    pub fn register_of(&self, part: Part) -> Register {
        let world = self.p.world;
        let mut register = Register {
            world,
            local_world: world,
            model: String::new(),
            layout: String::new(),
            device: String::new(),
            device_uuid: String::new(),
            transfer_modes: match part.rank {
                Some(rank) if self.p.windows >> rank & 1 == 1 => {
                    vec!["engine".into(), "cuda_window".into()]
                }
                _ => vec!["engine".into()],
            },
            groups: Vec::new(),
            scheduler_block_tokens: BLOCK_TOKENS,
            chunk_tokens: CHUNK_TOKENS,
            hashing: None,
        };
        let Some(rank) = part.rank else {
            register.hashing = Some(Hashing {
                algorithm: "sha256_cbor".into(),
                root: "ab".repeat(32),
                random_root: false,
                block_tokens: BLOCK_TOKENS,
            });
            return register;
        };
        register.model = r#"{"name":"m"}"#.into();
        register.device = if self.p.gpu {
            "cuda".into()
        } else {
            "cpu".into()
        };
        let rank = rank as u32;
        let block_bytes = u64::from(self.p.section_rows) * ROW_BYTES / 4;
        let group = |kind: &str| Group {
            kind: kind.into(),
            block_tokens: BLOCK_TOKENS,
            block_bytes: if kind == "window" {
                block_bytes / 2
            } else {
                block_bytes
            },
            shards: if self.p.replicated { 1 } else { world },
            shard: if self.p.replicated { 0 } else { rank },
            writer: !self.p.replicated || rank == 0,
            window_tokens: if kind == "window" { 64 } else { 0 },
        };
        register.groups.push(group("full"));
        if self.p.window_group {
            register.groups.push(group("window"));
        }
        // Objects have a layout of their own.
        let portable = |group: &Group| {
            json!({"portable": {
                "layers": 1, "kernel_blocks": 1, "heads": 1, "tokens": 1, "state_bytes": group.block_bytes,
                "meaning": {},
            }})
        };
        let groups: Vec<_> = register.groups.iter().map(portable).collect();
        let layout = json!({"engine": "vllm", "kv_layout": "LBHNC", "parallel": {"pp": 1}, "groups": groups});
        register.layout = layout.to_string();
        register
    }

    /// A part reads one frame.
    pub fn read_answer(&mut self, part: Part, wire: Wire) {
        let link = self.link_of(part);
        if wire.frame.flags & FLAG_ERROR != 0 {
            self.read_error(part, &wire);
        } else if wire.frame.op == Op::Hello {
            if link.phase == Phase::Greeting && wire.frame.tag == link.hello_tag {
                self.read_hello(part, &wire);
            }
        } else if wire.frame.op == Op::Register {
            let reply: RegisterReply = message::decode(&wire.frame.body).unwrap();
            if wire.frame.tag == link.register_tag {
                self.link(part).registered = true;
                if part.rank.is_none() {
                    self.instances[part.instance].scheduler.ready = reply.ready;
                } else {
                    self.keeper_registered(part, &reply.transfer);
                }
            }
        } else if part.rank.is_some() {
            match wire.frame.op {
                Op::Window => self.read_window(part, &wire),
                Op::Abort => self.abort_answered(part, wire.frame.tag),
                _ => {}
            }
        } else {
            self.scheduler_reads(
                part.instance,
                wire.frame.op,
                wire.frame.flags & FLAG_PARTIAL != 0,
                wire.frame.tag,
                &wire.frame.body,
            );
        }
    }

    fn read_error(&mut self, part: Part, wire: &Wire) {
        let error: ErrorBody = message::decode(&wire.frame.body).unwrap();
        say!(
            self,
            "{part:?} is refused: {:?} {:?}: {}",
            wire.frame.op,
            error.code,
            error.message
        );
        let expected = matches!(
            error.code,
            ErrorCode::StaleHello
                | ErrorCode::NoArena
                | ErrorCode::LimitReached
                | ErrorCode::NotRegistered
                | ErrorCode::WindowUnavailable
        );
        if !expected {
            self.broke(Rule::P1, || {
                format!(
                    "{part:?}: {:?} refused: {:?}: {}",
                    wire.frame.op, error.code, error.message
                )
            });
        }
        let now = self.now;
        let link = self.link(part);
        if wire.frame.op == Op::Register && wire.frame.tag == link.register_tag {
            link.register_tag = 0;
            link.at = now + 200;
        }
        if wire.frame.op == Op::Window {
            self.read_window(part, wire);
        }
        if wire.frame.op == Op::Grant || wire.frame.op == Op::Probe {
            self.scheduler_refused(part.instance, wire.frame.tag);
        }
    }

    fn read_hello(&mut self, part: Part, wire: &Wire) {
        let reply: HelloReply = message::decode(&wire.frame.body).unwrap();
        let pid = self.pid(part);
        say!(
            self,
            "{part:?} reads HELLO's answer: {:?} {} region {:?}",
            reply.memory,
            reply.reason,
            reply.region
        );
        self.procs[pid].greeting = None;
        let now = self.now;
        let boot = reply.boot;
        match reply.memory {
            Memory::LockFirst => {
                let number = reply.lock.unwrap();
                self.memory.borrow_mut().held.push((number, pid));
                self.procs[pid].lock = Some(number);
                *self.link(part) = Link {
                    phase: Phase::Between,
                    at: 0,
                    ..self.link_of(part)
                };
            }
            Memory::Sent => {
                let arena = wire.fds.iter().find_map(|f| match f {
                    FdObject::Arena(at) => Some(*at),
                    _ => None,
                });
                // a scheduler of its own closes what it does not need
                if part.rank.is_some() && self.procs[pid].region.is_none() {
                    self.procs[pid].region = arena;
                } else if self.procs[pid].region.is_none() {
                    self.holds_nothing(pid);
                }
                self.link_up(part, boot);
            }
            Memory::Held => self.link_up(part, boot),
            Memory::Unmap => {
                self.hit(Fault::Unmapped);
                self.procs[pid].unmapping = true;
                *self.link(part) = Link {
                    phase: Phase::Between,
                    at: now + reply.retry_ms,
                    ..self.link_of(part)
                };
            }
            Memory::None => {
                if reply.reason == "ArenaHeldByEarlierBoot" {
                    self.hit(Fault::ArenaHeldByEarlierBoot);
                }
                self.link_up(part, boot);
                let again = part.rank.is_some();
                let link = self.link(part);
                link.again = again;
                link.at = now + reply.retry_ms.max(10);
            }
        }
    }

    fn link_up(&mut self, part: Part, boot: u64) {
        let link = self.link(part);
        link.phase = Phase::Up;
        link.at = 0;
        link.boot = boot;
        if part.rank.is_some() {
            self.greeted(part, boot);
        }
    }

    /// What a process maps is given up once none of its workers touches it.
    pub fn unmap_step(&mut self, pid: usize) -> bool {
        if !self.procs[pid].unmapping || !self.procs[pid].alive {
            return false;
        }
        let busy = self
            .instances
            .iter()
            .flat_map(|i| &i.workers)
            .any(|w| w.pid == pid && w.current.is_some());
        if busy {
            return false;
        }
        say!(self, "process {pid} unmaps");
        for at in 0..self.instances.len() {
            for rank in 0..self.p.world as usize {
                if self.instances[at].workers[rank].pid == pid {
                    self.fail_queue(at, rank);
                    self.keeper_ends(Part {
                        instance: at,
                        rank: Some(rank),
                    });
                }
            }
        }
        self.holds_nothing(pid);
        self.procs[pid].unmapping = false;
        true
    }
}
