//! The flag page of a window on the sidecar's side: reads words, copies records, and answers words that are unchanged.

use kvcachepool_memory::mapping::Mapping;
use kvcachepool_memory::memfd::MemfdError;
use kvcachepool_protocol::window::{
    Header, RECORD_BYTES, Reason, State, Word, page_bytes, record_at,
};
use rustix::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// Shared with the worker, which may write anything at any time.
#[derive(Debug)]
pub struct FlagPage {
    fd: Arc<OwnedFd>,
    map: Mapping,
    stages: u32,
}

impl FlagPage {
    /// Creates a page for this many stages, all free.
    pub fn new(stages: u32, stage_bytes: u64) -> Result<Self, MemfdError> {
        let bytes = page_bytes(stages);
        let (fd, map) = Mapping::with_fd("kvcachepool-page", bytes)?;
        map.write(0, Header::new(stages, stage_bytes).as_bytes());
        Ok(Self {
            fd: Arc::new(fd),
            map,
            stages,
        })
    }

    pub fn stages(&self) -> u32 {
        self.stages
    }

    /// Descriptor to pass to the worker.
    pub fn fd(&self) -> Arc<OwnedFd> {
        self.fd.clone()
    }

    /// The state word of a stage; none if it is invalid. The record's earlier writes are visible after this.
    pub fn word(&self, stage: u32) -> Option<Word> {
        let word = self.map.word64(record_at(stage))?;
        Word::decode(word.load(Ordering::Acquire))
    }

    /// A copy of a stage's record. Concurrent and later writes to the record do not change the copy.
    pub fn record(&self, stage: u32) -> Vec<u8> {
        let mut copy = vec![0; RECORD_BYTES as usize];
        self.map.read(record_at(stage), &mut copy);
        copy
    }

    /// Hands a stage back, after all earlier writes of the sidecar. Has no effect if the word has changed since it was read.
    pub fn answer(&self, stage: u32, read: Word, state: State, reason: Reason) {
        let answer = Word {
            state,
            reason,
            sequence: read.sequence,
        };
        if let Some(word) = self.map.word64(record_at(stage)) {
            // A worker that changed the word meanwhile violated the protocol; only its own stage is affected.
            let _ = word.compare_exchange(
                read.encode(),
                answer.encode(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
        }
    }
}
