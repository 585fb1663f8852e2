//! Every metric of the sidecar: the one list that the registry is built from, that `docs/reference/metrics.md` is checked against, and that tests walk.

pub use kvcachepool_metrics::Metrics;
use kvcachepool_metrics::{Metric, counter, gauge};

/// A registry with every family of the table.
pub fn registry() -> Metrics {
    Metrics::of(all())
}

/// Of the shell: sockets, processes, config.
pub const SHELL: &[Metric] = &[
    gauge(
        "build_info",
        &["version", "protocol"],
        "Always 1; the labels name the running binary.",
    ),
    gauge(
        "engine_up",
        &[],
        "1 while the engine process answers, 0 when the supervisor answers for it.",
    ),
    counter(
        "engine_starts_total",
        &[],
        "Starts of the engine process in this container, the running one included.",
    ),
    gauge(
        "engine_uptime_seconds",
        &[],
        "Seconds since the engine process started.",
    ),
    gauge("ready", &[], "1 when /readyz says yes."),
    gauge(
        "degraded",
        &["reason"],
        "1 for every named reason why the sidecar serves less than configured.",
    ),
    gauge(
        "boots_without_health",
        &[],
        "Starts since the engine was last healthy for 60 s; three of them make the next start cold.",
    ),
    counter(
        "connections_accepted_total",
        &[],
        "Connections taken in on the Unix socket.",
    ),
    counter(
        "connections_closed_total",
        &["reason"],
        "Connections that the sidecar closed, by name of the reason.",
    ),
    gauge("connections", &[], "Open connections."),
    counter(
        "accept_failures_total",
        &[],
        "accept() calls that failed, on the Unix socket or the admin port.",
    ),
    counter("frames_total", &["op"], "Frames read, by opcode."),
    counter(
        "descriptors_surplus_total",
        &[],
        "Passed file descriptors that no frame named; they were closed.",
    ),
    counter(
        "events_total",
        &["event"],
        "Named events of sessions and engine: refusals, drops, adoptions, deaths.",
    ),
    counter(
        "population_failures_total",
        &[],
        "Times that the kernel refused pages of the arena.",
    ),
    counter(
        "window_copies_total",
        &["direction", "result"],
        "Stages of windows, by direction (store, load) and by what became of them: Moved, InDoubt, or why they were refused.",
    ),
    counter(
        "window_copied_bytes_total",
        &["direction"],
        "Bytes that the sidecar moved between windows and the memory tier.",
    ),
    gauge(
        "memory_locked_bytes",
        &[],
        "Bytes of the arena that are page-locked for copies to and from GPUs.",
    ),
    gauge(
        "digests_waiting",
        &["queue"],
        "Digests that wait for a thread: urgent (somebody waits) or background.",
    ),
    counter(
        "config_reloads_total",
        &["result"],
        "Changed config files, by what became of them: applied, invalid.",
    ),
    gauge(
        "config_generation",
        &[],
        "pool.generation of the config in effect.",
    ),
    gauge(
        "config_restart_needed",
        &["key"],
        "1 for every changed key that takes effect only at the next start.",
    ),
    gauge(
        "config_unknown_keys",
        &["key"],
        "1 for every key of a managed config that this version does not know.",
    ),
    counter(
        "admin_displaced_total",
        &[],
        "Admin HTTP connections that were cut as the oldest of 64 to make room for another.",
    ),
    counter(
        "admin_refusals_total",
        &["code"],
        "ADMIN operations on the socket that were refused, by name.",
    ),
    counter(
        "admin_requests_total",
        &["path", "status"],
        "Admin HTTP requests.",
    ),
    counter(
        "admin_timeouts_total",
        &[],
        "Admin HTTP connections that were cut because they took longer than 10 s.",
    ),
];

