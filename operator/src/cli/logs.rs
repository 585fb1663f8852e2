//! Log setup: one JSON object per line, or text for terminals.

use kvcachepool_protocol::config::{Choice, LogFormat, LogLevel};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt;

/// Logs to standard error from now on.
pub fn start(level: LogLevel, format: LogFormat) {
    let level = level.name();
    // Libraries log every connection and every retry. Their warnings suffice except at debug and trace.
    let filter = match level {
        "debug" | "trace" => level.to_owned(),
        // Watch errors are logged where they are handled.
        _ => format!("warn,kube_runtime=error,kvcachepool_operator={level}"),
    };
    let builder = fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_writer(std::io::stderr);
    let set = match format {
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
        LogFormat::Text => builder.try_init(),
    };
    if let Err(e) = set {
        eprintln!("logging is already set up: {e}");
    }
}
