//! All metrics of the sidecar. The registry and `docs/reference/metrics.md` are built from this list, and tests walk it.

use kvcachepool_engine::SECONDS;
pub use kvcachepool_metrics::Metrics;
use kvcachepool_metrics::{Metric, counter, gauge, kept_seconds};

/// A registry with every metric of the tables.
pub fn registry() -> Metrics {
    Metrics::of(all()).with_process()
}

/// Metrics of the process: sockets, config, windows.
pub const SHELL: &[Metric] = &[
    gauge(
        "build_info",
        &["version", "protocol"],
        "Always 1; the labels name the running binary.",
    ),
    gauge(
        "engine_up",
        &[],
        "1 while the engine process answers; 0 while the supervisor answers in its place.",
    ),
    counter(
        "engine_starts_total",
        &[],
        "Starts of the engine process in this container, including the running one.",
    ),
    gauge(
        "engine_uptime_seconds",
        &[],
        "Seconds since the engine process started.",
    ),
    gauge("ready", &[], "1 while /readyz returns 200."),
    gauge(
        "degraded",
        &["reason"],
        "1 for each reason why the sidecar serves less than its configuration asks for.",
    ),
    gauge(
        "boots_without_health",
        &[],
        "Engine starts since the engine was last healthy for 60 s. After three, the next start is cold.",
    ),
    counter(
        "connections_accepted_total",
        &[],
        "Connections accepted on the Unix socket.",
    ),
    counter(
        "connections_closed_total",
        &["reason"],
        "Connections that the sidecar closed, by reason.",
    ),
    gauge("connections", &[], "Open connections."),
    counter(
        "accept_failures_total",
        &[],
        "Failed accept() calls on the Unix socket and the admin port.",
    ),
    counter(
        "frames_total",
        &["op"],
        "Protocol frames read from connectors and tools, by opcode.",
    ),
    counter(
        "descriptors_surplus_total",
        &[],
        "File descriptors that were passed without a frame that names them. The sidecar closes them.",
    ),
    counter(
        "events_total",
        &["event"],
        "Events of sessions and the engine, by name: refusals, drops, adoptions, deaths.",
    ),
    counter(
        "population_failures_total",
        &[],
        "Failed attempts to populate pages of the arena.",
    ),
    counter(
        "window_copies_total",
        &["direction", "result"],
        "Window stages by direction (store, load) and result: moved, in_doubt, or the reason of a refusal.",
    ),
    counter(
        "window_copied_bytes_total",
        &["direction"],
        "Bytes that the sidecar copied between windows and the memory tier.",
    ),
    gauge(
        "memory_locked_bytes",
        &[],
        "Bytes of the arena that are page-locked for copies to and from GPUs.",
    ),
    gauge(
        "digests_waiting",
        &["queue"],
        "Digests queued for a thread: urgent (a request waits for them) or background.",
    ),
    counter(
        "config_reloads_total",
        &["result"],
        "Changes of the config file, by result: applied, invalid.",
    ),
    gauge(
        "config_generation",
        &[],
        "pool.generation of the config in effect.",
    ),
    gauge(
        "config_restart_needed",
        &["key"],
        "1 for each changed key that takes effect only at the next start.",
    ),
    gauge(
        "config_unknown_keys",
        &["key"],
        "1 for each key of a managed config that this version does not know.",
    ),
    counter(
        "admin_displaced_total",
        &[],
        "Admin HTTP connections closed as the oldest of 64 to make room for a new one.",
    ),
    counter(
        "admin_refusals_total",
        &["code"],
        "ADMIN operations on the socket that were refused, by error code.",
    ),
    counter(
        "admin_requests_total",
        &["path", "status"],
        "Admin HTTP requests.",
    ),
    counter(
        "admin_timeouts_total",
        &[],
        "Admin HTTP connections closed because they took longer than 10 s.",
    ),
];

