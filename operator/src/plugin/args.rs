//! Flags of the plugin, as kubectl has them.

use clap::{Args as Flags, Parser, Subcommand, ValueEnum};
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
  kubectl kvcachepool check llama-70b            # can pods of this pool reach its Redis and its bucket"
)]
pub struct Args {
    #[command(flatten)]
    pub kube: Kube,
    #[command(subcommand)]
    pub command: Command,
}

/// Which cluster and namespace.
#[derive(Debug, Flags)]
pub struct Kube {
    /// Namespace; without it that of the context.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Shows pools: whether they are ready, their pods and their hit rate.
    Status {
        /// Name of one pool, which is shown with its conditions, tiers and pods.
        pool: Option<String>,
        /// Pools of all namespaces.
        #[arg(short = 'A', long, conflicts_with = "pool")]
        all_namespaces: bool,
        /// How to print.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Walks from a pod's label to its vLLM and says where the way to the cache ends.
    Explain {
        /// The pod: NAME or pod/NAME.
        pod: String,
        /// How to print.
        #[arg(short, long, value_enum, default_value_t = Output::Text)]
        output: Output,
    },
    /// Has a Job of the pool's namespace look at its Redis and its bucket as the pool's pods would, and prints what they may not do.
    #[command(
        after_help = "The Job has the sidecar's image, config, Secrets and certificates, and runs as --service-account; it is taken away again. It needs the
rights to create and delete Jobs and to read pods, their logs, events and ConfigMaps of the namespace, which `edit` has. Exit code 1: a tier is
not ready, or nothing is known of the tiers: NotAccepted, NoSharedTier, ImageUnknown, JobNotCreated, PodNotCreated, ImageNotPullable,
NotStarted, NoReport, TimedOut."
    )]
    Check(Check),
}

/// Whose tiers are looked at, and as whom.
#[derive(Debug, Flags)]
pub struct Check {
    /// Name of the pool.
    pub pool: String,
    /// Service account of the pods that use the pool: where the bucket goes by the pod's own identity, it is this one's.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub service_account: String,
    /// Image of the sidecar, instead of that which new pods get.
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Longest wait, such as 90s or 2m.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "60s")]
    pub timeout: Duration,
    /// How to print.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

fn time(text: &str) -> Result<Duration, String> {
    let read: Result<jiff::SignedDuration, _> = text.parse();
    let time = read.map_err(|_| "write a time like 90s or 2m".to_owned())?;
    match Duration::try_from(time) {
        Ok(time) if (1..=3600).contains(&time.as_secs()) => Ok(time),
        _ => Err("a time here is one second at least and an hour at most".to_owned()),
    }
}

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    Text,
    /// For programs.
    Json,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_flags_go_together() {
        Args::command().debug_assert();
        let parsed = |args: &[&str]| Args::try_parse_from([&["x"], args].concat());
        assert!(parsed(&["explain", "pod/a", "-n", "b", "-o", "json"]).is_ok());
        assert!(parsed(&["-n", "b", "status"]).is_ok());
        assert!(parsed(&["status", "p", "-A"]).is_err());
        assert!(parsed(&["explain"]).is_err());
        assert!(parsed(&["check", "p", "--timeout", "2m", "-n", "b"]).is_ok());
        assert!(parsed(&["check", "p", "--timeout", "soon"]).is_err());
        assert!(parsed(&["check"]).is_err());
    }
}
