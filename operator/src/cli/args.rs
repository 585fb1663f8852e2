//! The operator's flags.

use super::start::{Parts, StartError};
use crate::api::GpuAccess;
use crate::defaults::Defaults;
use crate::leader::Timing;
use crate::pki::{Lifetimes, Mode};
use crate::policy::Policy;
use crate::scope::Scope;
use clap::builder::NonEmptyStringValueParser;
use clap::{Parser, ValueEnum};
use kvcachepool_protocol::config::{ByteSize, LogFormat, LogLevel};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Default image of managed servers in its registry, for all architectures. The digest keeps their version until the operator's next one.
const REDIS_IMAGE: &str =
    "valkey/valkey:8.1.10@sha256:640c5e62cea04b6d6f2084232651d0cc70362d31f4f805e7be94dbed6855e8f2";
/// Default image of their exporters, as above.
const REDIS_EXPORTER_IMAGE: &str = "oliver006/redis_exporter:v1.84.0@sha256:7ef8e9c26638158fa4e7ad60df8c7e53d1919986753d6c1d2d1876b6ec38d87b";

/// The kvcachepool operator. It injects sidecars into pods with the label kvcachepool.io/pool and reconciles KVCachePools.
///
/// Every replica answers the webhook; the holder of a Lease reconciles. The operator uses the API server of KUBECONFIG, or of the cluster it
/// runs in. On SIGTERM it releases the Lease, reports "not ready", serves for --drain, and exits.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "kvcachepool-operator",
    version,
    after_help = "Ports: the webhook (TLS), and /healthz, /readyz and /metrics (plain HTTP). GET /readyz lists what is missing, one line each.