/// Of sessions and engine.
pub const CORE: &[Metric] = &[
    counter(
        "requested_tokens_total",
        &[],
        "Prompt tokens of admitted requests that vLLM's own prefix cache did not hold; always hits plus misses.",
    ),
    counter(
        "hit_tokens_total",
        &["tier"],
        "Requested tokens that were taken from a tier.",
    ),
    counter(
        "miss_tokens_total",
        &["reason"],
        "Requested tokens that were not taken, by reason.",
    ),
    counter(
        "load_failed_tokens_total",
        &[],
        "Tokens whose load failed after admission; they stay counted under their tier.",
    ),
    counter(
        "connector_events_total",
        &["event"],
        "Named skips, drops and refusals on the vLLM side.",
    ),
    counter(
        "connector_copied_bytes_total",
        &["direction"],
        "Bytes copied by workers: store or load.",
    ),
    counter(
        "connector_copied_seconds_total",
        &["direction"],
        "Seconds that workers spent copying: store or load.",
    ),
    gauge(
        "oldest_copy_job_seconds",
        &[],
        "Age of the oldest copy job of any worker.",
    ),
    counter(
        "probes_unready_total",
        &[],
        "PROBEs answered with nothing because not all ranks were registered, or without a memory tier.",
    ),
    counter(
        "probe_chunks_total",
        &["state"],
        "Chunks in final answers to PROBE: absent or ready.",
    ),
    counter(
        "grants_total",
        &["result"],
        "Chunks in answers to GRANT, by result.",
    ),
    counter(
        "voided_grants_total",
        &[],
        "Grants that ended without all of their sections: aborts, deaths, lost jobs.",
    ),
    counter(
        "commits_ignored_total",
        &[],
        "COMMITs and ABORTs of slots that were not granted to the sender.",
    ),
    counter(
        "refused_total",
        &["code"],
        "Questions that were refused, by the name on the wire.",
    ),
    counter(
        "frames_ignored_total",
        &["reason"],
        "Frames, or parts of them, that were read and not acted on, by reason.",
    ),
    counter(
        "session_events_total",
        &["event"],
        "What sessions saw, by name: kinds of HELLO answers, deaths, hand-backs, schedulers that a new rank made say HELLO again.",
    ),
    gauge("sessions", &["role"], "Sessions of living processes."),
    gauge(
        "unshared_domains",
        &["reason"],
        "Domains whose chunks stay in this sidecar's memory because no other process can name them, by reason.",
    ),
    gauge(
        "worker_transfer",
        &["mode", "reason"],
        "Registered workers by how their bytes move (engine, cuda_window) and why not the other way, by name.",
    ),
    counter("stored_chunks_total", &[], "Chunks that became readable."),
    counter(
        "adopted_chunks_total",
        &[],
        "Chunks taken over from an earlier boot.",
    ),
    counter(
        "expired_chunks_total",
        &[],
        "Chunks that ended because their time was over.",
    ),
    counter(
        "corrupt_chunks_total",
        &[],
        "Chunks whose bytes did not match their digest; they were never served again.",
    ),
    counter(
        "evicted_chunks_total",
        &["reason"],
        "Chunks that went: to make room, or because they stayed incomplete.",
    ),
    counter(
        "evicted_bytes_total",
        &[],
        "Bytes of chunks that went to make room.",
    ),
    counter("checks_total", &[], "Digests that were compared."),
    counter(
        "soft_pins_ended_total",
        &["reason"],
        "Soft pins that ended without a lease: expired, or displaced by younger ones.",
    ),
    gauge("slots", &["state"], "Slots by state."),
    gauge("chunks", &[], "Chunks that can be read."),
    gauge("incomplete_chunks", &[], "Chunks that lack sections."),
    gauge(
        "unchecked_chunks",
        &[],
        "Chunks of an earlier boot that are not checked yet.",
    ),
    gauge("memory_capacity_bytes", &[], "Bytes of the arena."),
    gauge(
        "memory_used_bytes",
        &[],
        "Bytes of slots that are not free.",
    ),
    gauge("granted_bytes", &[], "Bytes granted and not committed."),
    gauge("leased_bytes", &[], "Bytes under read leases."),
    gauge("soft_pinned_bytes", &[], "Bytes under soft pins."),
    gauge("admin_pinned_bytes", &[], "Bytes pinned by people."),
    gauge(
        "tier_up",
        &["tier"],
        "1 while a tier below memory is asked and written to, 0 while it is down, or removes its objects for a clear.",
    ),
    gauge(
        "tier_down",
        &["tier", "reason"],
        "1 while a tier below memory is down, by the reason that status has, also before it could be opened for the first time.",
    ),
    gauge(
        "tier_degraded",
        &["tier", "reason"],
        "1 while a tier below memory serves and is not all that it should be, by the reason that status has: it is slow, nothing is written to it, or a changed config cannot be right.",
    ),
    gauge(
        "tier_breaker_open",
        &["tier", "operations"],
        "1 while a tier below memory is not read from, or not written to, because that failed several times in a row; then it is tried again.",
    ),
    gauge(
        "tier_server_up",
        &["tier", "server"],
        "Of each of several servers of a tier: 1, or 0 after it failed; what it holds is missed until it serves again.",
    ),
    counter(
        "tier_events_total",
        &["tier", "event"],
        "What happened inside a tier. With Redis as the bucket's directory: chunks that it knew (DirectoryKnew) or left to the bucket (DirectoryLeft), questions without an answer (DirectorySilent), changes of its marks that were not made (DirectoryUnchanged). S3: objects over the capacity or the age that could not be removed (RemovalRefused). Disk, since the folder was read: objects that went for others (Evicted) or whose head on the device was not theirs (CorruptObject), records that were corrupt (CorruptRecord), cut off by a crash (TornTail) or of slots that are gone (StrayRecord), container files that were missing or short (LostContainer), and names in the folder that are not the cache's (ForeignFile).",
    ),
    counter(
        "tier_lookup_chunks_total",
        &["tier", "result"],
        "Chunks that a tier below memory was asked for, by how that ended: present, absent, cancelled, or why it failed.",
    ),
    counter(
        "tier_fetch_chunks_total",
        &["tier", "result"],
        "Chunks that requests wanted from a tier below memory, by how that ended: landed, cancelled, stored (by a worker meanwhile), or why they did not come.",
    ),
    counter(
        "tier_fetched_bytes_total",
        &["tier"],
        "Bytes of chunks that landed from a tier below memory.",
    ),
    counter(
        "tier_write_chunks_total",
        &["tier", "result"],
        "Chunks that were to be written to a tier below memory, by how that ended: stored, already, or why not.",
    ),
    counter(
        "tier_written_bytes_total",
        &["tier"],
        "Bytes of chunks that were stored in a tier below memory.",
    ),
    counter(
        "tier_clears_total",
        &["tier", "result"],
        "Removals of what a tier below memory holds, for a clear, by how they ended: cleared, or why one failed; it is tried again.",
    ),
    counter(
        "tier_cleared_objects_total",
        &["tier"],
        "Objects that went by them.",
    ),
    gauge(
        "tier_expected_seconds",
        &["tier", "operation"],
        "How long a lookup of chunks, or the fetch of one, is expected to take: a moving average, a guess at the start. Requests are told it and decide by it whether to wait.",
    ),
    gauge(
        "tier_estimated_latency_seconds",
        &["tier"],
        "How long the smallest load from a tier below memory is expected to take, learned from the last ones; absent where too few were seen, or none for 30 s.",
    ),
    gauge(
        "tier_estimated_bytes_per_second",
        &["tier"],
        "How fast larger loads from a tier below memory are expected to be, latency aside; absent as the latency is.",
    ),
    gauge(
        "prefill_tokens_per_second",
        &[],
        "Prompt tokens that an engine computes in a second, as its connector saw; the slowest one's where there are several, absent where none knows yet.",
    ),
    counter(
        "load_choices_total",
        &["choice"],
        "Requests whose chunks a tier below memory has, by what was chosen: load (expected to be quicker than computing), always (cache.loadOrRecompute), unknown (nothing to go by yet: loaded), or recompute, minLoadTokens (left there, all or some). One that loads a part and leaves another counts for both.",
    ),
    counter(
        "loads_total",
        &["outcome"],
        "Loads from tiers below memory that were waited for, by what became of them: quicker or slower than computing would have been, unknown (no speed of the engine), failed (nothing came).",
    ),
    counter(
        "load_expected_seconds_total",
        &[],
        "Seconds that loads from tiers below memory were expected to take, where anything was expected.",
    ),
    counter(
        "load_took_seconds_total",
        &[],
        "Seconds that these loads took.",
    ),
    gauge(
        "tier_waiting_bytes",
        &["tier"],
        "Bytes that wait to be written to a tier, and are in memory alone until then. What was dropped (tier_write_chunks_total, QueueFull) does not wait any more.",
    ),
    counter(
        "tier_operations_total",
        &["tier", "operation", "result"],
        "Operations of a tier below memory, all attempts at one counted once: Ok, Dropped, or the name of the error.",
    ),
    counter(
        "tier_operation_seconds_total",
        &["tier", "operation"],
        "Seconds that these took, all together.",
    ),
    gauge(
        "tier_operations_running",
        &["tier", "operation"],
        "Operations of a tier below memory that have not ended.",
    ),
    counter(
        "tier_packed_bytes_total",
        &["tier", "operation", "which"],
        "Bytes that were packed for a tier below memory (put) or unpacked from it (get): raw, as memory has them, or stored.",
    ),
    counter(
        "tier_packing_seconds_total",
        &["tier", "operation"],
        "Seconds of a core that packing (put) and unpacking (get) took.",
    ),
    gauge(
        "tier_packing_error_ratio",
        &["tier"],
        "Relative error of what was packed last for a tier below memory: root of the mean square of what was lost, of that of the numbers. 0 where every bit comes back.",
    ),
    counter(
        "tier_plain_objects_total",
        &["tier", "reason"],
        "Objects that write.codec did not pack for a tier below memory, and that were written as they are: TooLarge (packing them takes more memory than there is for it), Unsuited (no numbers, not finite ones, or a form that the codec does not know), NotSmaller.",
    ),
    counter("tier_retries_total", &["tier"], "Attempts after the first."),
    counter(
        "tier_corrupt_objects_total",
        &["tier"],
        "Objects that were found corrupt in a tier below memory and removed from it.",
    ),
    counter(
        "tier_scribbled_gets_total",
        &["tier"],
        "Gets from a tier below memory whose bytes were written to in the arena before they were compared: a miss. The object is as it should be and stays; some process of the node writes to slots that are not its own.",
    ),
    gauge(
        "tier_waiting_chunks",
        &["tier", "direction"],
        "Chunks that wait to be fetched from, or written to, a tier below memory: fetch or write.",
    ),
    gauge(
        "tier_in_flight_bytes",
        &["tier", "direction"],
        "Bytes of chunks that are being fetched from, or written to, a tier below memory: fetch or write.",
    ),
    counter(
        "pacing_bytes_total",
        &["direction"],
        "Bytes that count towards pacing.readBytesPerSecond (read: from tiers below memory) and pacing.writeBytesPerSecond (write: to them, and of checks that nobody waited for), bounded or not.",
    ),
    counter(
        "pacing_waited_seconds_total",
        &["direction"],
        "Seconds that tiers and checks waited for their share of these bounds, added up.",
    ),
    gauge(
        "events_cursor",
        &[],
        "Number of the youngest event of EVENTS.",
    ),
];

/// All families.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    SHELL.iter().chain(CORE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_once_and_help_texts_are_sentences() {
        let names: std::collections::HashSet<_> = all().map(|m| m.name).collect();
        assert_eq!(names.len(), all().count());
        assert!(all().all(|m| m.help.ends_with('.')));
    }
}
