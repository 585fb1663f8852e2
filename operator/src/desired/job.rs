//! Jobs for a pool's shared tiers. They run like the pool's pods, because neither the operator nor a user's machine has the credentials or
//! the network access. A Job is not part of a pool's desired state: it is created on request, ends, and is deleted by its TTL.

use super::{labels, settings};
use crate::api::{KVCachePool, Problem};
use crate::defaults::Defaults;
use crate::inject::{Settings, tool};
use crate::names;
use k8s_openapi::Resource;
use k8s_openapi::api::batch::v1::Job;
use kube::ResourceExt;
use kvcachepool_protocol::config::{self, Config};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

/// Attempts of a purge.
const ATTEMPTS: u32 = 3;
/// Longest time of all attempts of a purge together.
pub const PURGE_TIME_MAX: Duration = Duration::from_secs(600);
/// How long a finished purge is kept for inspection.
const PURGE_LEFT: Duration = Duration::from_secs(3600);
/// How long a finished check is kept if the plugin does not delete it.
const CHECK_LEFT: Duration = Duration::from_secs(60);

/// The Job that checks each tier once. `chance` is the random suffix of its name.
pub fn check(
    pool: &KVCachePool,
    settings: &Settings,
    account: &str,
    time_max: Duration,
    chance: &str,
) -> Value {
    let name = format!("kvcp-check-{}-{chance}", pool.name_any());
    let template = tool(settings, &["check", "--output", "json"], account);
    job(pool, &name, 1, time_max, CHECK_LEFT, template)
}

