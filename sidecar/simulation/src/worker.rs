//! A rank's copy thread: jobs, rows checked before the first write, COMMIT after the copy, generations compared after it.

use super::counts::Fault;
use super::keeper::Keeper;
use super::memory::{Bytes, Writer, rows_of};
use super::profile::Slip;
use super::rules::Rule;
use super::stages::Through;
use super::world::{Link, Part, Phase, World, say};
use kvcachepool_engine::table::GRANTED;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::{self, Sections};
use kvcachepool_protocol::refs::{SectionRef, pack};
use std::collections::VecDeque;

/// Store jobs that wait for HELLO's answer are dropped after this.
const DROP_MS: u64 = 1_000;
/// A dead process's device writes on for less than the quarantine.
const GHOST_MS: u64 = 29_000;

/// One section of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JobPiece {
    pub slot: u32,
    pub generation: u32,
    pub length: u32,
    pub section: u32,
    /// Stands for the bytes.
    pub hash: u64,
}

/// What a rank has to copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Job {
    pub request: u32,
    pub load: bool,
    pub region: u64,
    pub pieces: Vec<JobPiece>,
    pub since: u64,
}

/// Where the copy thread is with its job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Step {
    #[default]
    Idle,
    Taken,
    Checked,
    /// It goes through a window.
    Through,
    Writing,
    Written,
    Reading,
}

/// One rank.
#[derive(Debug, Default)]
pub struct Worker {
    pub pid: usize,
    pub rank: usize,
    pub link: Link,
    /// On the way from the scheduler.
    pub inbox: VecDeque<Job>,
    pub queue: VecDeque<Job>,
    pub current: Option<Job>,
    pub step: Step,
    /// Region that is being read.
    pub reading: Option<usize>,
    /// Nothing changed the bytes since the read began.
    pub clean: bool,
    /// The current job was ABORTed by COMMITting too early.
    pub said: bool,
    pub keeper: Keeper,
    /// Where the current job is with its window.
    pub through: Option<Through>,
}

impl Worker {
    /// Slots that it was granted and still holds, packed.
    pub fn held(&self, region: Option<u64>) -> Vec<u8> {
        let jobs = self
            .current
            .iter()
            .filter(|_| !self.said)
            .chain(&self.queue);
        let list: Vec<SectionRef> = jobs
            .filter(|j| !j.load)
            .chain(self.keeper.held())
            .filter(|j| Some(j.region) == region)
            .flat_map(|j| &j.pieces)
            .map(reference)
            .collect();
        pack(&list)
    }

    /// It has nothing to do.
    pub fn idle(&self) -> bool {
        self.current.is_none() && self.queue.is_empty() && self.inbox.is_empty()
    }
}

fn reference(p: &JobPiece) -> SectionRef {
    SectionRef::new(p.slot, p.generation, p.length, p.section)
}

impl World {
    fn worker(&mut self, instance: usize, rank: usize) -> &mut Worker {
        &mut self.instances[instance].workers[rank]
    }

    /// One step of a rank's copy thread.
    pub fn worker_step(&mut self, instance: usize, rank: usize) -> bool {
        let pid = self.instances[instance].workers[rank].pid;
        if let Some(mut job) = self.instances[instance].workers[rank].inbox.pop_front() {
            job.since = self.now;
            self.worker(instance, rank).queue.push_back(job);
            return true;
        }
        let part = Part {
            instance,
            rank: Some(rank),
        };
        if self.keeper_step(part) {
            return true;
        }
        match self.instances[instance].workers[rank].step {
            Step::Idle => self.take_job(instance, rank, pid),
            Step::Taken => self.check_rows(instance, rank, pid),
            Step::Checked => self.begin_copy(instance, rank, pid),
            Step::Through => self.through_step(part),
            Step::Writing => self.end_copy(instance, rank, pid),
            Step::Written => self.commit(instance, rank),
            Step::Reading => self.end_read(instance, rank, pid),
        }
    }

