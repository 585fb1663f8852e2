//! The command line. Each subcommand has its own file, and nothing here outlives its command.

mod ask;
mod check;
mod config;
mod doctor;
mod export;
mod flush;
mod init;
mod lmcache;
mod log_args;
mod output;
mod purge;
mod redis_cluster;
mod serve;
mod size;
mod status;
mod tier;

use crate::config_file::{Files, INJECTED_FOLDER};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use kvcachepool_protocol::config::Config;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Node-local KV cache for vLLM. It keeps the KV of prompts in memory outside the GPU: a prompt whose prefix is cached skips prefill,
/// even after vLLM restarted.
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
        after_help = "Stops on SIGTERM or SIGINT. Reloads the config on SIGHUP, and within a second after a file changes.
With --pool-config, the file with the higher pool.generation is in effect. Some keys always come from --config: socket, admin.listen,
disk.*, fileSystem.path, gpu.* and the keys that determine the memory needed (memory.size, memory.hugePages, limits.indexEntries). A missing
pool file is ignored; an invalid one is reported by `status`.
An invalid config, a missing file or an arena that does not fit does not end the process: /readyz, /metrics and `status` report the reason.

Examples:
  kvcachepool-sidecar config --defaults > config.v1.yaml   # every key with its meaning
  kvcachepool-sidecar run --config config.v1.yaml"
    )]
    Run(ConfigFiles),
    /// Serve the objects of a running sidecar to clients on other machines, over TLS.
    #[command(
        after_help = "The process is a client of the sidecar's socket: start it beside `run`, in the same pod or on the same machine. Clients are programs with
kvcachepool.client and LMCache's plugin (guide \"Remote access\"). A key opens all namespaces. Certificate and keys are read again when their
files change. The process never ends because the sidecar does: it refuses clients until the sidecar is back. Stops on SIGTERM or SIGINT.

Examples:
  openssl rand -hex 32 > keys
  kvcachepool-sidecar serve --socket /tmp/kvcp/sidecar.sock --certificate tls.crt --private-key tls.key --key-file keys
  curl http://127.0.0.1:9801/readyz"
    )]
    Serve(serve::Args),
    /// Print or check a config, or translate LMCache's.
    #[command(
        after_help = "--from-lmcache prints a KVCachePool, and on standard error a line per key of LMCache: translated, automatic, or not supported and what
to use instead. Passwords are never printed: the notes say which Secret to create. What LMCache stored is not read.

Examples:
  kvcachepool-sidecar config --defaults                    # every key with its meaning, range and default
  kvcachepool-sidecar config --check config.v1.yaml        # exit code 1 and every problem, or \"ok\"
  kvcachepool-sidecar config --effective config.v1.yaml    # the file with all defaults filled in
  kvcachepool-sidecar config --from-lmcache lmcache.yaml --name llama --workers 2 > pool.yaml
  kvcachepool-sidecar config --from-lmcache --sidecar      # the variables LMCACHE_*, as a sidecar's config"
    )]
    Config(config::Args),
    /// Open every lower tier once and report problems.
    #[command(
        after_help = "Writes, reads and deletes an object of 4 KiB in each tier; with write.policy None it only looks the object up. Exit code 0: all tiers
are ready. 1: a tier is not ready, or there is no config. The error of a tier names a missing permission, too; the documentation explains
the errors on the page \"Errors and events of tiers\". A disk tier must not be in use.

Examples:
  kvcachepool-sidecar check --config config.v1.yaml
  kvcachepool-sidecar check --config config.v1.yaml --output json | jq -r '.tiers[] | select(.ready | not) | .message'"
    )]
    Check(check::Args),
    /// Report what this node has, what that means for the cache, and why it is slow.
    #[command(
        after_help = "Needs no privileges, toolkit or network, and takes about 5 seconds. It tries each feature instead of comparing versions. With a config it
also checks what the config needs: memory, huge pages, the folders of socket and disk tier. Exit code 0: the cache can serve. 1: it
cannot. The documentation explains the findings on the page Troubleshooting, and the report about GPUs on the page GPUs.