Examples:
  # in a pod made by the chart: everything comes from the environment
  kvcachepool-operator
  # on a machine beside a cluster, with a webhook configuration whose clientConfig.url is https://10.0.0.5:10250/inject
  kvcachepool-operator --namespace kvcachepool-system --image ghcr.io/me/kvcachepool:dev --webhook-name 10.0.0.5 --log-format text"
)]
pub struct Args {
    /// Namespace of the operator, its Lease, its Secret and the canary.
    #[arg(
        long,
        env = "POD_NAMESPACE",
        value_name = "NAME",
        default_value = "kvcachepool-system"
    )]
    pub namespace: String,
    /// Name of this replica.
    #[arg(
        long,
        env = "POD_NAME",
        value_name = "NAME",
        default_value = "kvcachepool-operator"
    )]
    pub name: String,
    /// Image of sidecars whose pool sets none. Use the operator's own image, by digest or version.
    #[arg(long, env = "KVCACHEPOOL_IMAGE", value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    pub image: String,
    /// Namespace of pools. Repeatable; the operator ignores all others. Default: all namespaces
    #[arg(
        long = "watch-namespace",
        env = "KVCACHEPOOL_WATCH_NAMESPACES",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub watch_namespaces: Vec<String>,
    /// Allow updates of sidecars in place. This needs the permission `patch` on pods.
    #[arg(long, env = "KVCACHEPOOL_ALLOW_POD_PATCH")]
    pub allow_pod_patch: bool,
    /// Interval at which the operator queries some sidecars of each pool and updates counts in its status; 1s to 60s.
    #[arg(long, env = "KVCACHEPOOL_STATUS_INTERVAL", value_name = "TIME", value_parser = seconds, default_value = "1m")]
    pub status_interval: Duration,

    /// Registry of the default images of managed servers and their exporters, such as a mirror.
    #[arg(long, env = "KVCACHEPOOL_IMAGE_REGISTRY", value_name = "REGISTRY", value_parser = NonEmptyStringValueParser::new(), default_value = "docker.io")]
    pub image_registry: String,
    /// Image of managed servers whose pool sets none. Default: Valkey, by its digest
    #[arg(long, env = "KVCACHEPOOL_REDIS_IMAGE", value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    pub redis_image: Option<String>,
    /// Image of exporters of managed servers whose pool sets none. Default: redis_exporter, by its digest
    #[arg(long, env = "KVCACHEPOOL_REDIS_EXPORTER_IMAGE", value_name = "IMAGE", value_parser = NonEmptyStringValueParser::new())]
    pub redis_exporter_image: Option<String>,
    /// User and group of managed servers; `platform`: the platform assigns them, as OpenShift does.
    #[arg(
        long,
        env = "KVCACHEPOOL_REDIS_RUN_AS_USER",
        value_name = "UID",
        default_value = "65532"
    )]
    pub redis_run_as_user: RunAsUser,
    /// Secrets for pulling the images of every pool, besides its own. Each namespace with pools must have them. Repeatable
    #[arg(
        long = "image-pull-secret",
        env = "KVCACHEPOOL_IMAGE_PULL_SECRETS",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub image_pull_secrets: Vec<String>,
    /// Policy: largest memory tier of a pod. Pools beyond a policy are not accepted. Default: no limit
    #[arg(
        long,
        env = "KVCACHEPOOL_POLICY_MAX_MEMORY_PER_POD",
        value_name = "SIZE"
    )]
    pub policy_max_memory_per_pod: Option<ByteSize>,
    /// Policy: allowed image of sidecars, managed servers and exporters, besides the defaults; a `*` at the end matches any rest. Repeatable. Default: all
    #[arg(
        long = "policy-image",
        env = "KVCACHEPOOL_POLICY_IMAGES",
        value_name = "IMAGE",
        value_delimiter = ','
    )]
    pub policy_images: Vec<String>,
    /// Policy: allowed `sidecar.gpuAccess` of pools, besides None. Repeatable. Default: all
    #[arg(long, env = "KVCACHEPOOL_POLICY_GPU_ACCESS", value_name = "ACCESS", value_delimiter = ',', value_parser = gpu_access)]
    pub policy_gpu_access: Vec<GpuAccess>,
    /// Policy: allowed service account of Jobs that purge a pool, besides default. Repeatable. Default: all
    #[arg(
        long = "policy-service-account",
        env = "KVCACHEPOOL_POLICY_SERVICE_ACCOUNTS",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub policy_service_accounts: Vec<String>,

    /// Address of the webhook.
    #[arg(
        long,
        env = "KVCACHEPOOL_WEBHOOK_LISTEN",
        value_name = "ADDRESS:PORT",
        default_value = "[::]:10250"
    )]
    pub webhook_listen: SocketAddr,
    /// Name or IP address by which API servers call the webhook. Repeatable; the certificate contains all of them.
    /// Default: `kvcachepool-webhook.<namespace>.svc`, also with `.cluster.local`
    #[arg(
        long = "webhook-name",
        env = "KVCACHEPOOL_WEBHOOK_NAMES",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub webhook_names: Vec<String>,
    /// MutatingWebhookConfiguration whose caBundle the operator maintains.
    #[arg(
        long,
        env = "KVCACHEPOOL_WEBHOOK_CONFIGURATION",
        value_name = "NAME",
        default_value = "kvcachepool-injector"
    )]
    pub webhook_configuration: String,
    /// Address of /healthz, /readyz and /metrics.
    #[arg(
        long,
        env = "KVCACHEPOOL_HEALTH_LISTEN",
        value_name = "ADDRESS:PORT",
        default_value = "[::]:8080"
    )]
    pub health_listen: SocketAddr,

    /// Source of the webhook's certificate: the operator's own authority, cert-manager, or external files.
    #[arg(long, env = "KVCACHEPOOL_PKI_MODE", value_enum, default_value_t = PkiMode::Own)]
    pub pki_mode: PkiMode,
    /// Folder with tls.crt and tls.key, reloaded when they change. Only for cert-manager and external.
    #[arg(
        long,
        env = "KVCACHEPOOL_PKI_FOLDER",
        value_name = "FOLDER",
        default_value = "/etc/kvcachepool/webhook"
    )]
    pub pki_folder: PathBuf,
    /// Secret with the operator's own certificate authorities.
    #[arg(
        long,
        env = "KVCACHEPOOL_PKI_SECRET",
        value_name = "NAME",
        default_value = "kvcachepool-webhook-ca"
    )]
    pub pki_secret: String,
    /// Lifetime of a certificate authority. It is renewed when a third of it is left.
    #[arg(long, env = "KVCACHEPOOL_PKI_AUTHORITY_LIFETIME", value_name = "TIME", value_parser = seconds, default_value = "8760h")]
    pub pki_authority_lifetime: Duration,
    /// Lifetime of a certificate. It is renewed when a third of it is left.
    #[arg(long, env = "KVCACHEPOOL_PKI_LEAF_LIFETIME", value_name = "TIME", value_parser = seconds, default_value = "72h")]
    pub pki_leaf_lifetime: Duration,
    /// Time until every API server uses a changed caBundle. A new authority signs nothing before.
    #[arg(long, env = "KVCACHEPOOL_PKI_SETTLE", value_name = "TIME", value_parser = seconds, default_value = "2m")]
    pub pki_settle: Duration,
    /// Interval between checks of certificate, Secret and caBundle.
    #[arg(long, env = "KVCACHEPOOL_PKI_INTERVAL", value_name = "TIME", value_parser = seconds, default_value = "10s")]
    pub pki_interval: Duration,

    /// Name of the Lease of the reconciling replica.
    #[arg(
        long,
        env = "KVCACHEPOOL_LEASE",
        value_name = "NAME",
        default_value = "kvcachepool-operator"
    )]
    pub lease: String,
    /// Duration of the Lease: a leader that does not renew it for this long is replaced; 6s to 60s.
    #[arg(long, env = "KVCACHEPOOL_LEASE_DURATION", value_name = "TIME", value_parser = seconds, default_value = "12s")]
    pub lease_duration: Duration,

    /// Time to serve after SIGTERM, while the removal of this replica's endpoint spreads.
    #[arg(long, env = "KVCACHEPOOL_DRAIN", value_name = "TIME", value_parser = seconds, default_value = "5s")]
    pub drain: Duration,
    /// Log level.
    #[arg(long, env = "KVCACHEPOOL_LOG_LEVEL", value_enum, default_value_t = LogLevel::Info)]
    pub log_level: LogLevel,
    /// Log format.
    #[arg(long, env = "KVCACHEPOOL_LOG_FORMAT", value_enum, default_value_t = LogFormat::Json)]
    pub log_format: LogFormat,
}