    fn take_job(&mut self, instance: usize, rank: usize, pid: usize) -> bool {
        let part = Part {
            instance,
            rank: Some(rank),
        };
        let link = self.link_of(part);
        let now = self.now;
        let up = link.phase == Phase::Up;
        let (mapped, unmapping) = (self.procs[pid].region, self.procs[pid].unmapping);
        let off = self.procs[pid].off;
        // loads go on while stores wait
        let mut at = 0;
        loop {
            let Some(job) = self.worker(instance, rank).queue.get(at).cloned() else {
                return false;
            };
            let live = mapped.map(|m| self.memory.borrow().regions[m].geometry.region);
            let usable = !off
                && !unmapping
                && live.is_some()
                && (live == Some(job.region) || self.p.slips(Slip::Regions));
            if job.load && self.p.slips(Slip::WaitSidecar) && !up {
                at += 1;
                continue;
            }
            if !usable {
                if !unmapping && live.is_some() {
                    self.hit(Fault::LoadOfOtherRegion);
                }
                self.worker(instance, rank).queue.remove(at);
                say!(
                    self,
                    "rank {rank} of {instance} fails job {} unstarted",
                    job.request
                );
                self.give_up(part, &job);
                return true;
            }
            if !job.load && !up && !self.p.slips(Slip::Take) {
                if now >= job.since + DROP_MS && !self.p.slips(Slip::Drop) {
                    self.hit(Fault::StoreJobDropped);
                    self.worker(instance, rank).queue.remove(at);
                    say!(
                        self,
                        "rank {rank} of {instance} drops store {} that waited",
                        job.request
                    );
                    self.give_up(part, &job);
                    return true;
                }
                at += 1;
                continue;
            }
            self.worker(instance, rank).queue.remove(at);
            say!(
                self,
                "rank {rank} of {instance} takes job {} (load {}) {:?}",
                job.request,
                job.load,
                job.pieces
            );
            let load = job.load;
            self.goes_through(instance, rank, &job);
            let w = self.worker(instance, rank);
            w.current = Some(job);
            w.said = false;
            if load {
                w.step = match w.through {
                    Some(_) => Step::Through,
                    None => Step::Reading,
                };
                w.reading = mapped;
                w.clean = true;
            } else {
                w.step = Step::Taken;
            }
            return true;
        }
    }

    /// A job that is begun goes through the window of the moment.
    fn goes_through(&mut self, instance: usize, rank: usize, job: &Job) {
        let w = &self.instances[instance].workers[rank];
        let (live, had) = (w.keeper.live, w.keeper.had);
        if had && live.is_none() {
            self.hit(Fault::PlainAfterWindow);
        }
        let through = live.map(|pane| Through::new(pane, job, self.panes[pane].stage_bytes));
        self.worker(instance, rank).through = through;
    }

    fn check_rows(&mut self, instance: usize, rank: usize, pid: usize) -> bool {
        let job = self.instances[instance].workers[rank]
            .current
            .clone()
            .unwrap();
        let part = Part {
            instance,
            rank: Some(rank),
        };
        if self.rng.chance(30) && self.faults_on && self.may_say(part) {
            say!(
                self,
                "rank {rank} of {instance} drops store {}",
                job.request
            );
            self.abort_slots(part, &job);
            self.end_job(instance, rank, false);
            return true;
        }
        let (Some(region), Some(lock)) = (self.procs[pid].region, self.procs[pid].lock) else {
            self.end_job(instance, rank, false);
            return true;
        };
        let mine = {
            let m = self.memory.borrow();
            let rows = &m.regions[region].rows;
            job.pieces.iter().all(|p| {
                rows.get(p.slot as usize).is_some_and(|r| {
                    r.state == GRANTED && r.owner == lock && r.generation == p.generation
                })
            })
        };
        let through = self.instances[instance].workers[rank].through.is_some();
        let unchecked = through && self.p.slips(Slip::StageUnchecked);
        if mine || unchecked || self.p.slips(Slip::NoJobCheck) {
            self.worker(instance, rank).step = Step::Checked;
            return true;
        }
        self.hit(Fault::RowLost);
        say!(
            self,
            "rank {rank} of {instance}: a slot of store {} is not its own any more",
            job.request
        );
        self.abort_slots(part, &job);
        self.end_job(instance, rank, false);
        true
    }

