//! Shutdown in phases that every part follows: first no new requests arrive, then running ones are finished.

use std::future::Future;
use tokio::sync::watch;

/// Phase of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    Running,
    /// Not ready and not leader any more. Still answers, and asks clients to connect elsewhere.
    Leaving,
    /// Accepts no more connections and finishes the open ones.
    Stopping,
}

/// A part's handle to the phase.
#[derive(Debug, Clone)]
pub struct Shutdown(watch::Receiver<Phase>);

impl Shutdown {
    /// Creates the sender of the phase and a handle.
    pub fn new() -> (watch::Sender<Phase>, Self) {
        let (set, seen) = watch::channel(Phase::Running);
        (set, Self(seen))
    }
    pub fn phase(&self) -> Phase {
        *self.0.borrow()
    }

    /// Completes when the phase was reached, or when the sender was dropped.
    pub async fn reached(&mut self, phase: Phase) {
        let _gone = self.0.wait_for(|now| *now >= phase).await;
    }

    /// Runs `work` until it ends or the phase is reached. Returns true if `work` has ended.
    pub async fn unless(&mut self, phase: Phase, work: impl Future<Output = ()>) -> bool {
        tokio::select! {
            () = self.reached(phase) => false,
            () = work => true,
        }
    }
}
