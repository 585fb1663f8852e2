//! The way out, in steps that every part follows: first nobody new is sent here, then what runs is finished.

use std::future::Future;
use tokio::sync::watch;

/// How far the process is on its way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Serving.
    Running,
    /// Not ready any more and no leader; answers still, and asks clients to connect elsewhere.
    Leaving,
    /// Takes no more connections and finishes those that it has.
    Stopping,
}

/// What a part holds to follow.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// A phase to set, and what follows it.
    pub fn new() -> (watch::Sender<Phase>, Self) {
        let (set, seen) = watch::channel(Phase::Running);
        (set, Self(seen))
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Ends once the phase was reached; also when nobody is left who could set it.
    pub async fn reached(&mut self, phase: Phase) {
        let _gone = self.0.wait_for(|now| *now >= phase).await;
    }

    /// Runs until done or until the phase is reached, whichever is first; true when done.
    pub async fn unless(&mut self, phase: Phase, work: impl Future<Output = ()>) -> bool {
        tokio::select! {
            () = self.reached(phase) => false,
            () = work => true,
        }
    }
}