    fn begin_copy(&mut self, instance: usize, rank: usize, pid: usize) -> bool {
        let job = self.instances[instance].workers[rank]
            .current
            .clone()
            .unwrap();
        let part = Part {
            instance,
            rank: Some(rank),
        };
        let (Some(region), Some(lock)) = (self.procs[pid].region, self.procs[pid].lock) else {
            self.end_job(instance, rank, false);
            return true;
        };
        if self.instances[instance].workers[rank].through.is_some() {
            self.worker(instance, rank).step = Step::Through;
            return true;
        }
        if self.p.slips(Slip::EarlyCommit) && self.may_say(part) {
            self.say_sections(part, Op::Commit, &job);
            self.worker(instance, rank).said = true;
        }
        for p in &job.pieces {
            self.touched(region, p.slot, rows_of(u64::from(p.length)));
            self.memory.borrow_mut().begin_write(
                region,
                pid,
                lock,
                p.slot,
                p.generation,
                u64::from(p.length),
            );
        }
        self.collect();
        self.worker(instance, rank).step = Step::Writing;
        true
    }

    fn end_copy(&mut self, instance: usize, rank: usize, pid: usize) -> bool {
        let job = self.instances[instance].workers[rank]
            .current
            .clone()
            .unwrap();
        if let Some(region) = self.procs[pid].region {
            for p in &job.pieces {
                self.memory
                    .borrow_mut()
                    .end_write(region, pid, p.slot, Some((p.hash, p.section)));
            }
        }
        if self.instances[instance].workers[rank].said {
            self.end_job(instance, rank, true);
        } else {
            self.worker(instance, rank).step = Step::Written;
        }
        true
    }

    fn commit(&mut self, instance: usize, rank: usize) -> bool {
        let part = Part {
            instance,
            rank: Some(rank),
        };
        let job = self.instances[instance].workers[rank]
            .current
            .clone()
            .unwrap();
        let phase = self.link_of(part).phase;
        if phase == Phase::Up || (self.may_say(part) && !self.p.slips(Slip::Behind)) {
            if phase != Phase::Up {
                self.hit(Fault::SaidBehindHello);
            }
            say!(
                self,
                "rank {rank} of {instance} says COMMIT of {} ({phase:?})",
                job.request
            );
            self.say_sections(part, Op::Commit, &job);
            self.end_job(instance, rank, true);
            return true;
        }
        // without a connection it may forget the job, or name it in its next HELLO and say COMMIT behind that
        if phase == Phase::Greeting || self.now >= job.since + DROP_MS || self.rng.chance(300) {
            say!(
                self,
                "rank {rank} of {instance} forgets the written job {}",
                job.request
            );
            self.end_job(instance, rank, false);
            return true;
        }
        false
    }

    fn end_read(&mut self, instance: usize, rank: usize, pid: usize) -> bool {
        let job = self.instances[instance].workers[rank]
            .current
            .clone()
            .unwrap();
        let region = self.instances[instance].workers[rank].reading;
        let clean = self.instances[instance].workers[rank].clean;
        let mut good = false;
        if let Some(region) = region.filter(|r| self.procs[pid].region == Some(*r)) {
            let m = self.memory.borrow();
            let same = job.pieces.iter().all(|p| {
                m.regions[region]
                    .rows
                    .get(p.slot as usize)
                    .is_some_and(|r| r.generation == p.generation)
            });
            good = same || self.p.slips(Slip::NoGenCheck);
            let of_region = |p: &&JobPiece| {
                let rows = rows_of(u64::from(p.length));
                m.compare(region, p.slot, rows, p.hash, p.section) == Bytes::Wrong
            };
            let wrong = match &self.instances[instance].workers[rank].through {
                Some(through) => through.wrong,
                None => job.pieces.iter().find(of_region).copied(),
            };
            drop(m);
            if good && (!clean || wrong.is_some()) {
                self.broke(Rule::S1, || {
                    format!("rank {rank} of {instance} reports load {} good: clean {clean}, wrong {wrong:?}", job.request)
                });
            }
            if !good {
                self.hit(Fault::LoadFailedByGeneration);
            }
        }
        if good {
            self.counts.loads_good += 1;
        }
        say!(
            self,
            "rank {rank} of {instance} ends load {}: good {good}",
            job.request
        );
        self.end_job(instance, rank, good);
        true
    }

