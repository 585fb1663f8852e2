//! What a server runs: its start script, its arguments and its probes. The image has Valkey or Redis under one of two names, and `sh`.

use super::password::{CERTIFICATE, KEY, MANAGER_PASSWORD, PASSWORD};
use super::{BUS_PORT, MANAGER, METRICS_PORT, PORT, domain, is_cluster};
use crate::api::{KVCachePool, ManagedRedis, Persistence};
use serde_json::{Value, json};

/// Mount path of the Secret.
pub(super) const SECRET_PATH: &str = "/etc/kvcachepool";
/// Mount path of the memory volume with the files that the start script writes.
pub(super) const RUN_PATH: &str = "/run/kvcachepool";
/// Working folder: nodes of a cluster, or snapshots.
pub(super) const DATA_PATH: &str = "/data";
/// Mount path of the memory volume with the exporter's login.
pub(super) const EXPORTER_PATH: &str = "/run/kvcachepool-exporter";

/// Environment of the servers of a cluster: names of their pod and node.
pub(super) const POD_NAME: &str = "POD_NAME";
pub(super) const NODE_NAME: &str = "NODE_NAME";

/// What sidecars need (docs/guides/tiers.md), and what probes and people need to look at a server. No command deletes everything at once.
const COMMANDS: &str = "+get +getrange +set +mset +del +exists +pexpire +persist +scan +info +watch +unwatch +multi +exec +ping +dbsize";
/// What sidecars and probes need besides with a cluster.
const CLUSTER_COMMANDS: &str = "+cluster|slots +cluster|nodes +cluster|info +asking";
/// What the manager needs, and servers that log in to each other as the manager: a replica to its master, and the source of a slot to its
/// target.
const MANAGER_COMMANDS: &str = "+cluster +info +ping +select +migrate +restore +restore-asking +asking +del +psync +replconf +role +config|get";

/// Time in ms after which the servers of a cluster agree that a silent one is lost.
const NODE_TIMEOUT_MS: u32 = 5000;
/// Time in which a replica has taken over, if need be by a decision of the manager (15 s).
const TAKEOVER_SECONDS: u32 = 30;

/// What probes may do to follow the passwords, as a user whose password exists only in the pod's memory.
const LOCAL_COMMANDS: &str = "+acl|setuser +config|set";
/// What the exporter reads, as a user of that kind. Not the settings, which include a password, nor slow commands, which include values.
const EXPORTER_COMMANDS: &str =
    "+ping +info +cluster|info +latency|latest +latency|histogram +slowlog|len";
/// Name of that user.
const EXPORTER: &str = "exporter";

/// Starts in a row that did not end in service, after which the server starts without its snapshot.
const STARTS: u32 = 3;
/// File of the snapshot in the working folder.
const SNAPSHOT: &str = "chunks.rdb";
/// Bytes of a snapshot that a slow volume takes in a second.
const VOLUME_BYTES_PER_SECOND: u64 = 100 << 20;

/// Time in seconds from a change of a password until servers log in to each other with it. By then every server accepts it. A replica whose
/// master refuses one password, because it started before or after the change, tries the other one at once.
const USED_AFTER: u32 = 5 * 60;
/// Time in seconds from a change of a password until the one before is refused. By then every sidecar has it.
const REFUSED_AFTER: u32 = 60 * 60;

/// Defines `ask`, which sends a command with the newest password that the server accepts.
const CLIENT: &str = r#"export REDISCLI_AUTH="$(head -n 1 /run/kvcachepool/password)"
cli="$(command -v valkey-cli || command -v redis-cli)"
ask() { "$cli" -p 6379 $tls "$@"; }
"#;
const PING: &str = "ask ping | grep -q PONG";
/// A replica that copies its master's data is alive.
const ALIVE: &str = "ask ping | grep -qE 'PONG|LOADING'";
/// A server of a cluster is ready if it is a master with slots, or a replica that is in sync.
const JOINED: &str = r#"ask cluster info | grep -q cluster_state:ok || exit 1
myself="$(ask cluster nodes | grep ' myself,')"
case "$myself" in
*' myself,slave'*) ask info replication | grep -q master_link_status:up ;;
*) set -- $myself && test $# -gt 8 ;;
esac"#;

