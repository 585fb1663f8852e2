//! Options of the log, for commands without a config.

use kvcachepool_protocol::config::{Log, LogFormat, LogLevel};

#[derive(Debug, clap::Args)]
pub struct LogArgs {
    /// Lowest level of the log.
    #[arg(long, value_enum, default_value_t = LogLevel::Info)]
    log_level: LogLevel,
    /// Format of the log.
    #[arg(long, value_enum, default_value_t = LogFormat::Json)]
    log_format: LogFormat,
}

impl LogArgs {
    /// Starts the log.
    pub fn start(&self) {
        crate::log::start(&Log {
            level: self.log_level,
            format: self.log_format,
        });
    }
}