Examples:
  kvcachepool-sidecar doctor
  kvcachepool-sidecar doctor --config config.v1.yaml
  kvcachepool-sidecar doctor --output json | jq -r '.findings[] | .weight + \" \" + .name'"
    )]
    Doctor(doctor::Args),
    /// Write the connector for vLLM into a folder for PYTHONPATH.
    #[command(
        after_help = "vLLM finds the connector when the folder is on PYTHONPATH; it needs no launch argument. It is safe to run this again.

Example:
  kvcachepool-sidecar export-connector /tmp/kvcp
  PYTHONPATH=/tmp/kvcp vllm serve <model>"
    )]
    ExportConnector(export::Args),
    /// Prepare the folder that sidecar and vLLM share, before vLLM starts.
    #[command(
        after_help = "Writes the connector and waits up to --wait for the sidecar's socket. The exit code is always 0, so that vLLM starts in any case. One
line of JSON reports the result. Reasons: FolderNotWritable, FolderFull, ConnectorNotWritten, SocketNotOpen.

Example:
  kvcachepool-sidecar init --folder /kvcachepool --existing-connector refuse"
    )]
    Init(init::Args),
    /// Start writing chunks that only this sidecar holds to the lower tiers; for a preStop hook.
    #[command(
        after_help = "Returns within a second with exit code 0. The sidecar continues to serve. Without lower tiers this does nothing.

Example:
  kvcachepool-sidecar flush --socket /kvcachepool/sidecar.sock"
    )]
    Flush(flush::Args),
    /// Show the state of a running sidecar: its memory, tiers and sessions.
    #[command(after_help = "Examples:
  kvcachepool-sidecar status                               # http://127.0.0.1:9797
  kvcachepool-sidecar status --url http://10.0.0.7:9797
  kvcachepool-sidecar status --socket /tmp/kvcp/sidecar.sock
  kvcachepool-sidecar status --output json | jq .memory")]
    Status(status::Args),
    /// Compute the bytes of a model's KV per token and chunk, and what tiers hold of it.
    #[command(
        after_help = "MODEL-CONFIG is the model's config.json of Hugging Face. Without --memory, --disk and --config no tier is reported. Sizes are those
without a codec. The documentation explains them on the page \"Tiers below memory\". Exit code 1: the config lacks a field, or the model is
not known.

Examples:
  kvcachepool-sidecar size config.json --tokens 32000 --tp 2
  kvcachepool-sidecar size config.json --tokens 32000 --memory 64Gi --disk 500Gi
  kvcachepool-sidecar size config.json --config config.v1.yaml --output json | jq .tiers"
    )]
    Size(size::Args),
    /// Show the contents of a lower tier, without a sidecar.
    #[command(
        after_help = "The folder of a disk tier must not be in use: stop its sidecar first. A domain identifies a model and a layout of its KV: the first 16 digits of
ModelId and LayoutId. With --output json every line is a document: the summary, and before it with --objects the objects.

Examples:
  kvcachepool-sidecar inspect file:///var/lib/kvcachepool
  kvcachepool-sidecar inspect file:///mnt/shared/kvcachepool
  kvcachepool-sidecar inspect redis://kv-0.kv:6379 --auth /var/run/kvcachepool/redis
  kvcachepool-sidecar inspect s3://kv-cache/prod/llama --endpoint https://minio.storage:9000 --ca /etc/ssl/minio.crt
  kvcachepool-sidecar inspect file:///var/lib/kvcachepool --objects --output json | jq -c 'select(.object)'"
    )]
    Inspect(tier::inspect::Args),
    /// Read every object of a tier and check its digests.
    #[command(
        after_help = "Exit code 0: all objects are intact. 1: some are corrupt, foreign or unreadable, or the tier cannot be opened. Nothing changes without
--remove-corrupt. A sidecar checks the same digests before it serves an object: a corrupt object is a miss, never a wrong answer.

Examples:
  kvcachepool-sidecar verify file:///var/lib/kvcachepool
  kvcachepool-sidecar verify file:///var/lib/kvcachepool --remove-corrupt
  kvcachepool-sidecar verify s3://kv-cache/prod/llama --region eu-central-1 --auth /var/run/kvcachepool/s3"
    )]
    Verify(tier::verify::Args),
    /// Delete objects of a tier by domain or age.
    #[command(
        after_help = "Deletes objects that match all given conditions, without confirmation: use --dry-run first.