/// Source of certificates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum PkiMode {
    /// The operator's own certificate authority.
    #[value(name = "self")]
    Own,
    /// Files of cert-manager. Its cainjector writes the caBundle.
    CertManager,
    /// Files and a caBundle that the user manages.
    External,
}

/// User of managed servers. `None` = the platform assigns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunAsUser(Option<u32>);

impl FromStr for RunAsUser {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let user = || text.parse().ok().filter(|user| *user > 0);
        match text {
            "platform" => Ok(Self(None)),
            _ => match user() {
                Some(user) => Ok(Self(Some(user))),
                None => Err("write a user id above 0, or platform"),
            },
        }
    }
}

/// Parses a value of `sidecar.gpuAccess`.
fn gpu_access(text: &str) -> Result<GpuAccess, String> {
    let known = serde_json::from_value(text.into());
    known.map_err(|_| "write None, VisibleDevices or ResourceClaim".to_owned())
}

/// Parses a duration like 90s, 2m, 1h30m.
fn seconds(text: &str) -> Result<Duration, String> {
    let read: Result<jiff::SignedDuration, _> = text.parse();
    let time = read.map_err(|_| "write a time like 90s, 2m or 1h30m".to_owned())?;
    match Duration::try_from(time) {
        Ok(time) if time.as_secs() > 0 && time.as_secs() < 100 * 365 * 24 * 3600 => Ok(time),
        _ => Err("write a time from 1s to 100 years".to_owned()),
    }
}