/// The purge of a deleted pool.
#[derive(Debug)]
pub struct Purge {
    /// The Job. `None` if it has nothing to purge.
    pub job: Option<Value>,
    /// Tiers that the Job leaves alone, and the pool that shares each.
    pub shared: Vec<(&'static str, String)>,
}

/// Name of the Job that purges a pool's tiers. A later pool with the same name has another Job name.
pub fn purge_name(pool: &KVCachePool) -> String {
    let uid = pool.uid().unwrap_or_default();
    let part = uid.split('-').next().unwrap_or_default();
    format!("kvcp-purge-{}-{part}", pool.name_any())
}

/// Whether the pool's objects are deleted with it. A managed Redis is deleted in any case.
pub fn purges(pool: &KVCachePool) -> bool {
    let shared = &pool.spec.shared;
    let external = shared.redis.as_ref().is_some_and(|r| r.external.is_some());
    pool.spec.deletion_policy == crate::api::DeletionPolicy::Delete
        && (external || shared.file_system.is_some() || shared.s3.is_some())
}

/// The purge of a deleted pool. Objects do not record their pool, so a tier that one of `others` uses too is left alone. An `unreadable`
/// pool may use every tier.
pub fn purge(
    pool: &KVCachePool,
    others: &[&KVCachePool],
    unreadable: Option<&str>,
    defaults: &Defaults,
) -> Result<Purge, Vec<Problem>> {
    let mut settings = settings(pool, defaults)?;
    let shared = keep_shared(pool, &mut settings, others, unreadable);
    if servers(pool).is_empty() {
        // Managed servers are deleted with the pool.
        settings.config.redis = config::Redis::default();
    }
    let left = has_shared_tier(&settings.config);
    let job = left.then(|| {
        let account = purge_account(pool);
        let template = tool(&settings, &["purge"], account);
        let name = purge_name(pool);
        job(pool, &name, ATTEMPTS, PURGE_TIME_MAX, PURGE_LEFT, template)
    });
    Ok(Purge { job, shared })
}

/// The purge of an existing pool, on request: its result is one line of JSON per tier in the Job's log. `chance` is the random suffix of
/// the Job's name. The pool's managed servers are purged too.
pub fn purge_now(
    pool: &KVCachePool,
    mut settings: Settings,
    (others, unreadable): (&[&KVCachePool], Option<&str>),
    (account, dry_run): (Option<&str>, bool),
    time_max: Duration,
    chance: &str,
) -> Purge {
    let shared = keep_shared(pool, &mut settings, others, unreadable);
    let left = has_shared_tier(&settings.config);
    let job = left.then(|| {
        let command = ["purge", "--output", "json", "--dry-run"];
        let command = if dry_run { &command } else { &command[..3] };
        let account = account.unwrap_or(purge_account(pool));
        let template = tool(&settings, command, account);
        let name = format!("kvcp-purge-{}-{chance}", pool.name_any());
        job(pool, &name, 1, time_max, CHECK_LEFT, template)
    });
    Purge { job, shared }
}

/// The service account that purges the pool's tiers.
fn purge_account(pool: &KVCachePool) -> &str {
    let named = pool.annotations().get(names::PURGE_ACCOUNT);
    named.map_or("default", |name| name)
}

/// Removes tiers that another pool uses too from the settings. Returns them, each with the pool that shares it.
fn keep_shared(
    pool: &KVCachePool,
    settings: &mut Settings,
    others: &[&KVCachePool],
    unreadable: Option<&str>,
) -> Vec<(&'static str, String)> {
    let mut shared = Vec::new();
    let mut sharer = |tier, is: &dyn Fn(&KVCachePool) -> bool| {
        let found = others.iter().find(|other| is(other));
        let name = found.map(|o| format!("{}/{}", o.namespace().unwrap_or_default(), o.name_any()));
        let name = name.or(unreadable.map(str::to_owned));
        shared.extend(name.clone().map(|name| (tier, name)));
        name.is_some()
    };
    let servers = servers(pool);
    if !servers.is_empty()
        && sharer("redis", &|other| {
            !servers.is_disjoint(&self::servers(other))
        })
    {
        settings.config.redis = config::Redis::default();
    }
    let claim = claim(pool);
    if claim.is_some() && sharer("filesystem", &|other| self::claim(other) == claim) {
        settings.config.file_system = config::FileSystem::default();
        settings.claim = None;
    }
    let folder = folder(pool);
    if folder.is_some() && sharer("s3", &|other| self::folder(other) == folder) {
        settings.config.s3 = config::S3::default();
    }
    shared
}

/// Hosts and ports of an external Redis. Database numbers are ignored: the same server with another number counts as shared, and is not
/// purged.
fn servers(pool: &KVCachePool) -> BTreeSet<String> {
    let redis = pool.spec.shared.redis.as_ref();
    let external = redis.and_then(|redis| redis.external.as_ref());
    let urls = external.map(|e| e.url.iter().chain(&e.urls));
    let server = |url: &str| -> Vec<String> {
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        let port = if scheme == "redis-sentinel" {
            26379
        } else {
            6379
        };
        let hosts = rest.split(['/', '?']).next().unwrap_or_default();
        let hosts = hosts.split(',');
        let named = hosts.map(|host| {
            let host = host.to_ascii_lowercase();
            let after = host.rsplit(']').next().unwrap_or_default();
            match after.contains(':') {
                true => host,
                false => format!("{host}:{port}"),
            }
        });
        named.collect()
    };
    urls.into_iter()
        .flatten()
        .flat_map(|url| server(url))
        .collect()
}

/// Whether the config has a tier that all pods share.
pub fn has_shared_tier(config: &Config) -> bool {
    let (redis, s3) = (&config.redis.urls, &config.s3.bucket);
    !redis.is_empty() || config.file_system.path.is_some() || !s3.is_empty()
}

/// Namespace and name of the claim with the file system tier.
fn claim(pool: &KVCachePool) -> Option<(Option<&str>, &str)> {
    let namespace = pool.metadata.namespace.as_deref();
    super::settings::claim(pool).map(|claim| (namespace, claim))
}

/// Bucket and prefix, independent of the endpoint, because one service can have many names.
fn folder(pool: &KVCachePool) -> Option<(&str, &str)> {
    let s3 = pool.spec.shared.s3.as_ref()?;
    Some((&s3.bucket, &s3.prefix))
}

fn job(
    pool: &KVCachePool,
    name: &str,
    attempts: u32,
    time_max: Duration,
    left: Duration,
    template: Value,
) -> Value {
    // No owner reference: a foreground deletion of the pool would delete the Job too.
    json!({
        "apiVersion": Job::API_VERSION,
        "kind": Job::KIND,
        "metadata": {"name": name, "namespace": pool.namespace(), "labels": labels(pool)},
        "spec": {
            "backoffLimit": attempts - 1,
            "activeDeadlineSeconds": time_max.as_secs(),
            "ttlSecondsAfterFinished": left.as_secs(),
            "template": template,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::{defaults, pool};

    fn of(spec: Value) -> KVCachePool {
        pool(spec)
    }

    fn another(spec: Value) -> KVCachePool {
        let mut pool = pool(spec);
        pool.metadata.name = Some("other".to_owned());
        pool.metadata.namespace = Some("elsewhere".to_owned());
        pool
    }

    fn s3(prefix: &str) -> Value {
        json!({"bucket": "kv-cache", "prefix": prefix, "auth": {"secretName": "keys"}})
    }

    fn redis(url: &str) -> Value {
        json!({"external": {"url": url, "auth": {"secretName": "redis"}}})
    }

    /// Purged tiers, and tiers that another pool shares.
    fn purged(pool: &KVCachePool, other: &KVCachePool) -> (Vec<&'static str>, Vec<&'static str>) {
        let purge = purge(pool, &[other], None, &defaults()).unwrap();
        let job = purge.job.unwrap_or_default();
        let text = job["spec"]["template"]["metadata"]["annotations"][names::CONFIG].as_str();
        let config = text.map(|text| config::Config::parse(text, true).unwrap().0);
        let config = config.unwrap_or_default();
        let redis = (!config.redis.urls.is_empty()).then_some("redis");
        let folder = config.file_system.path.map(|_| {
            let volume = &job["spec"]["template"]["spec"]["volumes"];
            assert!(volume.to_string().contains("persistentVolumeClaim"));
            "filesystem"
        });
        let s3 = (!config.s3.bucket.is_empty()).then_some("s3");
        let shared = purge.shared.into_iter().map(|(tier, by)| {
            assert_eq!(by, "elsewhere/other");
            tier
        });
        let purged = redis.into_iter().chain(folder).chain(s3);
        (purged.collect(), shared.collect())
    }

    #[test]
    fn the_job_of_a_purge_runs_three_times_for_ten_minutes_and_has_no_owner() {
        let pool = of(json!({"deletionPolicy": "Delete", "shared": {"s3": s3("prod")}}));
        let mut job = purge(&pool, &[], None, &defaults()).unwrap().job.unwrap();
        job["spec"]["template"]["metadata"]["annotations"].take();
        insta::assert_yaml_snapshot!(job);
    }

    #[test]
    fn a_tier_that_another_pool_uses_too_is_not_purged() {
        let pool =
            of(json!({"shared": {"s3": s3("prod"), "redis": redis("rediss://Cache.example/1")}}));
        let with = |shared: Value| purged(&pool, &another(json!({"shared": shared})));
        let both = || vec!["redis", "s3"];
        assert_eq!(with(json!({})), (both(), vec![]));
        // Objects below a longer prefix do not belong to this prefix.
        assert_eq!(with(json!({"s3": s3("prod/a")})), (both(), vec![]));
        assert_eq!(with(json!({"s3": s3("prod")})), (vec!["redis"], vec!["s3"]));
        let same = redis("redis://cache.example:6379");
        assert_eq!(with(json!({"redis": same})), (vec!["s3"], vec!["redis"]));
        let others = redis("redis://cache.example:6380");
        assert_eq!(with(json!({"redis": others})), (both(), vec![]));
        let all = json!({"redis": redis("redis-cluster://x,cache.example"), "s3": s3("prod")});
        assert_eq!(with(all), (vec![], both()));
    }

    #[test]
    fn no_tier_is_purged_while_another_pool_cannot_be_read() {
        let shared = json!({"s3": s3("prod"), "redis": redis("redis://cache")});
        let pool = of(json!({"deletionPolicy": "Delete", "shared": shared}));
        let purge = purge(&pool, &[], Some("n/broken"), &defaults()).unwrap();
        assert!(purge.job.is_none());
        let by = || "n/broken".to_owned();
        assert_eq!(purge.shared, [("redis", by()), ("s3", by())]);
    }

    #[test]
    fn a_claim_that_another_pool_of_the_namespace_uses_too_is_not_purged() {
        let spec = |claim: &str| {
            let folder = json!({"persistentVolumeClaim": {"claimName": claim}});
            json!({"deletionPolicy": "Delete", "shared": {"fileSystem": folder}})
        };
        let pool = of(spec("kv-cache"));
        assert!(purges(&pool));
        let mine = (vec!["filesystem"], vec![]);
        assert_eq!(purged(&pool, &another(spec("kv-cache"))), mine);
        let mut neighbour = another(spec("kv-cache"));
        neighbour
            .metadata
            .namespace
            .clone_from(&pool.metadata.namespace);
        let found = purge(&pool, &[&neighbour], None, &defaults()).unwrap();
        assert!(found.job.is_none());
        assert_eq!(found.shared, [("filesystem", "serving/other".to_owned())]);
        let mut neighbour = another(spec("other"));
        neighbour
            .metadata
            .namespace
            .clone_from(&pool.metadata.namespace);
        assert_eq!(purged(&pool, &neighbour), mine);
    }

    #[test]
    fn a_pool_with_only_managed_servers_needs_no_purge() {
        let managed = json!({"managed": {"memoryPerShard": "1Gi"}});
        let pool = of(json!({"deletionPolicy": "Delete", "shared": {"redis": managed}}));
        assert!(!purges(&pool));
        assert_eq!(purged(&pool, &pool), (vec![], vec![]));
        let pool = of(json!({"deletionPolicy": "Delete", "shared": {"s3": s3("")}}));
        assert!(purges(&pool));
        assert!(!purges(&of(json!({"shared": {"s3": s3("")}}))));
    }

    #[test]
    fn a_purge_on_request_counts_or_deletes_what_only_this_pool_uses() {
        let managed = json!({"managed": {"memoryPerShard": "1Gi"}});
        let pool = of(json!({"shared": {"redis": managed, "s3": s3("prod")}}));
        let other = another(json!({"shared": {"s3": s3("prod")}}));
        let of = |others: &[&KVCachePool], account, dry_run| {
            let settings = settings(&pool, &defaults()).unwrap();
            let limit = Duration::from_secs(60);
            purge_now(
                &pool,
                settings,
                (others, None),
                (account, dry_run),
                limit,
                "abcde",
            )
        };
        let command = |purge: &Purge| {
            let spec = &purge.job.as_ref().unwrap()["spec"]["template"]["spec"];
            let words = spec["containers"][0]["command"].as_array().unwrap();
            let words = words.iter().filter_map(Value::as_str).collect::<Vec<_>>();
            (words.join(" "), spec["serviceAccountName"].clone())
        };
        let file = "--config /etc/kvcachepool/pod/config.v1.yaml";
        let (words, account) = command(&of(&[], None, true));
        let program = words.split(' ').next().unwrap().to_owned();
        assert_eq!(
            words,
            format!("{program} purge --output json --dry-run {file}")
        );
        assert_eq!(account, "default");
        let deletes = of(&[&other], Some("vllm"), false);
        let (words, account) = command(&deletes);
        assert_eq!(words, format!("{program} purge --output json {file}"));
        assert_eq!(account, "vllm");
        assert_eq!(deletes.shared, [("s3", "elsewhere/other".to_owned())]);
        let job = deletes.job.unwrap();
        let text = job["spec"]["template"]["metadata"]["annotations"][names::CONFIG].as_str();
        let (config, _) = Config::parse(text.unwrap(), true).unwrap();
        assert!(config.s3.bucket.is_empty() && !config.redis.urls.is_empty());
    }

    #[test]
    fn default_ports_of_urls_are_known() {
        let of = |url: &str| -> Vec<String> {
            let pool = pool(json!({"shared": {"redis": redis(url)}}));
            servers(&pool).into_iter().collect()
        };
        assert_eq!(of("redis://[fd00::1]/2"), ["[fd00::1]:6379"]);
        assert_eq!(of("redis://[fd00::1]:7"), ["[fd00::1]:7"]);
        assert_eq!(of("redis-sentinel://a,b:7/m"), ["a:26379", "b:7"]);
        assert_eq!(of("redis-sentinel://a/m?tls=true"), ["a:26379"]);
        assert_eq!(of("redis-cluster://a:1,b?tls=true"), ["a:1", "b:6379"]);
    }

    #[test]
    fn a_purge_uses_the_pools_service_account() {
        let mut pool = of(json!({"deletionPolicy": "Delete", "shared": {"s3": s3("")}}));
        let account = |pool: &KVCachePool| {
            let job = purge(pool, &[], None, &defaults()).unwrap().job.unwrap();
            job["spec"]["template"]["spec"]["serviceAccountName"].clone()
        };
        assert_eq!(account(&pool), "default");
        let named = (names::PURGE_ACCOUNT.to_owned(), "vllm".to_owned());
        pool.annotations_mut().extend([named]);
        assert_eq!(account(&pool), "vllm");
    }

    #[test]
    fn names_fit_the_limit_of_jobs() {
        let mut pool = of(json!({}));
        pool.metadata.name = Some("x".repeat(40));
        assert!(purge_name(&pool).len() <= 63);
        let settings = settings(&pool, &defaults()).unwrap();
        let job = check(&pool, &settings, "vllm", Duration::from_secs(60), "abcde");
        assert!(job["metadata"]["name"].as_str().unwrap().len() <= 63);
    }
}
