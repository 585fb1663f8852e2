//! Structured logs on standard error: one JSON object per line, or plain text. The level can change at run time.

use kvcachepool_protocol::config::{Log, LogFormat, LogLevel};
use std::sync::OnceLock;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

static LEVEL: OnceLock<Handle<Targets, Registry>> = OnceLock::new();

/// Starts logging. The format is fixed from then on; a second call has no effect.
pub fn start(log: &Log) {
    let (filter, handle) = reload::Layer::new(filter(log.level));
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
    let lines = match log.format {
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
        LogFormat::Text => lines.with_ansi(false).boxed(),
    };
    let started = tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init();
    if started.is_ok() {
        // Empty before the first successful start.
        let _ = LEVEL.set(handle);
    }
}

/// Changes the log level.
pub fn set_level(level: LogLevel) {
    if let Some(handle) = LEVEL.get() {
        // Fails only while the process ends.
        let _ = handle.modify(|now| *now = filter(level));
    }
}

/// Our own crates log from this level on, libraries from warnings on: theirs log every request.
fn filter(level: LogLevel) -> Targets {
    let level = match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    Targets::new()
        .with_default(level.min(LevelFilter::WARN))
        .with_target("kvcachepool", level)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tracing::Level;

    #[test]
    fn libraries_tell_of_no_request_at_any_level() {
        for level in [LogLevel::Info, LogLevel::Debug, LogLevel::Trace] {
            let filter = filter(level);
            assert!(filter.would_enable("kvcachepool_tiers", &Level::INFO));
            for library in [
                "aws_smithy_runtime",
                "aws_config",
                "hyper_util::client",
                "rustls",
            ] {
                assert!(!filter.would_enable(library, &Level::INFO), "{library}");
                assert!(filter.would_enable(library, &Level::WARN), "{library}");
            }
        }
        assert!(filter(LogLevel::Debug).would_enable("kvcachepool_sidecar", &Level::DEBUG));
        assert!(!filter(LogLevel::Error).would_enable("rustls", &Level::WARN));
    }
}
