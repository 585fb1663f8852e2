//! `size`: prints the bytes of a model's KV, and what tiers hold of it.

use super::tier::Output;
use crate::config_file;
use kvcachepool_protocol::sizing::Flags;
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model's config.json, as on Hugging Face.
    #[arg(value_name = "MODEL-CONFIG")]
    model: PathBuf,
    #[command(flatten)]
    flags: Flags,
    /// Config of a sidecar (YAML). Its tiers and its cache.chunkTokens are used.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Output format: text for people, json for programs.
    #[arg(short, long, value_enum, default_value = "text")]
    output: Output,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let config = match &args.config {
        Some(path) => Some(
            config_file::load(Some(path))
                .map_err(|e| e.to_string())?
                .config,
        ),
        None => None,
    };
    let model = std::fs::read_to_string(&args.model)
        .map_err(|e| format!("{}: {e}", args.model.display()))?;
    let report = args
        .flags
        .report(&model, config.as_ref())
        .map_err(|e| e.to_string())?;
    match args.output {
        Output::Text => print!("{report}"),
        Output::Json => println!(
            "{}",
            serde_json::to_string_pretty(&report).map_err(|e| e.to_string())?
        ),
    }
    Ok(ExitCode::SUCCESS)
}