impl Args {
    /// Converts the flags, or returns an error if they contradict each other.
    pub fn check(self) -> Result<Parts, StartError> {
        let lifetimes = Lifetimes {
            authority: self.pki_authority_lifetime.as_secs(),
            leaf: self.pki_leaf_lifetime.as_secs(),
            settle: self.pki_settle.as_secs(),
        };
        let wrong = |message: &str| Err(StartError::Flags(message.to_owned()));
        let interval = self.pki_interval.as_secs();
        if lifetimes.authority / 3 < 2 * (lifetimes.settle + 2 * interval) {
            return wrong(
                "--pki-authority-lifetime is too short: it must be at least 6 * (--pki-settle + 2 * --pki-interval)",
            );
        }
        if lifetimes.leaf / 3 < 2 * interval {
            return wrong(
                "--pki-leaf-lifetime is too short: it must be at least 6 * --pki-interval",
            );
        }
        if self.status_interval.as_secs() > 60 {
            return wrong("--status-interval must be at most 60s");
        }
        if !(6..=60).contains(&self.lease_duration.as_secs()) {
            return wrong("--lease-duration must be from 6s to 60s");
        }
        let names = match self.webhook_names.is_empty() {
            false => self.webhook_names.clone(),
            true => ["svc", "svc.cluster.local"]
                .map(|end| format!("kvcachepool-webhook.{}.{end}", self.namespace))
                .to_vec(),
        };
        let image = |own: &Option<String>, default: &str| match own {
            Some(image) => image.clone(),
            None => format!("{}/{default}", self.image_registry),
        };
        let random = fastrand::u64(..);
        Ok(Parts {
            // No other process has this name, including this pod before a restart.
            identity: format!("{}_{random:016x}", self.name),
            defaults: Defaults {
                image: self.image.clone(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
                namespace: self.namespace.clone(),
                redis_image: image(&self.redis_image, REDIS_IMAGE),
                redis_exporter_image: image(&self.redis_exporter_image, REDIS_EXPORTER_IMAGE),
                redis_run_as_user: self.redis_run_as_user.0,
                image_pull_secrets: self.image_pull_secrets.clone(),
                policy: Policy {
                    max_memory: self.policy_max_memory_per_pod,
                    images: self.policy_images.clone(),
                    gpu_access: self.policy_gpu_access.clone(),
                    service_accounts: self.policy_service_accounts.clone(),
                },
            },
            scope: Scope::new(self.watch_namespaces.clone()),
            webhook_names: names,
            pki_mode: match self.pki_mode {
                PkiMode::Own => Mode::Own {
                    secret: self.pki_secret.clone(),
                },
                PkiMode::CertManager => Mode::CertManager {
                    folder: self.pki_folder.clone(),
                },
                PkiMode::External => Mode::External {
                    folder: self.pki_folder.clone(),
                },
            },
            lifetimes,
            timing: Timing {
                lease_duration: self.lease_duration,
                renew_deadline: self.lease_duration * 2 / 3,
                retry_period: self.lease_duration / 6,
            },
            args: self,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn check(flags: &[&str]) -> Result<Parts, String> {
        let args = ["kvcachepool-operator", "--image", "i"];
        let args = Args::try_parse_from(args.iter().chain(flags)).map_err(|e| e.to_string())?;
        args.check().map_err(|e| e.to_string())
    }

    #[test]
    fn every_flag_has_a_help_text_and_an_environment_variable() {
        Args::command().debug_assert();
        for arg in Args::command().get_arguments() {
            assert!(arg.get_env().is_some(), "{}", arg.get_id());
            assert!(arg.get_help().is_some(), "{}", arg.get_id());
        }
    }

    #[test]
    fn the_defaults_are_consistent_and_replace_a_killed_leader_within_20_s() {
        let parts = check(&[]).unwrap();
        assert_eq!(parts.timing, Timing::default());
        assert_eq!(parts.lifetimes, Lifetimes::default());
        assert!(
            parts.timing.lease_duration + 2 * parts.timing.retry_period < Duration::from_secs(20)
        );
        assert_eq!(
            parts.webhook_names[0],
            "kvcachepool-webhook.kvcachepool-system.svc"
        );
    }

    #[test]
    fn default_images_are_named_by_their_digest_and_come_from_the_registry() {
        let images = |flags: &[&str]| {
            let defaults = check(flags).unwrap().defaults;
            [defaults.redis_image, defaults.redis_exporter_image]
        };
        for image in images(&[]) {
            let (name, digest) = image.split_once("@sha256:").unwrap();
            assert!(name.starts_with("docker.io/"), "{image}");
            assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()));
        }
        let mirror = ["--image-registry", "mirror.example:5000"];
        assert!((images(&mirror).iter()).all(|image| image.starts_with("mirror.example:5000/")));
        let own = [&mirror[..], &["--redis-image", "own:1"]].concat();
        assert_eq!(images(&own)[0], "own:1");
    }

    #[test]
    fn names_differ_between_two_starts_of_one_pod() {
        assert_ne!(check(&[]).unwrap().identity, check(&[]).unwrap().identity);
    }

    #[test]
    fn a_policy_is_read_from_flags_with_lists() {
        let flags = [
            "--policy-max-memory-per-pod=64Gi",
            "--policy-image=a/*,b:1",
            "--policy-gpu-access=ResourceClaim",
            "--policy-service-account=cleaner",
        ];
        let policy = check(&flags).unwrap().defaults.policy;
        assert_eq!(policy.max_memory, Some(ByteSize(64 << 30)));
        assert_eq!(policy.images, ["a/*", "b:1"]);
        assert_eq!(policy.gpu_access, [GpuAccess::ResourceClaim]);
        assert_eq!(policy.service_accounts, ["cleaner"]);
        assert!(check(&["--policy-gpu-access=All"]).is_err());
    }

    #[test]
    fn managed_servers_have_a_user_or_that_of_the_platform() {
        let user = |flags: &[&str]| check(flags).map(|parts| parts.defaults.redis_run_as_user);
        assert_eq!(user(&[]), Ok(Some(65532)));
        assert_eq!(user(&["--redis-run-as-user=1000"]), Ok(Some(1000)));
        assert_eq!(user(&["--redis-run-as-user=platform"]), Ok(None));
        assert!(user(&["--redis-run-as-user=0"]).is_err());
    }

    #[test]
    fn inconsistent_times_are_refused_with_the_flag_to_change() {
        for (flags, expected) in [
            (["--lease-duration", "5s"], "must be from 6s to 60s"),
            (["--status-interval", "2m"], "at most 60s"),
            (
                ["--pki-authority-lifetime", "10s"],
                "--pki-authority-lifetime is too short",
            ),
            (
                ["--pki-leaf-lifetime", "50s"],
                "--pki-leaf-lifetime is too short",
            ),
            (["--drain", "soon"], "write a time like"),
            (["--drain", "0s"], "write a time from 1s"),
        ] {
            let Err(message) = check(&flags) else {
                panic!("{flags:?} was taken");
            };
            assert!(message.contains(expected), "{message}");
        }
    }
}
