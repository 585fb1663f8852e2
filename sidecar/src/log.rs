//! Structured logs on standard error: one JSON object a line, or text for people. The level can change while running.

use kvcachepool_protocol::config::{Log, LogFormat, LogLevel};
use std::sync::OnceLock;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt};

static LEVEL: OnceLock<Handle<LevelFilter, Registry>> = OnceLock::new();

/// Starts logging. The format is chosen once; a second call does nothing.
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

/// Changes the least level that is written.
pub fn set_level(level: LogLevel) {
    if let Some(handle) = LEVEL.get() {
        // Fails only while the process ends.
        let _ = handle.modify(|now| *now = filter(level));
    }
}

fn filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}