/// Users with their keys in the Secret, and what they may do.
fn users(redis: &ManagedRedis) -> Vec<(&'static str, &'static str, String)> {
    if !is_cluster(redis) {
        return vec![("default", PASSWORD, COMMANDS.to_owned())];
    }
    let commands = format!("{COMMANDS} {CLUSTER_COMMANDS}");
    let manager = (MANAGER, MANAGER_PASSWORD, MANAGER_COMMANDS.to_owned());
    vec![("default", PASSWORD, commands), manager]
}

/// Defines `usable`, whether config files can hold a password; `rule`, its ACL rule, which is a digest and so may be part of a command line;
/// and `write`, which replaces a file by its input at once.
const COMMON: &str = r#"usable() { case "$1" in '' | *[[:space:][:cntrl:]\"\'\\]*) return 1 ;; esac; }
rule() { printf '#%s' "$(printf '%s' "$1" | sha256sum | cut -d ' ' -f 1)"; }
write() { cat > "$1.new" && mv "$1.new" "$1"; }
"#;

/// Follows the passwords of the Secret without a restart: a new one is accepted besides the one before, which is refused later. The file of
/// a password has those that the server accepts, the newest first. A probe that is killed anywhere is repeated by the next one.
///
/// ACL LOAD would be simpler, but crashes replicas of Valkey 8.0.
fn rotate(redis: &ManagedRedis) -> String {
    let mut script = format!(
        r#"{COMMON}as_local() {{ REDISCLI_AUTH="$(cat {RUN_PATH}/local)" ask --user local "$@" | grep -q '^OK'; }}
rotate() {{
user=$1 file={RUN_PATH}/$2
new="$(cat {SECRET_PATH}/$2)"
known="$(head -n 1 $file)"
age=$(($(date +%s) - $(cat $file.since)))
usable "$new" || new="$known"
if test "$new" != "$known"; then set -- "$new" "$known"
elif test $age -gt {REFUSED_AFTER} && test $(wc -l < $file) -gt 1; then set -- "$known"
else return 0
fi
as_local acl setuser $user resetpass $(for password; do rule "$password"; echo; done) || return 0
if test $# -gt 1; then age=0; date +%s | write $file.since; fi
printf '%s\n' "$@" | write $file
}}
"#
    );
    for (user, key, _) in users(redis) {
        script += &format!("rotate {user} {key}\n");
    }
    if is_cluster(redis) {
        // The last one was the manager's, by which servers log in to each other.
        script += &format!(
            r#"used="$(cat {RUN_PATH}/masterauth)"
next="$(head -n 1 $file)"
if ask info replication | grep -q master_link_status:down; then next="$(grep -vxF -e "$used" $file | head -n 1)"
elif test $age -lt {USED_AFTER}; then next="$used"
fi
if test -n "$next" && test "$next" != "$used"; then
printf '%s' "$next" | as_local -x config set masterauth && printf '%s\n' "$next" | write {RUN_PATH}/masterauth
fi
"#
        );
    }
    script
}

