//! `status`: queries a running sidecar over HTTP or its socket and prints a table or JSON.

mod table;

pub use table::size;

use super::ask;
use super::output::Format;
use kvcachepool_protocol::status::Status;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Admin address of the sidecar.
    #[arg(
        long,
        default_value = "http://127.0.0.1:9797",
        conflicts_with = "socket"
    )]
    url: String,
    /// Socket of the sidecar, instead of its admin address.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    format: Format,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let status: Status = match &args.socket {
        Some(path) => ask::over_socket(path, "status")?,
        None => ask::over_http(&args.url)?,
    };
    if args.format.is_json() {
        let text = serde_json::to_string_pretty(&status).map_err(|e| e.to_string())?;
        println!("{text}");
    } else {
        print!("{}", table::render(&status));
    }
    Ok(ExitCode::SUCCESS)
}
