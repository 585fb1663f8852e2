//! The machine below the engine: lock file, new memory, memory that came back.

use super::memory::{FdObject, Region, Shared};
use super::rules::Rule;
use super::table::SimTable;
use kvcachepool_engine::sessions::{FdId, Host, HostError};
use kvcachepool_engine::table::{ChunkRecord, Geometry, Row};
use std::ops::Range;
use zerocopy::FromZeros;

/// The engine's questions to the machine.
#[derive(Debug)]
pub struct SimHost {
    pub memory: Shared,
    /// Accepts memory of earlier boots from a connector that returns it.
    pub takes_back: bool,
    /// Bytes to which arenas may grow.
    pub most_bytes: u64,
}

impl Host for SimHost {
    type Table = SimTable;

    fn next_lock(&mut self) -> Result<u32, HostError> {
        let mut m = self.memory.borrow_mut();
        m.next_lock += 1;
        Ok(m.next_lock - 1)
    }

    fn next_region(&mut self) -> Result<u64, HostError> {
        let mut m = self.memory.borrow_mut();
        m.next_region += 1;
        Ok(m.next_region - 1)
    }

    fn lock_held(&mut self, number: u32) -> Result<bool, HostError> {
        let m = self.memory.borrow();
        Ok(m.flock || m.held.iter().any(|(n, _)| *n == number))
    }

    fn locks_held(&mut self) -> Result<Vec<u32>, HostError> {
        let m = self.memory.borrow();
        let mut list: Vec<u32> = m.held.iter().map(|(n, _)| *n).collect();
        list.sort_unstable();
        Ok(list)
    }

    fn most_bytes(&mut self) -> u64 {
        self.most_bytes
    }

    fn create(&mut self, geometry: Geometry, capacity: u32) -> Result<SimTable, HostError> {
        let mut m = self.memory.borrow_mut();
        if !m.spend() {
            m.end_if_dead();
            return Err(HostError("the engine is dead".into()));
        }
        if let Some((region, pid)) = m.holders.first().copied() {
            m.broke(Rule::S4, || {
                format!("a new arena is made while process {pid} holds region index {region}")
            });
        }
        if m.supervisor.is_some() {
            m.broke(Rule::S4, || {
                "a new arena is made beside the supervisor's".into()
            });
        }
        let format = m.format;
        m.regions.push(Region {
            geometry,
            format,
            populated: 0,
            capacity,
            shrinks: 0,
            rows: vec![Row::default(); geometry.rows as usize],
            chunks: vec![ChunkRecord::new_zeroed(); geometry.chunks as usize],
            content: vec![0; geometry.rows as usize],
            writers: Vec::new(),
            leased: Vec::new(),
        });
        let at = m.regions.len() - 1;
        m.supervisor = Some(at);
        drop(m);
        Ok(SimTable::of(&self.memory, at))
    }

    fn grow(&mut self, _: Range<u32>) -> Result<(), HostError> {
        let mut m = self.memory.borrow_mut();
        match m.rng.chance(200) {
            true => Err(HostError("the container may not use as much memory".into())),
            false => Ok(()),
        }
    }

    fn release(&mut self, rows: Range<u32>) -> Result<(), HostError> {
        let mut m = self.memory.borrow_mut();
        if let Some(at) = m.supervisor
            && m.spend()
        {
            m.release(at, rows);
        }
        m.end_if_dead();
        Ok(())
    }

    fn adopt(&mut self, arena: FdId, table: FdId) -> Result<SimTable, HostError> {
        if !self.takes_back {
            return Err(HostError("too many boots without health".into()));
        }
        let mut m = self.memory.borrow_mut();
        let object = |id: FdId| m.fds.iter().find(|(i, _)| *i == id).map(|(_, o)| *o);
        let (Some(FdObject::Arena(a)), Some(FdObject::Table(t))) = (object(arena), object(table))
        else {
            return Err(HostError("not an arena and a table".into()));
        };
        if a != t {
            return Err(HostError("of two regions".into()));
        }
        if m.regions[a].format != m.format {
            return Err(HostError("another format".into()));
        }
        if !m.spend() {
            m.end_if_dead();
            return Err(HostError("the engine is dead".into()));
        }
        m.adopted = Some(a);
        drop(m);
        Ok(SimTable::of(&self.memory, a))
    }

    fn keep(&mut self) {
        let mut m = self.memory.borrow_mut();
        if let Some(at) = m.adopted.take()
            && m.spend()
        {
            m.supervisor = Some(at);
        }
        m.end_if_dead();
    }
}
