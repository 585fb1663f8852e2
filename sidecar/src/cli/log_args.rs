//! Options of the log, for commands without a config.

use kvcachepool_protocol::config::{Log, LogFormat, LogLevel};

#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Lowest level of the log.
    #[arg(long, value_enum, default_value_t = Level::Info)]
    log_level: Level,
    /// Format of the log.
    #[arg(long, value_enum, default_value_t = Format::Json)]
    log_format: Format,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Format {
    Json,
    Text,
}

impl LogArgs {
    /// Starts the log.
    pub fn start(&self) {
        crate::log::start(&Log {
            level: match self.log_level {
                Level::Error => LogLevel::Error,
                Level::Warn => LogLevel::Warn,
                Level::Info => LogLevel::Info,
                Level::Debug => LogLevel::Debug,
            },
            format: match self.log_format {
                Format::Json => LogFormat::Json,
                Format::Text => LogFormat::Text,
            },
        });
    }
}