    /// Names the sections of a job. Returns the tag.
    pub(super) fn say_sections(&mut self, part: Part, op: Op, job: &Job) -> u64 {
        let refs: Vec<SectionRef> = job.pieces.iter().map(reference).collect();
        let body = message::encode(&Sections {
            region: job.region,
            refs: pack(&refs),
        })
        .unwrap();
        let tag = self.tag(part);
        self.send(part, op, tag, body, Vec::new());
        tag
    }

    /// Says that slots of a job will not be written, where that can be said; else the next HELLO does not name them.
    pub(super) fn abort_slots(&mut self, part: Part, job: &Job) {
        let phase = self.link_of(part).phase;
        if phase == Phase::Up || (self.may_say(part) && !self.p.slips(Slip::Behind)) {
            if phase != Phase::Up {
                self.hit(Fault::SaidBehindHello);
            }
            self.say_sections(part, Op::Abort, job);
        }
    }

    /// A job that was never begun ends.
    fn give_up(&mut self, part: Part, job: &Job) {
        if !job.load {
            self.abort_slots(part, job);
        }
        self.report(part.instance, job.request, part.rank.unwrap_or(0), false);
    }

    /// Every queued job fails: the memory goes.
    pub fn fail_queue(&mut self, instance: usize, rank: usize) {
        while let Some(job) = self.worker(instance, rank).queue.pop_front() {
            self.report(instance, job.request, rank, false);
        }
    }

    pub(super) fn end_job(&mut self, instance: usize, rank: usize, good: bool) {
        let w = self.worker(instance, rank);
        let job = w.current.take();
        (w.step, w.reading, w.said, w.through) = (Step::Idle, None, false, None);
        if let Some(job) = job {
            self.report(instance, job.request, rank, good);
        }
    }

    fn report(&mut self, instance: usize, request: u32, rank: usize, good: bool) {
        self.instances[instance]
            .reports
            .push_back((request, rank, good));
        if self.p.world > 1
            && self.faults_on
            && self.p.rates.double_report > 0
            && self.rng.chance(self.p.rates.double_report)
        {
            self.hit(Fault::DoubleReport);
            self.instances[instance]
                .reports
                .push_back((request, rank, good));
        }
    }

    /// Its connection broke, and took its window with it. Jobs stay: the next HELLO names what is held.
    pub fn worker_lost(&mut self, instance: usize, rank: usize) {
        self.worker(instance, rank).keeper.retire();
    }

    /// Its process died: half-written bytes stay torn, and its device may write on.
    pub fn worker_dies(&mut self, instance: usize, rank: usize) {
        let gpu = self.p.gpu;
        let until = self.now + self.rng.span(0, GHOST_MS);
        let w = &mut self.instances[instance].workers[rank];
        let (pid, writing) = (w.pid, w.step == Step::Writing);
        let load = w.current.as_ref().is_some_and(|job| job.load);
        if let Some(through) = w.through.take() {
            self.died_within(&through, load);
        }
        for pane in self.panes.iter_mut().filter(|p| p.pid == pid) {
            pane.worker_there = false;
        }
        let w = &mut self.instances[instance].workers[rank];
        *w = Worker {
            pid,
            rank,
            ..Worker::default()
        };
        let mut ghosts = 0;
        for region in &mut self.memory.borrow_mut().regions {
            if writing && gpu {
                for x in region
                    .writers
                    .iter_mut()
                    .filter(|x| x.pid == pid && x.ghost_until.is_none())
                {
                    x.ghost_until = Some(until);
                    ghosts += 1;
                }
            }
            region
                .writers
                .retain(|x: &Writer| x.pid != pid || x.ghost_until.is_some());
        }
        if ghosts > 0 {
            self.hit(Fault::LateDma);
        }
    }

    /// Devices of the dead whose time is over stop.
    pub fn end_ghosts(&mut self) {
        let now = self.now;
        for region in &mut self.memory.borrow_mut().regions {
            region
                .writers
                .retain(|w| w.ghost_until.is_none_or(|t| t > now));
        }
    }
}
