//! The connections that are open, and which of them makes room for another one.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::JoinHandle;

/// What a connection says of itself.
#[derive(Debug)]
pub struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    busy: bool,
    answers: u64,
    since: Instant,
}

impl Activity {
    /// Of a connection that was just accepted.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            busy: false,
            answers: 0,
            since: Instant::now(),
        })))
    }

    /// A request's head is there.
    pub fn begins(&self) {
        self.0.lock().busy = true;
    }

    /// The request has its answer.
    pub fn ends(&self) {
        let mut state = self.0.lock();
        state.busy = false;
        state.answers += 1;
        state.since = Instant::now();
    }

    /// `None` while a request runs; the lowest goes first: those that never asked anything, then the longest idle.
    fn rank(&self) -> Option<(bool, Instant)> {
        let state = self.0.lock();
        (!state.busy).then_some((state.answers > 0, state.since))
    }
}

/// All open connections of a port.
#[derive(Debug, Default)]
pub struct Open(Vec<(Arc<Activity>, JoinHandle<()>)>);

impl Open {
    /// Forgets those that ended; how many remain.
    pub fn sweep(&mut self) -> usize {
        self.0.retain(|(_, task)| !task.is_finished());
        self.0.len()
    }

    /// One more.
    pub fn push(&mut self, activity: Arc<Activity>, task: JoinHandle<()>) {
        self.0.push((activity, task));
    }

    /// Cuts the connection that is missed least; false when every one is within a request.
    pub fn make_room(&mut self) -> bool {
        let least = self
            .0
            .iter()
            .enumerate()
            .filter_map(|(i, (activity, _))| activity.rank().map(|rank| (rank, i)))
            .min();
        let Some((_, index)) = least else {
            return false;
        };
        self.0.swap_remove(index).1.abort();
        true
    }

    /// Waits for all of them.
    pub async fn finish(self) {
        for (_, task) in self.0 {
            let _ended = task.await;
        }
    }
}
