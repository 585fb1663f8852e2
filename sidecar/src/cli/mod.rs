//! The command line. Each subcommand is one file; nothing here lives longer than its command.

mod config;
mod export;
mod status;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Node-local KV cache for vLLM: keeps the KV of prompts in memory outside of the GPU, so that a prompt whose prefix was seen before
/// skips prefill, also after vLLM restarted.
#[derive(Debug, Parser)]
#[command(
    name = "kvcachepool-sidecar",
    version,
    after_help = "Examples:
  # vLLM and sidecar on one machine, by hand
  kvcachepool-sidecar export-connector /tmp/kvcp
  printf 'socket: /tmp/kvcp/sidecar.sock\\nmemory: {size: 4Gi}\\n' > /tmp/kvcp/config.v1.yaml
  kvcachepool-sidecar run --config /tmp/kvcp/config.v1.yaml &
  PYTHONPATH=/tmp/kvcp vllm serve <model>
  kvcachepool-sidecar status"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the sidecar: a supervisor that holds the memory, and the engine below it.
    #[command(
        after_help = "Ends on SIGTERM or SIGINT. SIGHUP reads the config again; so does a change of the file, within a second.
A wrong config, a missing file or an arena that does not fit is a state that /readyz, /metrics and `status` name, not an exit.

Examples:
  kvcachepool-sidecar config --defaults > config.v1.yaml   # every key with its meaning
  kvcachepool-sidecar run --config config.v1.yaml"
    )]
    Run {
        /// Config file (YAML). Without it every key has its default.
        #[arg(long, value_name = "FILE", env = "KVCACHEPOOL_CONFIG")]
        config: Option<PathBuf>,
    },
    /// Print or check a config.
    #[command(after_help = "Examples:
  kvcachepool-sidecar config --defaults                    # every key with its meaning, range and default
  kvcachepool-sidecar config --check config.v1.yaml        # exit code 1 and every problem, or \"ok\"
  kvcachepool-sidecar config --effective config.v1.yaml    # the file with all defaults filled in")]
    Config(config::Args),
    /// Write the connector for vLLM into a folder that goes onto PYTHONPATH.
    #[command(
        after_help = "vLLM finds the connector by itself when the folder is on PYTHONPATH; no launch argument is needed. Writing again is harmless.

Example:
  kvcachepool-sidecar export-connector /tmp/kvcp
  PYTHONPATH=/tmp/kvcp vllm serve <model>"
    )]
    ExportConnector(export::Args),
    /// Show what a running sidecar holds and whom it serves.
    #[command(after_help = "Examples:
  kvcachepool-sidecar status                               # http://127.0.0.1:9797
  kvcachepool-sidecar status --url http://10.0.0.7:9797
  kvcachepool-sidecar status --socket /tmp/kvcp/sidecar.sock
  kvcachepool-sidecar status --json | jq .memory")]
    Status(status::Args),
    /// The engine process; started by `run`.
    #[command(hide = true)]
    Engine {
        #[arg(long)]
        config: Option<PathBuf>,
    },
}

/// Runs the command of this process's arguments.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run { config } => {
            let loaded = crate::config_file::load(config.as_deref());
            crate::log::start(&loaded.map(|l| l.config.log).unwrap_or_default());
            crate::supervisor::run(config.as_deref())
                .map(|()| ExitCode::SUCCESS)
                .map_err(|e| e.to_string())
        }
        Command::Engine { config } => crate::serve::run(config.as_deref())
            .map(|code| ExitCode::from(u8::try_from(code).unwrap_or(1)))
            .map_err(|e| e.to_string()),
        Command::Config(args) => config::main(&args),
        Command::ExportConnector(args) => export::main(&args),
        Command::Status(args) => status::main(&args),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("error: {message}");
        ExitCode::FAILURE
    })
}
