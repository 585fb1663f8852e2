//! The open connections, and the choice of the connection to close when there are too many.

use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Instant;
use tokio::task::JoinHandle;

/// The activity of a connection.
#[derive(Debug)]
pub struct Activity(Mutex<State>);

#[derive(Debug)]
struct State {
    busy: bool,
    answers: u64,
    since: Instant,
}

impl Activity {
    /// The activity of a newly accepted connection.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Mutex::new(State {
            busy: false,
            answers: 0,
            since: Instant::now(),
        })))
    }

    /// A request's head was received.
    pub fn begins(&self) {
        self.0.lock().busy = true;
    }

    /// The request was answered.
    pub fn ends(&self) {
        let mut state = self.0.lock();
        state.busy = false;
        state.answers += 1;
        state.since = Instant::now();
    }

    /// `None` while a request is in progress. The lowest rank is closed first: connections without any request, then the longest idle.
    fn rank(&self) -> Option<(bool, Instant)> {
        let state = self.0.lock();
        (!state.busy).then_some((state.answers > 0, state.since))
    }
}

#[derive(Debug, Default)]
pub struct Open(Vec<(Arc<Activity>, JoinHandle<()>)>);

impl Open {
    /// Removes ended connections. Returns the number of remaining ones.
    pub fn sweep(&mut self) -> usize {
        self.0.retain(|(_, task)| !task.is_finished());
        self.0.len()
    }

    pub fn push(&mut self, activity: Arc<Activity>, task: JoinHandle<()>) {
        self.0.push((activity, task));
    }

    /// Closes the connection with the lowest rank. Returns false if every connection has a request in progress.
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

    /// Waits for all connections.
    pub async fn finish(self) {
        for (_, task) in self.0 {
            let _ended = task.await;
        }
    }
}