/// Metrics of sessions, engine and tiers.
pub const CORE: &[Metric] = &[
    counter(
        "requested_tokens_total",
        &[],
        "Prompt tokens of admitted requests that vLLM's own prefix cache did not hold. Always equal to hits plus misses.",
    ),
    counter(
        "hit_tokens_total",
        &["tier"],
        "Requested tokens that a tier served.",
    ),
    counter(
        "miss_tokens_total",
        &["reason"],
        "Requested tokens that no tier served, by reason.",
    ),
    counter(
        "load_failed_tokens_total",
        &[],
        "Tokens whose load failed after admission. They remain counted as hits of their tier.",
    ),
    counter(
        "connector_events_total",
        &["event"],
        "Skips, drops and refusals that connectors report from vLLM, by name.",
    ),
    counter(
        "connector_copied_bytes_total",
        &["direction"],
        "Bytes copied by workers, by direction: store or load.",
    ),
    counter(
        "connector_copied_seconds_total",
        &["direction"],
        "Seconds that workers spent on copies, by direction: store or load.",
    ),
    gauge(
        "oldest_copy_job_seconds",
        &[],
        "Age of the oldest copy job of any worker.",
    ),
    counter(
        "probes_unready_total",
        &[],
        "PROBEs that found nothing because not all ranks were registered or the sidecar has no memory tier.",
    ),
    kept_seconds(
        &SECONDS,
        "probe_seconds",
        &[],
        "Time from a PROBE of vLLM to its final answer.",
    ),
    kept_seconds(
        &SECONDS,
        "load_seconds",
        &[],
        "Time in which a request of vLLM held chunks of the cache to load them.",
    ),
    kept_seconds(
        &SECONDS,
        "store_seconds",
        &[],
        "Time from the grant of a chunk to vLLM until the chunk is readable.",
    ),
    counter(
        "probe_chunks_total",
        &["state"],
        "Chunks in final answers to PROBE, by state: absent or ready.",
    ),
    counter(
        "grants_total",
        &["result"],
        "Chunks in answers to GRANT, by result.",
    ),
    counter(
        "voided_grants_total",
        &[],
        "Grants that ended before all sections were committed: aborts, deaths of workers, lost jobs.",
    ),
    counter(
        "commits_ignored_total",
        &[],
        "COMMITs and ABORTs of slots that were not granted to the sender.",
    ),
    counter(
        "refused_total",
        &["code"],
        "Protocol requests that were refused, by error code.",
    ),
    counter(
        "frames_ignored_total",
        &["reason"],
        "Protocol frames, or parts of them, that the sidecar ignored, by reason.",
    ),
    counter(
        "session_events_total",
        &["event"],
        "Session events by name: kinds of HELLO answers, deaths of processes, memory returned by connectors, schedulers that repeated HELLO after a new rank.",
    ),
    gauge("sessions", &["role"], "Sessions whose process is alive."),
    gauge(
        "unshared_domains",
        &["reason"],
        "Domains whose chunks stay in this sidecar's memory because no other process can name them, by reason.",
    ),
    gauge(
        "worker_transfer",
        &["mode", "reason"],
        "Registered workers by transfer mode (engine, cuda_window), with the reason why the other mode is not used.",
    ),
    counter(
        "stored_chunks_total",
        &[],
        "Chunks stored by workers and readable.",
    ),
    counter(
        "adopted_chunks_total",
        &[],
        "Chunks adopted from an earlier boot.",
    ),
    counter(
        "expired_chunks_total",
        &[],
        "Chunks that reached their age limit.",
    ),
    counter(
        "corrupt_chunks_total",
        &[],
        "Chunks whose bytes did not match their digest. They are not served.",
    ),
    counter(
        "evicted_chunks_total",
        &["reason"],
        "Chunks evicted, by reason: to make room, or because they remained incomplete.",
    ),
    counter(
        "evicted_bytes_total",
        &[],
        "Bytes of chunks evicted to make room.",
    ),
    counter("checks_total", &[], "Digest comparisons."),
    counter(
        "soft_pins_ended_total",
        &["reason"],
        "Soft pins that ended without a lease, by reason: expired, or displaced by newer ones.",
    ),
    gauge("slots", &["state"], "Slots by state."),
    gauge("chunks", &[], "Readable chunks."),
    gauge("incomplete_chunks", &[], "Chunks with missing sections."),
    gauge(
        "unchecked_chunks",
        &[],
        "Adopted chunks whose digests are not checked yet.",
    ),
    gauge("memory_capacity_bytes", &[], "Size of the arena in bytes."),
    gauge(
        "memory_target_bytes",
        &[],
        "Size that the config asks for. The status says why the arena does not have it yet.",
    ),
    gauge("memory_used_bytes", &[], "Bytes of slots in use."),
    gauge(
        "granted_bytes",
        &[],
        "Bytes of slots that were granted to workers and are not committed.",
    ),
    gauge("leased_bytes", &[], "Bytes under read leases."),
    gauge("soft_pinned_bytes", &[], "Bytes under soft pins."),
    gauge(
        "admin_pinned_bytes",
        &[],
        "Bytes pinned through the admin API.",
    ),
    gauge(
        "tier_up",
        &["tier"],
        "1 while a lower tier is in use; 0 while it is down or removes its objects for a clear.",
    ),
    gauge(
        "tier_down",
        &["tier", "reason"],
        "1 while a lower tier is down, with the reason that status shows. Also set before the tier is opened for the first time.",
    ),
    gauge(
        "tier_degraded",
        &["tier", "reason"],
        "1 while a lower tier serves in a degraded state, with the reason that status shows: it is slow, it takes no writes, or its changed configuration is invalid.",
    ),
    gauge(
        "tier_breaker_open",
        &["tier", "operations"],
        "1 while reads from or writes to a lower tier are suspended after several failures in a row. They are retried after a pause.",
    ),
    gauge(
        "tier_server_up",
        &["tier", "server"],
        "State of each server of a tier with several servers: 1 while it serves, 0 after a failure. Its objects are misses until it serves again.",
    ),
    counter(
        "tier_events_total",
        &["tier", "event"],
        "Events inside a tier. Redis as the directory of the bucket: chunks that the directory answered (directory_knew) or left to the bucket (directory_left), lookups without an answer (directory_silent), updates of existence markers that failed (directory_unchanged). File system and S3: objects over the capacity or age limit that could not be deleted (removal_refused). Disk, since the folder was opened: objects evicted for others (evicted), objects whose header on the device did not match (corrupt_object), records that were corrupt (corrupt_record), truncated by a crash (torn_tail) or of slots that no longer exist (stray_record), container files that were missing or too short (lost_container), and foreign files in the folder (foreign_file).",
    ),
    gauge(
        "tier_used_bytes",
        &["tier"],
        "Bytes that a lower tier uses: of objects on disk, memory of all Redis servers, or of objects at the last count of a shared folder or bucket.",
    ),
    gauge(
        "tier_capacity_bytes",
        &["tier"],
        "Limit of kvcachepool_tier_used_bytes. Absent where the server decides.",
    ),
    counter(
        "tier_lookup_chunks_total",
        &["tier", "result"],
        "Chunks looked up in a lower tier, by result: present, absent, cancelled, or the reason of a failure.",
    ),
    counter(
        "tier_fetch_chunks_total",
        &["tier", "result"],
        "Chunks to be fetched from a lower tier, by result: landed, cancelled, stored (by a worker in the meantime), or the reason of a failure.",
    ),
    counter(
        "tier_fetched_bytes_total",
        &["tier"],
        "Bytes of chunks fetched from a lower tier.",
    ),
    counter(
        "tier_write_chunks_total",
        &["tier", "result"],
        "Chunks to be written to a lower tier, by result: stored, already (present), or the reason of a failure.",
    ),
    counter(
        "tier_written_bytes_total",
        &["tier"],
        "Bytes of chunks written to a lower tier.",
    ),
    counter(
        "tier_clears_total",
        &["tier", "result"],
        "Clears of a lower tier, by result: cleared, or the reason of a failure. A failed clear is retried.",
    ),
    counter(
        "tier_cleared_objects_total",
        &["tier"],
        "Objects deleted by clears.",
    ),
    gauge(
        "tier_expected_seconds",
        &["tier", "operation"],
        "Expected duration of a lookup or of a fetch of one chunk: a moving average, or an estimate at the start. The connector uses it to decide whether a request waits.",
    ),
    gauge(
        "tier_estimated_latency_seconds",
        &["tier"],
        "Expected duration of the smallest load from a lower tier, estimated from recent loads. Absent after too few loads, or none for 30 s.",
    ),
    gauge(
        "tier_estimated_bytes_per_second",
        &["tier"],
        "Expected throughput of loads from a lower tier, without the latency. Absent when kvcachepool_tier_estimated_latency_seconds is absent.",
    ),
    gauge(
        "prefill_tokens_per_second",
        &[],
        "Prompt tokens that vLLM computes per second, measured by the connector. With several vLLMs, the slowest. Absent until one is measured.",
    ),
    counter(
        "load_choices_total",
        &["choice"],
        "Requests with chunks in a lower tier, by choice: load (expected to be faster than computing), always (cache.loadOrRecompute), unknown (no estimate yet, so they are loaded), or recompute and min_load_tokens (some or all chunks are not loaded). A request that loads only a part counts for both choices.",
    ),
    counter(
        "loads_total",
        &["outcome"],
        "Loads from lower tiers that a request waited for, by outcome: quicker or slower than computing, unknown (vLLM's speed is not measured), failed (nothing was loaded).",
    ),
    counter(
        "load_expected_seconds_total",
        &[],
        "Expected seconds of loads from lower tiers, summed over loads with an estimate.",
    ),
    counter(
        "load_took_seconds_total",
        &[],
        "Actual seconds of the loads in kvcachepool_load_expected_seconds_total.",
    ),
    gauge(
        "tier_waiting_bytes",
        &["tier"],
        "Bytes queued for a write to a tier. Until they are written, they are only in memory. Dropped writes (kvcachepool_tier_write_chunks_total, result queue_full) are not included.",
    ),
    counter(
        "tier_operations_total",
        &["tier", "operation", "result"],
        "Operations on a lower tier, by result: ok, dropped, or the error. All attempts of an operation count as one.",
    ),
    kept_seconds(
        &SECONDS,
        "tier_operation_seconds",
        &["tier", "operation"],
        "Duration of finished operations on a lower tier, with all their attempts: get reads a chunk, put writes one.",
    ),
    gauge(
        "tier_operations_running",
        &["tier", "operation"],
        "Operations in flight on a lower tier.",
    ),
    counter(
        "tier_packed_bytes_total",
        &["tier", "operation", "which"],
        "Bytes packed for a lower tier (put) or unpacked from it (get): raw (in memory) or stored (in the tier).",
    ),
    counter(
        "tier_packing_seconds_total",
        &["tier", "operation"],
        "CPU seconds spent on packing (put) and unpacking (get).",
    ),
    gauge(
        "tier_packing_error_ratio",
        &["tier"],
        "Relative error of the object packed last for a lower tier: the root mean square of the errors divided by that of the values. 0 for a lossless codec.",
    ),
    counter(
        "tier_plain_objects_total",
        &["tier", "reason"],
        "Objects written to a lower tier without packing by write.codec, by reason: too_large (packing needs more memory than its limit), unsuited (not numbers, not finite, or a format unknown to the codec), not_smaller.",
    ),
    counter(
        "tier_retries_total",
        &["tier"],
        "Retries of operations on a lower tier.",
    ),
    counter(
        "tier_corrupt_objects_total",
        &["tier"],
        "Corrupt objects found in a lower tier and deleted from it.",
    ),
    counter(
        "tier_scribbled_gets_total",
        &["tier"],
        "Reads from a lower tier whose bytes changed in the arena before their digests were compared. They count as misses, and the object is kept. A process on the node writes to slots that it does not own.",
    ),
    gauge(
        "tier_waiting_chunks",
        &["tier", "direction"],
        "Chunks queued for a lower tier, by direction: fetch or write.",
    ),
    gauge(
        "tier_in_flight_bytes",
        &["tier", "direction"],
        "Bytes of chunks in flight from or to a lower tier, by direction: fetch or write.",
    ),
    counter(
        "pacing_bytes_total",
        &["direction"],
        "Bytes that count towards pacing.readBytesPerSecond (read: from lower tiers) and pacing.writeBytesPerSecond (write: to lower tiers, and background checks), with or without a limit.",
    ),
    counter(
        "pacing_waited_seconds_total",
        &["direction"],
        "Total seconds that tiers and background checks waited because of pacing.readBytesPerSecond or pacing.writeBytesPerSecond.",
    ),
    gauge("events_cursor", &[], "Number of the newest KV event."),
];

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
