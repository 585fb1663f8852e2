//! Log lines: one JSON object each, or plain text for people at a terminal.

use super::args::{LogFormat, LogLevel};
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt;

/// From here on, everything that is logged goes to standard error.
pub fn start(level: LogLevel, format: LogFormat) {
    let level = level.name();
    // Libraries speak of every connection and every retry; their warnings are enough unless everything is asked for.
    let filter = match level {
        "debug" | "trace" => level.to_owned(),
        // The watches' errors are logged where they are handled.
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
        eprintln!("logs stay as they are: {e}");
    }
}
