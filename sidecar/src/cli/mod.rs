//! The command line. Each subcommand is one file; nothing here lives longer than its command.

mod ask;
mod check;
mod config;
mod doctor;
mod export;
mod flush;
mod init;
mod purge;
mod status;
mod tier;

use crate::config_file::Files;
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
        after_help = "Ends on SIGTERM or SIGINT. SIGHUP reads the config again; so does a change of a file, within a second.
With --pool-config, the file with the higher pool.generation is in effect; socket, admin.listen and what decides how much memory
is needed (memory.size, memory.hugePages, limits.indexEntries, gpu.contextMemory) always come from --config. A pool's file that is missing counts
for nothing, one that is wrong is named in the status.
A wrong config, a missing file or an arena that does not fit is a state that /readyz, /metrics and `status` name, not an exit.

Examples:
  kvcachepool-sidecar config --defaults > config.v1.yaml   # every key with its meaning
  kvcachepool-sidecar run --config config.v1.yaml"
    )]
    Run(ConfigFiles),
    /// Print or check a config.
    #[command(after_help = "Examples:
  kvcachepool-sidecar config --defaults                    # every key with its meaning, range and default
  kvcachepool-sidecar config --check config.v1.yaml        # exit code 1 and every problem, or \"ok\"
  kvcachepool-sidecar config --effective config.v1.yaml    # the file with all defaults filled in")]
    Config(config::Args),
    /// Open every tier below memory once, and say what is missing.
    #[command(
        after_help = "An object of 4 KiB is written, read and removed in each tier, with write.policy None only looked up. Exit code 0: all tiers are ready.
1: one is not, and has the name of an error that docs/reference/tier-errors.md explains, down to a missing permission. A disk tier must not be in use.

Examples:
  kvcachepool-sidecar check --config config.v1.yaml
  kvcachepool-sidecar check --config config.v1.yaml --output json | jq -r '.tiers[] | select(.ready | not) | .message'"
    )]
    Check(check::Args),
    /// Say what this node has, what that means for the cache, and why it is slow.
    #[command(
        after_help = "Needs no rights, toolkit or network, and takes some 5 seconds. Each thing is tried, not looked up by version. With --config the node is
held against what the config asks for: memory, huge pages, the folders of socket and disk tier. Exit code 0: nothing stands against
serving. 1: something does. docs/guides/troubleshooting.md explains the findings, docs/guides/gpus.md what is said of GPUs.

Examples:
  kvcachepool-sidecar doctor
  kvcachepool-sidecar doctor --config config.v1.yaml
  kvcachepool-sidecar doctor --json | jq -r '.findings[] | .weight + \" \" + .name'"
    )]
    Doctor(doctor::Args),
    /// Write the connector for vLLM into a folder that goes onto PYTHONPATH.
    #[command(
        after_help = "vLLM finds the connector by itself when the folder is on PYTHONPATH; no launch argument is needed. Writing again is harmless.

Example:
  kvcachepool-sidecar export-connector /tmp/kvcp
  PYTHONPATH=/tmp/kvcp vllm serve <model>"
    )]
    ExportConnector(export::Args),
    /// Prepare the folder that sidecar and vLLM share, before vLLM starts.
    #[command(
        after_help = "Writes the connector and waits for the sidecar's socket, at most for --wait. Always exits with 0, so that vLLM starts in any case; one
line of JSON says what happened. Reasons: FolderNotWritable, FolderFull, ConnectorNotWritten, SocketNotOpen.

Example:
  kvcachepool-sidecar init --folder /kvcachepool --existing-connector refuse"
    )]
    Init(init::Args),
    /// Begin to write what only this sidecar holds to the tiers below; for a preStop hook.
    #[command(
        after_help = "Returns within a second and always exits with 0. The sidecar serves on. With memory as the only tier there is nothing to flush.

Example:
  kvcachepool-sidecar flush --socket /kvcachepool/sidecar.sock"
    )]
    Flush(flush::Args),
    /// Show what a running sidecar holds and whom it serves.
    #[command(after_help = "Examples:
  kvcachepool-sidecar status                               # http://127.0.0.1:9797
  kvcachepool-sidecar status --url http://10.0.0.7:9797
  kvcachepool-sidecar status --socket /tmp/kvcp/sidecar.sock
  kvcachepool-sidecar status --json | jq .memory")]
    Status(status::Args),
    /// Show what lies in a tier below memory, without a sidecar.
    #[command(
        after_help = "The folder must not be in use: stop its sidecar first. A domain is what decides KV values and their arrangement: the first 16 digits
