//! What a copy_engine asks of the state machine, and tells it, within one turn.

use super::host::SimHost;
use kvcachepool_engine::driver::Driver;
use kvcachepool_engine::mistake::{Mistake, made};
use kvcachepool_engine::sessions::{Now, WindowId};
use kvcachepool_gpu::copy_engine::Slots;
use kvcachepool_memory::mapping::Mapping;
use kvcachepool_protocol::window::{
    Direction, HEADER_BYTES, Order, RECORD_BYTES, RUNS_AT, Reason, Run, State, Word, encode,
};
use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;

/// Whose slots are whose.
pub struct Owner<'a> {
    pub driver: RefCell<Driver<SimHost>>,
    pub id: WindowId,
    pub region: u64,
    pub now: Now,
    /// As the worker sees it.
    pub page: &'a Mapping,
    /// Copies that were allowed, in order.
    pub begun: RefCell<Vec<Order>>,
    pub refused: Cell<u32>,
    pub doubted: Cell<u32>,
    /// The worker could see a copy's end before the state machine heard of it.
    pub early: Cell<bool>,
}

impl Owner<'_> {
    /// Could the worker say COMMIT of this store by now? Its runs are named by no other use of a stage.
    fn is_back(&self, order: &Order) -> bool {
        let runs: Vec<Run> = order.runs.iter().map(|(_, run)| *run).collect();
        let meant = &encode(&runs)[RUNS_AT..];
        let mut named = vec![0; meant.len()];
        let records = (self.page.length() - HEADER_BYTES) / RECORD_BYTES;
        (0..records).any(|n| {
            let at = HEADER_BYTES + n * RECORD_BYTES;
            let word = self.page.word64(at).map(|w| w.load(Ordering::Acquire));
            let word = word.and_then(Word::decode);
            word.is_some_and(|w| {
                w.sequence == order.sequence && matches!(w.state, State::Moved | State::Refused)
            }) && self.page.read(at + RUNS_AT as u64, &mut named)
                && named == meant
        })
    }
}

impl Slots for Owner<'_> {
    fn makes(&self, mistake: Mistake) -> bool {
        made(mistake)
    }

    fn begins(&self, order: &Order) -> Result<(), Reason> {
        let mut driver = self.driver.borrow_mut();
        let begins = driver.ask(self.now, |core, _, _| {
            core.window_copy_begins(self.id, self.region, order)
        });
        match begins {
            Ok(()) => self.begun.borrow_mut().push(order.clone()),
            Err(_) => self.refused.set(self.refused.get() + 1),
        }
        begins
    }

    fn ended(&self, order: &Order, _: bool) {
        if order.direction == Direction::Store && self.is_back(order) {
            self.early.set(true);
        }
        let mut driver = self.driver.borrow_mut();
        driver.ask(self.now, |core, now, out| {
            core.window_copy_ended(now, order, out)
        });
    }

    fn in_doubt(&self, _: &Order) {
        self.doubted.set(self.doubted.get() + 1);
    }
}