/// The command that starts a server. It writes the users into memory at each start, so that their rights are those of the operator's version
/// and not of the Secret's age, and no password is part of a command line. Passwords that exist only in the pod's memory stay the same when
/// the container starts again, because the exporter reads its own once.
pub(super) fn command(redis: &ManagedRedis) -> [String; 4] {
    let mut script = format!(
        r#"set -eu
umask 077
{COMMON}own() {{
test -s {RUN_PATH}/$1 || head -c 32 /dev/urandom | sha256sum | cut -d ' ' -f 1 | write {RUN_PATH}/$1
printf 'user %s on %s -@all %s\n' "$1" "$(rule "$(cat {RUN_PATH}/$1)")" "$2" >> {RUN_PATH}/users.acl
}}
accept() {{
password="$(cat {SECRET_PATH}/$2)"
usable "$password" || {{ echo "$2 in the Secret is not usable: expected no spaces, quotes and backslashes" >&2; exit 1; }}
printf '%s\n' "$password" > {RUN_PATH}/$2
date +%s > {RUN_PATH}/$2.since
printf 'user %s on %s ~kvcp:* -@all %s\n' "$1" "$(rule "$password")" "$3" >> {RUN_PATH}/users.acl
}}
rm -f {RUN_PATH}/users.acl
own local '{LOCAL_COMMANDS}'
"#
    );
    for (user, key, commands) in users(redis) {
        script += &format!("accept {user} {key} '{commands}'\n");
    }
    if redis.exporter.is_some() {
        script += &exporter_login(redis);
    }
    if redis.persistence.is_some() {
        script += &check_snapshot(maxmemory(redis));
    }
    if is_cluster(redis) {
        // Every start is a new, empty node: a master that came back empty under its old id would empty its replicas. A container that starts
        // again has the address of the lost master too, which its replica would copy from until it has taken over.
        script += &format!("! grep -qs slave {DATA_PATH}/nodes.conf || sleep {TAKEOVER_SECONDS}\n");
        script += &format!(
            r#"cp {RUN_PATH}/{MANAGER_PASSWORD} {RUN_PATH}/masterauth
printf 'masteruser {MANAGER}\nmasterauth %s\n' "$(cat {RUN_PATH}/masterauth)" > {RUN_PATH}/server.conf
rm -f {DATA_PATH}/nodes.conf
set -- {RUN_PATH}/server.conf "$@"
"#
        );
    }
    script += r#"exec "$(command -v valkey-server || command -v redis-server)" "$@""#;
    ["sh", "-c", &script, "redis"].map(str::to_owned)
}

