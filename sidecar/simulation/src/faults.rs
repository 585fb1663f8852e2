//! What goes wrong, and how often.

use super::counts::Fault;
use super::world::{Part, World, say};

impl World {
    /// Perhaps something goes wrong.
    pub fn fault_step(&mut self) -> bool {
        if !self.faults_on {
            return false;
        }
        let r = self.p.rates;
        let rates = [
            r.break_worker,
            r.break_scheduler,
            r.crash,
            r.crash_at_write,
            r.container,
            r.worker_death,
            r.scheduler_death,
            r.stop_sidecar,
            r.stop_process,
            r.jump,
            r.flip,
            r.off,
            r.clear,
            r.tier,
            r.window,
            r.drop,
            r.resize,
        ];
        let mut pick = self.rng.below(1000) as u32;
        for (kind, rate) in rates.into_iter().enumerate() {
            if pick < rate {
                return self.fault(kind);
            }
            pick -= rate;
        }
        false
    }

    fn fault(&mut self, kind: usize) -> bool {
        let instance = self.rng.below(self.instances.len());
        let rank = self.rng.below(self.p.world as usize);
        match kind {
            0 => self.break_connection(
                Part {
                    instance,
                    rank: Some(rank),
                },
                Fault::WorkerConnectionBroke,
            ),
            1 => self.break_connection(
                Part {
                    instance,
                    rank: None,
                },
                Fault::SchedulerConnectionBroke,
            ),
            2 if self.side.driver.is_some() => {
                self.hit(Fault::EngineCrash);
                self.crash();
                true
            }
            3 if self.side.driver.is_some() => {
                let mut m = self.memory.borrow_mut();
                if m.writes_left.is_none() {
                    m.writes_left = Some(self.rng.below(14) as u32);
                }
                true
            }
            4 if self.side.container => {
                self.hit(Fault::ContainerDeath);
                let upgrade = self.rng.chance(self.p.rates.upgrade * 150);
                self.container_dies(upgrade);
                true
            }
            5 => {
                let pid = self.instances[instance].workers[rank].pid;
                self.die(pid, Fault::WorkerDeath)
            }
            6 => {
                let pid = self.instances[instance].scheduler.pid;
                self.die(pid, Fault::SchedulerDeath)
            }
            7 if self.side.driver.is_some() && !self.side.stopped => {
                self.hit(Fault::SidecarStopped);
                say!(self, "SIGSTOP of the sidecar");
                self.side.stopped = true;
                true
            }
            8 => {
                let part = self.any_part();
                let pid = self.pid(part);
                let p = &mut self.procs[pid];
                if !p.alive || p.stopped {
                    return false;
                }
                p.stopped = true;
                self.hit(Fault::ProcessStopped);
                say!(self, "SIGSTOP of process {pid}");
                true
            }
            9 => {
                let jump = [500, 3_000, 31_000, 70_000][self.rng.below(4)];
                self.now += jump;
                self.hit(Fault::TimeJump);
                say!(self, "{jump} ms pass");
                true
            }
            10 => self.flip(),
            11 => self.goes_off(instance, rank),
            12 if self.rng.chance(300) => self.flush(),
            12 => self.clear(),
            13 => self.tier_fault(),
            14 if self.rng.chance(300) => self.withdraw(),
            15 => self.tier_drops(),
            16 => self.resize(),
            _ => false,
        }
    }

    fn break_connection(&mut self, part: Part, fault: Fault) -> bool {
        let pid = self.pid(part);
        if !self.procs[pid].alive || self.link_of(part).conn.is_none() {
            return false;
        }
        self.hit(fault);
        say!(self, "connection of {part:?} breaks");
        let backoff = self.rng.span(0, 40);
        self.lose(part, backoff);
        true
    }

    fn die(&mut self, pid: usize, fault: Fault) -> bool {
        if !self.procs[pid].alive {
            return false;
        }
        self.hit(fault);
        self.kill(pid);
        true
    }

    /// A connector goes off: ends its copies, unmaps, closes, unlocks its byte; then it is another incarnation.
    fn goes_off(&mut self, instance: usize, rank: usize) -> bool {
        let pid = self.instances[instance].workers[rank].pid;
        let busy = self.instances[instance].workers[rank].current.is_some() || self.p.one_process;
        if !self.procs[pid].alive || busy || self.procs[pid].stopped {
            return false;
        }
        self.hit(Fault::WentOff);
        say!(self, "rank {rank} of {instance} goes off and begins anew");
        self.lose(
            Part {
                instance,
                rank: Some(rank),
            },
            5,
        );
        while let Some(job) = self.instances[instance].workers[rank].inbox.pop_front() {
            self.instances[instance].workers[rank].queue.push_back(job);
        }
        self.fail_queue(instance, rank);
        self.keeper_ends(Part {
            instance,
            rank: Some(rank),
        });
        self.end_process(pid);
        let fresh = self.rng.bits().to_le_bytes();
        let p = &mut self.procs[pid];
        p.incarnation[..8].copy_from_slice(&fresh);
        p.hello = [0; 2];
        p.greeting = None;
        true
    }

    /// A vLLM of which one process died ends, and starts again.
    pub fn instance_step(&mut self, instance: usize) -> bool {
        let mut pids: Vec<usize> = self.instances[instance]
            .workers
            .iter()
            .map(|w| w.pid)
            .collect();
        pids.push(self.instances[instance].scheduler.pid);
        let dead = pids.iter().filter(|p| !self.procs[**p].alive).count();
        if dead == 0 {
            return false;
        }
        if dead < pids.len() {
            if let Some(pid) = pids
                .iter()
                .find(|p| self.procs[**p].alive && !self.procs[**p].stopped)
                .copied()
            {
                self.kill(pid);
                self.instances[instance].restart_at = self.now + self.rng.span(5, 2_000);
                return true;
            }
            return false;
        }
        if self.now < self.instances[instance].restart_at {
            return false;
        }
        self.start_instance(instance);
        true
    }
}
