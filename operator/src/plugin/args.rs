//! The plugin's flags, like those of kubectl.

use super::read::ReadError;
use clap::{Args as Flags, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use kvcachepool_protocol::sizing::Flags as Sizing;
use std::path::PathBuf;
use std::time::Duration;

/// Shows and operates pools of KV cache, and explains why a pod is cached or not.
#[derive(Debug, Parser)]
#[command(
    name = "kubectl-kvcachepool",
    bin_name = "kubectl kvcachepool",
    version,
    after_help = "Examples:
  kubectl kvcachepool status                     # the pools of this namespace
  kubectl kvcachepool status llama-70b           # one pool with its conditions, tiers and pods
  kubectl kvcachepool explain pod/web-7f9c-x2x   # why is this pod (not) cached
  kubectl kvcachepool check llama-70b            # can pods of this pool use its Redis, file system and bucket
  kubectl kvcachepool size config.json --pool llama-70b --tokens 32000   # what does a pod of this pool hold
  kubectl kvcachepool logs llama-70b --since 10m # the sidecars of a pool
  kubectl kvcachepool doctor                     # does the installation work
  kubectl kvcachepool report llama-70b           # an archive for a bug report, without secrets"
)]
pub struct Args {
    #[command(flatten)]
    pub kube: Kube,
    #[command(subcommand)]
    pub command: Command,
}

/// The cluster, the namespace and the user, as for kubectl.
#[derive(Debug, Clone, Default, Flags)]
pub struct Kube {
    /// Namespace. Default: that of the context.
    #[arg(short, long, global = true, value_name = "NAME")]
    pub namespace: Option<String>,
    /// Path of the kubeconfig. Default: the files of KUBECONFIG, or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
    /// Cluster of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub cluster: Option<String>,
    /// User of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub user: Option<String>,
    /// User to impersonate.
    #[arg(long = "as", global = true, value_name = "USER")]
    pub impersonate: Option<String>,
    /// Group to impersonate. Repeatable.
    #[arg(
        long = "as-group",
        global = true,
        value_name = "GROUP",
        requires = "impersonate"
    )]
    pub impersonate_groups: Vec<String>,
    /// Timeout of a request to the API server, such as 30s. 0 disables it. A followed log that writes nothing for this long ends.
    #[arg(long, global = true, value_name = "TIME", value_parser = duration, default_value = "0")]
    pub request_timeout: Duration,
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
    /// Check from a Job whether pods of a pool can use its Redis, file system and bucket.
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
    /// Check the installation: API server, CRD, operator, leader, webhook, certificate, rights, versions, pools.
    #[command(
        after_help = "Changes nothing: the pod that checks the webhook is created by dry run. A finding is ok, warn, fail or unknown; unknown means that you lack a
right, which the finding names. Exit code 1: a finding is fail."
    )]
    Doctor(Doctor),
    /// Print the logs of the sidecars of a pool or of a pod, or of the operator.
    #[command(
        after_help = "Lines have the pod's name in front if there are several pods. A pod whose log cannot be read is reported on standard error, the others are
printed. Exit code 1: a log could not be read."
    )]
    Logs(Logs),
    /// Write an archive for a bug report: pools, pods, events, logs, statuses, metrics and versions, without secrets.
    #[command(
        after_help = "Secrets are not read. Values of environment variables, annotations of other products, credentials in arguments, in URLs and in headers are
replaced by <redacted>. Logs are copied, with credentials in URLs replaced. Look through the archive before you publish it: names of pods,
images, hosts and buckets remain. What cannot be read is listed in errors.txt of the archive, and the rest is written. Exit code 1: the
archive cannot be written."
    )]
    Report(Report),
    /// Let the sidecars of a pool read their config and credentials now, instead of within one or two minutes.
    #[command(
        after_help = "Kubelets update the files of ConfigMaps and Secrets in a pod about once a minute, and at once when the pod changes. The command sets the
annotation kvcachepool.io/reloaded-at of the pods, and waits until each sidecar reports the config of the pool. You need the rights
to patch pods and to get pods/proxy. Exit code 1: a sidecar did not report the config within --timeout, or rejected it."
    )]
    Reload(Reload),
    /// Pause injection: new pods of a pool get no sidecar. Running sidecars stay.
    #[command(
        after_help = "Sets spec.injection.mode of the pool to Disabled. A tool that applies pools from a repository may set it back: change the repository instead."
    )]
    Pause(Injection),
    /// Resume injection: new pods of a pool get a sidecar.
    #[command(
        after_help = "Sets spec.injection.mode of the pool to Enabled. Owners for which the operator itself paused injection are listed; they stay paused until their
cause is gone."
    )]
    Resume(Injection),
    /// Delete the objects of a pool in its Redis, file system and bucket, from a Job.
    #[command(
        after_help = "--dry-run counts the objects and deletes nothing. Without it --yes is needed. A tier that another pool uses too is left alone; that needs the
right to list the pools of all namespaces. The memory and the disks of pods are not touched. End the pods of the pool before, because they
write new objects. Exit code 1: a tier could not be purged, or the Job could not run, with the errors of `check`."
    )]
    Purge(Purge),
    /// Print a completion script for a shell.
    #[command(visible_alias = "completion")]
    Completions {
        /// The shell.
        shell: Shell,
    },
}

/// Where the operator runs.
#[derive(Debug, Flags)]
pub struct OperatorNamespace {
    /// Namespace of the operator. Default: that of the webhook's Service, or kvcachepool-system if you may not read the webhook.
    #[arg(long, value_name = "NAME")]
    pub operator_namespace: Option<String>,
}

