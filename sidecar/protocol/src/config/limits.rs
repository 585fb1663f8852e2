//! The config section `limits`.

use super::section::{HOUR_MS, KI, MI, TI, section};
use super::{ByteSize, Duration, Percent};
use crate::frame::MAX_BODY;

section! {
    /// Limits for everything that a peer can make grow.
    #[derive(Debug)]
    Limits {
        /// Open connections on the socket.
        "limits.connections" connections: u32 = 256, Count(4..=65_536), Live;
        /// Sessions: one for each role of vLLM's processes.
        "limits.sessions" sessions: u32 = 256, Count(4..=65_536), Live;
        /// Requests with an open lookup (PROBE), pin or lease. Clients of objects leave half of them to vLLM.
        "limits.requests" requests: u32 = 8_192, Count(1..=1_000_000), Live;
        /// Share of the memory tier that soft pins may hold. Beyond it the oldest pin ends.
        "limits.pinnedShare" pinned_share: Percent = Percent(50), Share(1..=90), Live;
        /// Share of the memory tier that the opaque objects of one namespace may hold. Beyond it its oldest objects are evicted.
        "limits.namespaceShare" namespace_share: Percent = Percent(100), Share(1..=100), Live;
        /// Bytes that are granted for writing and not yet committed, all workers together.
        "limits.grantedBytes" granted_bytes: ByteSize = ByteSize(2 << 30), Size(MI..=16 * TI), Live;
        /// Chunks that the index can hold. Each takes 1Ki of the slot table once used.
        "limits.indexEntries" index_entries: u32 = 65_536, Count(256..=16_777_216), Restart;
        /// Longest body of a frame.
        "limits.frameBytes" frame_bytes: ByteSize = ByteSize(MAX_BODY as u64), Size(64 * KI..=MAX_BODY as u64), Live;
        /// Replies that may wait for one slow reader. Beyond it the connection is closed.
        "limits.sendBytes" send_bytes: ByteSize = ByteSize(32 << 20), Size(MI..=1024 * MI), Live;
        /// A connection without HELLO is closed after this time.
        "limits.helloTimeout" hello_timeout: Duration = Duration::from_ms(5_000), Time(100..=HOUR_MS), Live;
        /// Events that are kept for EVENTS. A reader that is further behind learns that it lost some.
        "limits.events" events: u32 = 16_384, Count(16..=1_048_576), Restart;
        sections {
            /// Limits of each lower tier.
            tiers: TierLimits,
        }
    }
}

section! {
    /// Limits of each lower tier.
    #[derive(Debug)]
    TierLimits {
        /// Per lower tier: lookups at once.
        "limits.tierLookups" lookups: u32 = 256, Count(1..=4_096), Live;
        /// Per lower tier: chunks that are fetched at once.
        "limits.tierFetches" fetches: u32 = 32, Count(1..=64), Live;
        /// Per lower tier: bytes of those, or a quarter of grantedBytes if that is less. One chunk is always allowed.
        "limits.tierFetchBytes" fetch_bytes: ByteSize = ByteSize(256 << 20), Size(MI..=256 * MI), Live;
        /// Per lower tier: chunks that wait to be fetched.
        "limits.tierFetchQueue" fetch_queue: u32 = 16_384, Count(1..=1_000_000), Live;
        /// Per lower tier: chunks that are written at once.
        "limits.tierWrites" writes: u32 = 8, Count(1..=64), Live;
        /// Per lower tier: bytes of those, or a quarter of grantedBytes if that is less. One chunk is always allowed.
        "limits.tierWriteBytes" write_bytes: ByteSize = ByteSize(64 << 20), Size(MI..=256 * MI), Live;
        /// Per lower tier: bytes of chunks that wait to be written. Beyond it the oldest chunk is dropped. One chunk is always allowed.
        "limits.tierWriteQueueBytes" write_queue_bytes: ByteSize = ByteSize(1 << 30), Size(MI..=16 * TI), Live;
        /// A chunk that could not be written for this time is dropped.
        "limits.tierWriteQueueAge" write_queue_age: Duration = Duration::from_ms(60_000), Time(100..=24 * HOUR_MS), Live;
    }
}