/// Makes a user for the exporter, and the file with its password. Some versions of the exporter look for the server's address in it, others
/// for the address with the user.
fn exporter_login(redis: &ManagedRedis) -> String {
    let user = format!("{EXPORTER}@");
    let addresses = ["", &user].map(|user| address_for_exporter(redis, user));
    let logins = addresses.map(|address| format!(r#""{address}":"%s""#));
    format!(
        r#"own {EXPORTER} '{EXPORTER_COMMANDS}'
password="$(cat {RUN_PATH}/{EXPORTER})"
printf '{{{}}}\n' "$password" "$password" | write {EXPORTER_PATH}/passwords.json
"#,
        logins.join(",")
    )
}

/// Discards a snapshot with which the server does not start: it is broken, it is of a newer server, or it was made with a larger
/// `memoryPerShard`, because loading evicts nothing. The readiness probe and a stop by the kubelet end the count of starts. A volume that
/// cannot be written to keeps no server from starting.
fn check_snapshot(maxmemory: u64) -> String {
    let most = maxmemory + maxmemory / 8;
    format!(
        r#"rm -f {DATA_PATH}/temp-*.rdb {RUN_PATH}/served || true
discard() {{ echo "starting without the snapshot: $1" >&2; rm -f {DATA_PATH}/{SNAPSHOT} {DATA_PATH}/starts || true; }}
echo >> {DATA_PATH}/starts || true
if test -n "$(find {DATA_PATH}/{SNAPSHOT} -size +{most}c 2>/dev/null)"; then discard "it is larger than memoryPerShard"
elif test "$(wc -l < {DATA_PATH}/starts)" -gt {STARTS}; then discard "the last {STARTS} starts failed"
fi
"#
    )
}

/// The hook before the kubelet stops a server: a start that it ends has not failed.
pub(super) fn before_stop(redis: &ManagedRedis) -> Option<Value> {
    let command = ["rm", "-f", &format!("{DATA_PATH}/starts")];
    (redis.persistence.is_some()).then(|| json!({"preStop": {"exec": {"command": command}}}))
}

/// Address of the server in its own pod. With a user in it, the exporter would use no password.
fn address_for_exporter(redis: &ManagedRedis, user: &str) -> String {
    let scheme = if redis.tls { "rediss" } else { "redis" };
    format!("{scheme}://{user}localhost:{PORT}")
}

/// Arguments of redis_exporter.
pub(super) fn exporter_arguments(redis: &ManagedRedis) -> Vec<String> {
    let mut arguments = vec![
        format!("--web.listen-address=:{METRICS_PORT}"),
        format!("--redis.addr={}", address_for_exporter(redis, "")),
        format!("--redis.user={EXPORTER}"),
        format!("--redis.password-file={EXPORTER_PATH}/passwords.json"),
        "--config-command=-".to_owned(),
        "--set-client-name=false".to_owned(),
        // It would connect to any address that a client names.
        "--disable-scrape-endpoint".to_owned(),
    ];
    // The certificate has no name for the pod's own loopback address.
    arguments.extend(redis.tls.then(|| "--skip-tls-verification".to_owned()));
    arguments
}

/// Bytes of chunks in a server.
pub(super) fn maxmemory(redis: &ManagedRedis) -> u64 {
    redis.memory_per_shard.bytes().map_or(0, |bytes| bytes.0)
}

/// Time in seconds in which a server that is stopped writes its snapshot.
pub(super) fn seconds_to_stop(redis: &ManagedRedis) -> u64 {
    match redis.persistence {
        None => 10,
        Some(_) => 30 + maxmemory(redis) / VOLUME_BYTES_PER_SECOND,
    }
}

/// Cache settings: least recently used values are evicted, and nothing is written to disk except snapshots.
pub(super) fn arguments(pool: &KVCachePool, redis: &ManagedRedis, maxmemory: u64) -> Vec<String> {
    let port = match redis.tls {
        false => vec![("--port", PORT.to_string())],
        // Sidecars prove who they are by the password.
        true => vec![
            ("--port", "0".to_string()),
            ("--tls-port", PORT.to_string()),
            ("--tls-cert-file", format!("{SECRET_PATH}/{CERTIFICATE}")),
            ("--tls-key-file", format!("{SECRET_PATH}/{KEY}")),
            ("--tls-auth-clients", "no".to_string()),
        ],
    };
    let rest = [
        ("--aclfile", format!("{RUN_PATH}/users.acl")),
        ("--maxmemory", maxmemory.to_string()),
        ("--maxmemory-policy", "allkeys-lru".to_string()),
        ("--appendonly", "no".to_string()),
        ("--lazyfree-lazy-eviction", "yes".to_string()),
        ("--tcp-keepalive", "60".to_string()),
    ];
    let arguments = port.into_iter().chain(rest);
    let mut arguments: Vec<String> = arguments
        .flat_map(|(key, value)| [key.to_string(), value])
        .collect();
    match &redis.persistence {
        None => arguments.extend(["--save", ""].map(str::to_owned)),
        Some(persistence) => arguments.extend(snapshot_arguments(persistence)),
    }
    if is_cluster(redis) {
        arguments.extend(cluster_arguments(pool, redis, maxmemory));
    }
    arguments
}

/// Settings of a server with a volume. A snapshot that cannot be written, because the volume is full or slow, stops neither writes nor the
/// end of the server. Chunks hardly shrink by compression.
fn snapshot_arguments(persistence: &Persistence) -> impl Iterator<Item = String> {
    let interval = persistence.snapshot_interval.as_ref();
    let save = match interval.and_then(|interval| interval.time().ok()) {
        None => vec![String::new()],
        Some(time) => vec![(time.ms / 1000).to_string(), "1".to_owned()],
    };
    let save = std::iter::once("--save".to_owned()).chain(save);
    let arguments = [
        "--dir",
        DATA_PATH,
        "--dbfilename",
        SNAPSHOT,
        "--rdbcompression",
        "no",
        "--stop-writes-on-bgsave-error",
        "no",
        "--shutdown-on-sigterm",
        "save",
        "force",
    ];
    arguments.map(str::to_owned).into_iter().chain(save)
}

/// Settings of a cluster whose replicas the manager assigns. Clients connect to the names of the pods. The name of the node tells the manager
/// which servers would be lost together.
fn cluster_arguments(
    pool: &KVCachePool,
    redis: &ManagedRedis,
    maxmemory: u64,
) -> impl Iterator<Item = String> {
    let certificate = format!("{SECRET_PATH}/{CERTIFICATE}");
    let tls = redis.tls.then_some([
        ("--tls-cluster", "yes"),
        ("--tls-replication", "yes"),
        ("--tls-ca-cert-file", certificate.as_str()),
    ]);
    let hostname = format!("$({POD_NAME}).{}", domain(pool));
    let node_name = format!("$({NODE_NAME})");
    let node_timeout = NODE_TIMEOUT_MS.to_string();
    let rest = [
        ("--cluster-enabled", "yes"),
        ("--cluster-config-file", "nodes.conf"),
        ("--dir", DATA_PATH),
        ("--cluster-node-timeout", &node_timeout),
        ("--cluster-require-full-coverage", "no"),
        ("--cluster-announce-hostname", &hostname),
        ("--cluster-preferred-endpoint-type", "hostname"),
        ("--cluster-announce-human-nodename", &node_name),
        ("--cluster-replica-validity-factor", "0"),
        ("--cluster-allow-replica-migration", "no"),
        ("--repl-diskless-load", "on-empty-db"),
    ];
    // Writes during the first synchronization of a replica wait in its buffer. By default a busy cache never finishes it.
    let buffer = (maxmemory / 4).to_string();
    let buffer = [
        "--client-output-buffer-limit",
        "replica",
        &buffer,
        &buffer,
        "0",
    ]
    .map(str::to_owned);
    let pairs = tls.into_iter().flatten().chain(rest);
    let pairs: Vec<String> = pairs
        .flat_map(|(key, value)| [key.to_owned(), value.to_owned()])
        .collect();
    pairs.into_iter().chain(buffer)
}

/// Readiness and liveness. A server that is not part of the cluster yet is alive. The first one also follows the passwords of the Secret.
pub(super) fn probes(redis: &ManagedRedis) -> [Value; 2] {
    let ready = match redis.persistence {
        None if is_cluster(redis) => JOINED.to_owned(),
        None => PING.to_owned(),
        // Once per start: a volume that hangs must not hold up the probe of a server that needs it no more.
        Some(_) => format!(
            "{PING} || exit 1\ntest -e {RUN_PATH}/served || {{ rm -f {DATA_PATH}/starts; touch {RUN_PATH}/served; }}"
        ),
    };
    let ready = format!("{}{ready}", rotate(redis));
    [
        probe(&ready, redis.tls, 5, 2),
        probe(ALIVE, redis.tls, 10, 6),
    ]
}

fn probe(script: &str, tls: bool, seconds: u32, failures: u32) -> Value {
    let tls = match tls {
        true => format!("tls='--tls --cacert {SECRET_PATH}/{CERTIFICATE}'\n"),
        false => "tls=\n".to_owned(),
    };
    json!({
        "exec": {"command": ["sh", "-c", format!("umask 077\n{tls}{CLIENT}{script}")]},
        "periodSeconds": seconds,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    })
}

/// Ports of a server's container.
pub(super) fn ports(redis: &ManagedRedis) -> Vec<Value> {
    let port =
        |name: &str, port: u16| json!({"name": name, "containerPort": port, "protocol": "TCP"});
    let mut ports = vec![port(super::PORT_NAME, PORT)];
    ports.extend(is_cluster(redis).then(|| port("bus", BUS_PORT)));
    ports
}

#[cfg(test)]
mod real_server_tests;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::redis::managed;
    use crate::desired::redis::tests::managing;

    fn of(keys: Value) -> (KVCachePool, ManagedRedis) {
        let pool = managing(keys);
        let redis = managed(&pool).unwrap().clone();
        (pool, redis)
    }

    fn cluster() -> Value {
        json!({"mode": "Cluster", "shards": 3, "replicasPerShard": 1, "tls": true})
    }

    #[test]
    fn with_tls_there_is_no_port_without_it() {
        let (pool, redis) = of(json!({"tls": true}));
        let wanted = [
            "--port",
            "0",
            "--tls-port",
            "6379",
            "--tls-cert-file",
            "/etc/kvcachepool/tls.crt",
            "--tls-key-file",
            "/etc/kvcachepool/tls.key",
            "--tls-auth-clients",
            "no",
        ];
        assert_eq!(arguments(&pool, &redis, 1)[..wanted.len()], wanted);
        for probe in probes(&redis) {
            let script = probe["exec"]["command"][2].as_str().unwrap();
            assert!(script.contains("\ntls='--tls --cacert /etc/kvcachepool/tls.crt'\n"));
        }
        assert_eq!(ports(&redis)[0]["containerPort"], 6379);
    }

    #[test]
    fn a_cluster_encrypts_its_own_traffic_too() {
        let arguments_of = |keys: Value| {
            let (pool, redis) = of(keys);
            arguments(&pool, &redis, 1).join(" ")
        };
        let of_cluster =
            "--tls-cluster yes --tls-replication yes --tls-ca-cert-file /etc/kvcachepool/tls.crt";
        assert!(arguments_of(cluster()).contains(of_cluster));
        let mut plain = cluster();
        plain["tls"] = false.into();
        assert!(!arguments_of(plain).contains("tls"));
        assert!(!arguments_of(json!({"tls": true})).contains("cluster"));
    }

    #[test]
    fn users_may_not_empty_a_server_and_only_the_manager_administers() {
        for keys in [json!({}), cluster()] {
            let (_, redis) = of(keys);
            let [.., script, _] = command(&redis);
            let users: Vec<_> = (script.lines())
                .filter(|line| line.starts_with("accept "))
                .collect();
            assert_eq!(users.len(), 1 + usize::from(is_cluster(&redis)));
            assert!(
                !script.contains("flush") && !script.contains("+@"),
                "{script}"
            );
            assert!(script.contains("~kvcp:* -@all %s"), "{script}");
            assert!(users.iter().all(|user| user.contains(" '+")));
            assert!(script.contains("\nown local '+acl|setuser +config|set'\n"));
            assert!(!users[0].contains("+cluster ") && !users[0].contains("migrate"));
        }
    }

    #[test]
    fn a_restarted_server_does_not_claim_its_old_slots() {
        let script = |keys| command(&of(keys).1)[2].clone();
        let waits = "! grep -qs slave /data/nodes.conf || sleep 30\n";
        let removes = "\nrm -f /data/nodes.conf\n";
        let script_of_cluster = script(cluster());
        let [waits_at, removes_at] =
            [waits, removes].map(|text| script_of_cluster.find(text).unwrap());
        assert!(waits_at < removes_at, "a start that is cut off waits again");
        let without = json!({"mode": "Cluster", "shards": 3, "tls": true});
        assert_eq!(
            script(without),
            script_of_cluster,
            "another number of replicas restarts no server"
        );
        assert!(!script(json!({})).contains("nodes.conf"));
    }

    #[test]
    fn no_command_contains_a_password() {
        let (pool, redis) = of(cluster());
        let arguments = arguments(&pool, &redis, 1).join(" ");
        assert!(!arguments.contains("requirepass") && !arguments.contains("masterauth"));
        assert!(CLIENT.contains(&format!("{RUN_PATH}/{PASSWORD}")));
        assert!(CLIENT.contains(&format!("-p {PORT}")));
    }
}
