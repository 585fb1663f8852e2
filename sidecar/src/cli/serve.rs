//! `serve`: remote access to the objects of a running sidecar.

use super::log_args::LogArgs;
use crate::remote::{self, Settings};
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    log: LogArgs,
}

pub fn main(args: Args) -> Result<ExitCode, String> {
    args.log.start();
    match remote::run(args.settings) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(e) => Err(e.to_string()),
    }
}
