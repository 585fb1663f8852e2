//! The plugin's flags, like those of kubectl.

use clap::{Args as Flags, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kvcachepool_protocol::sizing::Flags as Sizing;
use std::path::PathBuf;
use std::time::Duration;

/// Shows pools of KV cache and explains why a pod is cached or not.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-kvcachepool",
    bin_name = "kubectl kvcachepool",
    version,
    after_help = "Examples:
  kubectl kvcachepool status                     # the pools of this namespace
  kubectl kvcachepool status llama-70b           # one pool with its conditions, tiers and pods
  kubectl kvcachepool explain pod/web-7f9c-x2x   # why is this pod (not) cached
  kubectl kvcachepool check llama-70b            # can pods of this pool reach its Redis and its bucket
  kubectl kvcachepool size config.json --pool llama-70b --tokens 32000   # what does a pod of this pool hold"
)]
pub struct Args {
    #[command(flatten)]
    pub kube: Kube,
    #[command(subcommand)]
    pub command: Command,
}

/// The cluster and the namespace.
#[derive(Debug, Flags)]
pub struct Kube {
    /// Namespace. Default: that of the context.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show pools: whether they are ready, their pods and their hit rates.
    Status {
        /// Name of a pool, to show its conditions, tiers and pods.
        pool: Option<String>,
        /// Show the pools of all namespaces.
        #[arg(short = 'A', long, conflicts_with = "pool")]
        all_namespaces: bool,
        /// Output format.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Check each step from a pod's label to its vLLM and report why the pod is, or is not, cached.
    Explain {
        /// The pod: NAME or pod/NAME.
        pod: String,
        /// Output format.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Check from a Job whether pods of a pool can use its Redis and its bucket.
    #[command(
        after_help = "The Job has the sidecar's image, config, Secrets and certificates, runs as --service-account, and is deleted afterwards. You need the
rights to create and delete Jobs and to read pods, their logs, events and ConfigMaps of the namespace, as in the role `edit`. Exit code 1:
a tier is not ready, or the check could not run: NotAccepted, NoSharedTier, ImageUnknown, JobNotCreated, PodNotCreated, ImageNotPullable,
NotStarted, NoReport, TimedOut."
    )]
    Check(Check),
    /// Compute the bytes of a model's KV per token and chunk, and what a pod of a pool holds of it.
    #[command(
        after_help = "Needs a cluster only with --pool. Exit code 1: the config lacks a field, the model is not known, or the pool is invalid."
    )]
    Size(Size),
    /// Print a completion script for a shell.
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// The tiers to check, and the service account.
#[derive(Debug, Flags)]
pub struct Check {
    /// Name of the pool.
    pub pool: String,
    /// Service account of the pods that use the pool. It matters if the bucket is authorized by the pod's identity.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub service_account: String,
    /// Image of the sidecar. Default: the image of new pods.
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Timeout, such as 90s or 2m.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "60s")]
    pub timeout: Duration,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// The model and the pool to compute sizes for.
#[derive(Debug, Flags)]
pub struct Size {
    /// The model's config.json, as on Hugging Face.
    #[arg(value_name = "MODEL-CONFIG")]
    pub model: PathBuf,
    #[command(flatten)]
    pub sizing: Sizing,
    /// Name of a pool. The memory and disk of its pods and its chunkTokens are used.
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

fn time(text: &str) -> Result<Duration, String> {
    let read: Result<jiff::SignedDuration, _> = text.parse();
    let time = read.map_err(|_| "write a time like 90s or 2m".to_owned())?;
    match Duration::try_from(time) {
        Ok(time) if (1..=3600).contains(&time.as_secs()) => Ok(time),
        _ => Err("write a time from 1s to 1h".to_owned()),
    }
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people.
    Text,
    /// JSON for programs.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_are_consistent() {
        Args::command().debug_assert();
        let parsed = |args: &[&str]| Args::try_parse_from([&["x"], args].concat());
        assert!(parsed(&["explain", "pod/a", "-n", "b", "-o", "json"]).is_ok());
        assert!(parsed(&["-n", "b", "status"]).is_ok());
        assert!(parsed(&["status", "p", "-A"]).is_err());
        assert!(parsed(&["explain"]).is_err());
        assert!(parsed(&["check", "p", "--timeout", "2m", "-n", "b"]).is_ok());
        assert!(parsed(&["check", "p", "--timeout", "soon"]).is_err());
        assert!(parsed(&["check"]).is_err());
        assert!(
            parsed(&[
                "size", "c.json", "--pool", "p", "--memory", "64Gi", "-n", "b"
            ])
            .is_ok()
        );
        for bad in [
            ["--memory", "1Ki"],
            ["--tp", "0"],
            ["--tokens", "0"],
            ["--dtype", "int8"],
            ["--block-size", "0"],
        ] {
            assert!(
                parsed(&[&["size", "c.json"][..], &bad].concat()).is_err(),
                "{bad:?}"
            );
        }
        assert!(parsed(&["completions", "zsh"]).is_ok());
    }
}