/// What to check.
#[derive(Debug, Flags)]
pub struct Doctor {
    #[command(flatten)]
    pub operator: OperatorNamespace,
    /// Check the pools of all namespaces.
    #[arg(short = 'A', long)]
    pub all_namespaces: bool,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// Whose logs, and which lines.
#[derive(Debug, Flags)]
pub struct Logs {
    /// A pool, or a pod as pod/NAME.
    #[arg(
        value_name = "POOL|pod/NAME",
        required_unless_present = "of_operator",
        conflicts_with = "of_operator"
    )]
    pub of: Option<String>,
    /// Print the logs of the operator.
    #[arg(long = "operator")]
    pub of_operator: bool,
    #[command(flatten)]
    pub operator: OperatorNamespace,
    /// Continue with new lines until the containers end.
    #[arg(short, long, conflicts_with = "previous")]
    pub follow: bool,
    /// Lines of the last time only, such as 10m.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub since: Option<Duration>,
    /// Last lines of each pod only.
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(u32))]
    pub tail: Option<u32>,
    /// Logs of the containers before their last restart.
    #[arg(short, long)]
    pub previous: bool,
    /// Add the time of each line.
    #[arg(long)]
    pub timestamps: bool,
    /// Maximum number of pods.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000), default_value_t = 50)]
    pub max_pods: u16,
}

/// What the archive has.
#[derive(Debug, Flags)]
pub struct Report {
    /// Name of a pool. Default: all pools of the namespace.
    pub pool: Option<String>,
    /// The pools of all namespaces.
    #[arg(short = 'A', long, conflicts_with = "pool")]
    pub all_namespaces: bool,
    #[command(flatten)]
    pub operator: OperatorNamespace,
    /// Path of the archive. Default: kvcachepool-report-TIME.tar.gz. An existing file is not overwritten.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Log lines of the last time only.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "24h")]
    pub since: Duration,
    /// Last log lines of each container only.
    #[arg(long, value_name = "LINES", value_parser = clap::value_parser!(u32), default_value_t = 5000)]
    pub tail: u32,
    /// Maximum number of pods of a pool with log, status and metrics. Those that are not ready come first.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000), default_value_t = 20)]
    pub max_pods: u16,
}

/// What to reload.
#[derive(Debug, Flags)]
pub struct Reload {
    /// A pool, or a pod as pod/NAME.
    #[arg(value_name = "POOL|pod/NAME")]
    pub of: String,
    /// Longest wait for the sidecars, such as 90s or 2m.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "60s")]
    pub timeout: Duration,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// A pool whose injection is paused or resumed.
#[derive(Debug, Flags)]
pub struct Injection {
    /// Name of the pool.
    pub pool: String,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
}

/// What to purge.
#[derive(Debug, Flags)]
pub struct Purge {
    /// Name of the pool.
    pub pool: String,
    /// Count the objects, and delete nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Confirm the deletion.
    #[arg(long, required_unless_present = "dry_run")]
    pub yes: bool,
    /// Service account of the pods that use the pool. Default: the pool's annotation kvcachepool.io/purge-service-account, or `default`.
    #[arg(long, value_name = "NAME")]
    pub service_account: Option<String>,
    /// Image of the sidecar. Default: the image of new pods.
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Timeout, such as 90s or 2m.
    #[arg(long, value_name = "TIME", value_parser = time, default_value = "10m")]
    pub timeout: Duration,
    /// Output format.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    pub output: Output,
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
    match duration(text)? {
        time if (1..=3600).contains(&time.as_secs()) => Ok(time),
        _ => Err("write a time from 1s to 1h".to_owned()),
    }
}

/// A time like kubectl's: with a unit, or 0.
fn duration(text: &str) -> Result<Duration, String> {
    let wanted = || "write a time like 90s, 2m or 24h".to_owned();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let read: jiff::SignedDuration = text.parse().map_err(|_| wanted())?;
    Duration::try_from(read).map_err(|_| wanted())
}

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Text for people.
    Text,
    /// JSON for programs.
    Json,
    /// The same as YAML.
    Yaml,
}

impl Output {
    /// A value in this format; `text` formats it for people.
    pub fn format<T: serde::Serialize>(
        self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<String, ReadError> {
        Ok(match self {
            Self::Text => text(value),
            Self::Json => serde_json::to_string_pretty(value)?,
            Self::Yaml => serde_yaml::to_string(value)?,
        })
    }
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
        assert!(parsed(&["completion", "bash"]).is_ok());
        for good in [
            "logs p --since 10m --tail 5 -f",
            "logs pod/a -p",
            "logs --operator --operator-namespace x",
            "status -o yaml --kubeconfig f --cluster c --user u --request-timeout 5s",
            "status --as me --as-group a --as-group b --request-timeout 0",
            "purge p --dry-run",
            "purge p --yes",
            "reload pod/a --timeout 5s",
            "pause p",
            "report -A --file x.tar.gz",
            "doctor -A -o json",
        ] {
            let words: Vec<_> = good.split(' ').collect();
            assert!(parsed(&words).is_ok(), "{good}");
        }
        for bad in [
            "logs",
            "logs p --operator",
            "logs p -f -p",
            "logs p --since soon",
            "logs p --max-pods 0",
            "status --as-group a",
            "purge p",
            "report p -A",
            "status -o xml",
        ] {
            let words: Vec<_> = bad.split(' ').collect();
            assert!(parsed(&words).is_err(), "{bad}");
        }
    }
}
