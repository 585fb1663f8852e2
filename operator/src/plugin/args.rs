//! Flags of the plugin, as kubectl has them.

use clap::{Args as Flags, Parser, Subcommand, ValueEnum};

/// Shows pools of KV cache and explains why a pod is cached or not.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-kvcachepool",
    bin_name = "kubectl kvcachepool",
    version,
    after_help = "Examples:
  kubectl kvcachepool status                     # the pools of this namespace
  kubectl kvcachepool status llama-70b           # one pool with its conditions, tiers and pods
  kubectl kvcachepool explain pod/web-7f9c-x2x   # why is this pod (not) cached"
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
    }
}
