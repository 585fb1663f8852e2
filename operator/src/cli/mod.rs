//! The command line: flags, each with an environment variable, and their conversion. `start` assembles and runs the parts.

mod args;
mod logs;
pub mod start;

pub use args::Args;

use clap::Parser;
use std::process::ExitCode;

/// Runs the operator with this process's arguments.
pub fn main() -> ExitCode {
    let args = Args::parse();
    logs::start(args.log_level, args.log_format);
    // This must precede every TLS connection: rustls panics if two providers are linked and none is installed.
    if rustls::crypto::aws_lc_rs::default_provider()
        .install_default()
        .is_err()
    {
        tracing::warn!("another TLS provider is already installed");
    }
    let run = || -> Result<(), start::StartError> {
        let parts = args.check()?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        runtime.block_on(start::run(parts))
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!(reason = %e, "the operator cannot run");
            ExitCode::FAILURE
        }
    }
}