Examples:
  kvcachepool-sidecar gc file:///var/lib/kvcachepool --older-than 30d --dry-run
  kvcachepool-sidecar gc file:///var/lib/kvcachepool --all-but-domain 0123456789abcdef/fedcba9876543210"
    )]
    Gc(tier::gc::Args),
    /// Delete all objects of the shared tiers, Redis, file system and S3, of a config.
    #[command(
        after_help = "Pods that share the Redis, the folder, or the prefix in the bucket, lose their objects too. There is no confirmation: use --dry-run first. Foreign
objects stay. A disk tier is not touched; empty its folder to delete it.

Examples:
  kvcachepool-sidecar purge --config config.v1.yaml --dry-run
  kvcachepool-sidecar purge --config config.v1.yaml"
    )]
    Purge(purge::Args),
    /// Keep Redis servers one cluster: form it, replace lost servers, and move slots.
    #[command(
        after_help = "The servers run with cluster-enabled, keep nothing on disk, and forget their id when they start: a server that starts is empty. Members
that are not listed lose their slots to the others and leave. One manager at a time. /readyz answers 200 while the cluster has the
desired shape, and otherwise says what is missing. The operator runs this for shared.redis.managed with mode Cluster. Stops on SIGTERM
or SIGINT; what was begun is finished by the next manager.

Example:
  kvcachepool-sidecar redis-cluster --shards 3 kv-0.kv:6379 kv-1.kv:6379 kv-2.kv:6379 kv-3.kv:6379 kv-4.kv:6379 kv-5.kv:6379"
    )]
    RedisCluster(redis_cluster::Args),
    /// Print a completion script for a shell.
    #[command(after_help = "Example:
  source <(kvcachepool-sidecar completions bash)")]
    Completions {
        /// The shell.
        shell: Shell,
    },
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
    /// Config file (YAML). Default: in an injected pod, its files; elsewhere every key has its default.
    #[arg(long, value_name = "FILE", env = "KVCACHEPOOL_CONFIG")]
    config: Option<PathBuf>,
    /// Config file of the whole pool. It is in effect while its generation is higher.
    #[arg(long, value_name = "FILE")]
    pool_config: Option<PathBuf>,
}

impl From<ConfigFiles> for Files {
    fn from(args: ConfigFiles) -> Self {
        let named = Self {
            pod: args.config,
            pool: args.pool_config,
        };
        if named.is_empty() {
            return Self::injected(Path::new(INJECTED_FOLDER)).unwrap_or(named);
        }
        named
    }
}

impl ConfigFiles {
    /// The config in effect; `None` if there is no file. Problems of a file are printed to standard error.
    fn read(&self) -> Result<Option<Config>, String> {
        let files = Files::from(self.clone());
        if files.is_empty() {
            return Ok(None);
        }
        let loaded = files.load().map_err(|e| e.to_string())?;
        for key in &loaded.unknown {
            eprintln!("warning: {key}");
        }
        if let Some(refused) = &loaded.pool_refused {
            eprintln!("warning: {refused}");
        }
        Ok(Some(loaded.config))
    }

    /// For commands that make no sense with defaults.
    fn required(&self) -> Result<Config, String> {
        let config = self.read()?;
        config.ok_or("no config: give --config FILE or set KVCACHEPOOL_CONFIG".into())
    }
}

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
            kvcachepool_gpu::cuda::peer::serve(&uuid);
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "kvcachepool-sidecar",
                &mut std::io::stdout(),
            );
            Ok(ExitCode::SUCCESS)
        }
        Command::Serve(args) => serve::main(args),
        Command::Init(args) => Ok(init::main(&args)),
        Command::Flush(args) => Ok(flush::main(&args)),
        Command::Config(args) => config::main(&args),
        Command::Check(args) => check::main(&args),
        Command::Doctor(args) => doctor::main(&args),
        Command::ExportConnector(args) => export::main(&args),
        Command::Status(args) => status::main(&args),
        Command::Size(args) => size::main(&args),
        Command::Inspect(args) => tier::inspect::main(&args),
        Command::Verify(args) => tier::verify::main(&args),
        Command::Gc(args) => tier::gc::main(&args),
        Command::Purge(args) => purge::main(&args),
        Command::RedisCluster(args) => redis_cluster::main(args),
    };
    outcome.unwrap_or_else(|message| {
        eprintln!("error: {message}");
        ExitCode::FAILURE
    })
}