of ModelId and LayoutId. With --output json every line is a document: with --objects first the objects, then the summary.

Examples:
  kvcachepool-sidecar inspect file:///var/lib/kvcachepool
  kvcachepool-sidecar inspect redis://kv-0.kv:6379 --auth /var/run/kvcachepool/redis
  kvcachepool-sidecar inspect s3://kv-cache/prod/llama --endpoint https://minio.storage:9000 --ca /etc/ssl/minio.crt
  kvcachepool-sidecar inspect file:///var/lib/kvcachepool --objects --output json | jq -c 'select(.object)'"
    )]
    Inspect(tier::inspect::Args),
    /// Read every object of a tier and compare its bytes with their digests.
    #[command(
        after_help = "Exit code 0: all objects are right. 1: some are corrupt, foreign or cannot be read, or the tier cannot be opened. Nothing is changed without
--remove-corrupt. A sidecar compares the same digests before it serves an object: a corrupt one costs its chunk, never a wrong answer.

Examples:
  kvcachepool-sidecar verify file:///var/lib/kvcachepool
  kvcachepool-sidecar verify file:///var/lib/kvcachepool --remove-corrupt
  kvcachepool-sidecar verify s3://kv-cache/prod/llama --region eu-central-1 --auth /var/run/kvcachepool/s3"
    )]
    Verify(tier::verify::Args),
    /// Remove objects of a tier by domain or age.
    #[command(
        after_help = "An object goes when all that is given holds for it. Nothing asks again: look with --dry-run first.

Examples:
  kvcachepool-sidecar gc file:///var/lib/kvcachepool --older-than 30d --dry-run
  kvcachepool-sidecar gc file:///var/lib/kvcachepool --all-but-domain 0123456789abcdef/fedcba9876543210"
    )]
    Gc(tier::gc::Args),
    /// Remove all objects of the tiers that pods share, Redis and S3, as a config names them.
    #[command(
        after_help = "Whoever shares the prefix in the bucket, or the Redis, loses what is there too. Nothing asks again: look with --dry-run first. What is
none of ours stays. A disk tier is left alone: to give it up, empty its folder.

Examples:
  kvcachepool-sidecar purge --config config.v1.yaml --dry-run
  kvcachepool-sidecar purge --config config.v1.yaml"
    )]
    Purge(purge::Args),
    /// The engine process; started by `run`.
    #[command(hide = true)]
    Engine(ConfigFiles),
    /// The process that a window is passed to; started by `doctor`.
    #[command(hide = true)]
    WindowPeer {
        /// UUID of the device.
        uuid: String,
    },
}

#[derive(Debug, Clone, clap::Args)]
struct ConfigFiles {
    /// Config file (YAML). Without it every key has its default.
    #[arg(long, value_name = "FILE", env = "KVCACHEPOOL_CONFIG")]
    config: Option<PathBuf>,
    /// Config file of the whole pool, if there is one; in effect while it is newer.
    #[arg(long, value_name = "FILE")]
    pool_config: Option<PathBuf>,
}

impl From<ConfigFiles> for Files {
    fn from(args: ConfigFiles) -> Self {
        Self {
            pod: args.config,
            pool: args.pool_config,
        }
    }
}

/// Runs the command of this process's arguments.
pub fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(files) => {
            let files = Files::from(files);
            let loaded = files.load();
            crate::log::start(&loaded.map(|l| l.config.log).unwrap_or_default());
            crate::supervisor::run(&files)
                .map(|()| ExitCode::SUCCESS)
                .map_err(|e| e.to_string())
        }
        Command::Engine(files) => crate::serve::run(&files.into())
            .map(|code| ExitCode::from(u8::try_from(code).unwrap_or(1)))
            .map_err(|e| e.to_string()),
        Command::WindowPeer { uuid } => {
            crate::gpu::cuda::peer::serve(&uuid);
            Ok(ExitCode::SUCCESS)
        }
        Command::Init(args) => Ok(init::main(&args)),
        Command::Flush(args) => Ok(flush::main(&args)),
        Command::Config(args) => config::main(&args),
        Command::Check(args) => check::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::ExportConnector(args) => export::main(&args),
        Command::Status(args) => status::main(&args),
        Command::Inspect(args) => tier::inspect::main(&args),
        Command::Verify(args) => tier::verify::main(&args),
        Command::Gc(args) => tier::gc::main(&args),
        Command::Purge(args) => purge::main(&args),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("error: {message}");
        ExitCode::FAILURE
    })
}
