//! Every metric there is: the one list that the registry is built from, that `docs/metrics.md` is checked against, and that tests
//! walk. Names carry the prefix `kvcachepool_` on the wire.

/// Kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Only grows while the engine process lives.
    Counter,
    /// Goes both ways.
    Gauge,
}

/// One metric family.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// Name without prefix.
    pub name: &'static str,
    /// Kind.
    pub kind: Kind,
    /// Label names, in the order of their values.
    pub labels: &'static [&'static str],
    /// For people.
    pub help: &'static str,
}

const fn counter(
    name: &'static str,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric {
        name,
        kind: Kind::Counter,
        labels,
        help,
    }
}

const fn gauge(name: &'static str, labels: &'static [&'static str], help: &'static str) -> Metric {
    Metric {
        name,
        kind: Kind::Gauge,
        labels,
        help,
    }
}

/// Prefix of every name.
pub const PREFIX: &str = "kvcachepool_";

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
    counter("accept_failures_total", &[], "accept() calls that failed."),
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
        "admin_requests_total",
        &["path", "status"],
        "Admin HTTP requests.",
    ),
];

/// All families.
pub fn all() -> impl Iterator<Item = &'static Metric> {
    SHELL.iter()
}
