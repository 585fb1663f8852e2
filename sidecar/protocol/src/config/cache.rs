//! The config section `cache`, and the settings that the connector gets from it.

use super::choice::choice;
use super::section::{HOUR_MS, field, section};
use super::{Config, Duration};
use crate::message::{Save, Settings};

section! {
    /// What is cached, and when a hit is used.
    #[derive(Debug)]
    Cache {
        /// Minimum tokens per chunk, rounded up to whole blocks of the engine. Another value is another domain: the cache starts cold.
        "cache.chunkTokens" chunk_tokens: u32 = 256, Count(1..=65_536), Restart, field("spec.cache.chunkTokens");
        /// What is stored of a request: its prompt, also the generated tokens, or nothing. None: requests only load.
        "cache.save" save: Save, Choice, Live, field("spec.cache.save");
        /// The last tokens of every prompt, and with more than 0 everything generated, are not stored.
        "cache.skipLastTokens" skip_last_tokens: u32, Count(0..=1_000_000_000), Live, field("spec.cache.skipLastTokens");
        /// Shorter hits are recomputed. Lower tiers are not used if they add fewer tokens than this to the hit in memory.
        "cache.minLoadTokens" min_load_tokens: u32 = 512, Count(0..=1_000_000_000), Live, field("spec.cache.minLoadTokens");
        /// Longest wait of a request for a load. Then vLLM computes the prompt.
        "cache.loadTimeout" load_timeout: Duration = Duration::from_ms(2_000), Time(1..=HOUR_MS), Live, field("spec.cache.loadTimeout");
        /// Auto: chunks in lower tiers are loaded if that is expected to be faster than computing them. AlwaysLoad: always.
        "cache.loadOrRecompute" load_or_recompute: LoadOrRecompute, Choice, Live;
    }
}

choice!(
    /// Whether chunks in lower tiers are fetched only if that is expected to be faster than computing them.
    LoadOrRecompute {
        /// Fetches or computes, whichever is expected to be faster once both speeds are known.
        #[default]
        Auto = "Auto",
        /// Always fetches.
        AlwaysLoad = "AlwaysLoad",
    }
);
choice!(@names Save { Prompt = "Prompt", PromptAndDecode = "PromptAndDecode", None = "None" });

/// Longest wait of vLLM's scheduler at a request's first poll.
const FIRST_POLL_WAIT_US: u32 = 1_000;
/// Longest wait per step of vLLM's scheduler, all requests together.
const STEP_WAIT_US: u32 = 2_000;
/// After this time the connector gives up on an unanswered GRANT and returns its blocks to vLLM.
const GRANT_TIMEOUT_MS: u64 = 1_000;
/// Minimum bytes that the stores of one instance may have in flight.
const STORE_BYTES_IN_FLIGHT: u64 = 256 << 20;

impl Config {
    /// The settings that HELLO's answer passes to the connector.
    pub fn settings(&self) -> Settings {
        Settings {
            chunk_tokens: self.cache.chunk_tokens,
            save: self.cache.save,
            min_load_tokens: self.cache.min_load_tokens,
            load_timeout_ms: self.cache.load_timeout.ms,
            first_poll_wait_us: FIRST_POLL_WAIT_US,
            step_wait_us: STEP_WAIT_US,
            grant_timeout_ms: GRANT_TIMEOUT_MS,
            store_bytes_in_flight: STORE_BYTES_IN_FLIGHT,
            skip_last_tokens: self.cache.skip_last_tokens,
        }
    }
}
