//! The Redis tier, as a vLLM sees it: warm beside another sidecar's servers, and nothing but misses when they are gone.

use crate::harness::{Sidecar, signal_to, wait_for};
use crate::testing::free_port;
use crate::testing::tls::Certificates;
use crate::tiers::{
    DISK, FAR, ON_DISK, disk_and_memory_serve, disk_at, disk_serves_beside_misses, filled,
    flushed_after_the_last_vllm, flushed_before_the_end, wait_far, writing_back,
};
use crate::vllm::{Vllm, hashes};
use kvcachepool_protocol::message::{CHUNK_READY, ProbeReply};
use rustix::process::Signal;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tempfile::TempDir;

/// Number of the Redis tier in answers to PROBE.
const REDIS: u8 = 3;

/// A server on a Unix socket.
pub struct Redis {
    folder: TempDir,
    args: Vec<String>,
    process: Option<Child>,
}

impl Redis {
    pub fn start() -> Self {
        Self::start_with(&["--port", "0"])
    }

    /// With these settings; files are of its folder.
    fn start_with(args: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), args)
    }

    fn start_in(folder: TempDir, args: &[&str]) -> Self {
        let mut this = Self {
            folder,
            args: args.iter().map(ToString::to_string).collect(),
            process: None,
        };
        this.run();
        this
    }

    /// One that watches the master at this port as `kv`, and waits for a word before it thinks it dead.
    fn sentinel(at: &str, master: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let patient = "sentinel down-after-milliseconds kv 3600000";
        // A failover that finds no replica is tried again after twice this.
        let soon = "sentinel failover-timeout kv 1000";
        let watched = format!("sentinel monitor kv 127.0.0.1 {master} 1\n{patient}\n{soon}\n");
        std::fs::write(folder.path().join("sentinel.conf"), watched).unwrap();
        Self::start_in(folder, &["sentinel.conf", "--sentinel", "--port", at])
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    fn run(&mut self) {
        let mut command = Command::new("redis-server");
        command
            .current_dir(self.folder.path())
            .args(&self.args)
            .args(["--save", "", "--unixsocket"])
            .arg(self.socket())
            .stdout(Stdio::null());
        crate::harness::dies_with_us(&mut command);
        let process = command.spawn();
        self.process = Some(process.expect("install it: apt-get install redis-server"));
        wait_for("the Redis server", || {
            UnixStream::connect(self.socket()).ok()
        });
    }

    /// The first line of what it answers.
    pub fn ask(&self, command: &str) -> String {
        let mut asked = UnixStream::connect(self.socket()).unwrap();
        asked
            .write_all(format!("{command}\r\n").as_bytes())
            .unwrap();
        let mut answer = String::new();
        BufReader::new(asked).read_line(&mut answer).unwrap();
        answer.trim().to_owned()
    }

    /// Waits until a line of what it answers begins so.
    fn wait(&self, command: &str, line: &str) {
        wait_for(line, || {
            let mut asked = UnixStream::connect(self.socket()).ok()?;
            asked.write_all(format!("{command}\r\n").as_bytes()).ok()?;
            asked.shutdown(Shutdown::Write).ok()?;
            let mut lines = BufReader::new(asked).lines().map_while(Result::ok);
            lines.any(|said| said.starts_with(line)).then_some(())
        });
    }

    /// Keys that it holds.
    pub fn keys(&self) -> i64 {
        self.ask("DBSIZE").trim_start_matches(':').parse().unwrap()
    }

    fn signal(&self, signal: Signal) {
        signal_to(self.process.as_ref().unwrap().id(), signal);
    }

    pub fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
        let _ = std::fs::remove_file(self.socket());
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        self.kill();
    }
}

fn config(servers: &[Redis]) -> String {
    let urls = servers
        .iter()
        .map(|server| format!("\"redis+unix://{}\"", server.socket().display()));
    config_of(&urls.collect::<Vec<_>>().join(", "))
}

fn config_of(urls: &str) -> String {
    format!("memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\nredis: {{urls: [{urls}]}}\n")
}

fn start(servers: &[Redis]) -> Sidecar {
    start_by(&config(servers))
}

fn start_by(config: &str) -> Sidecar {
    let sidecar = Sidecar::start(config);
    sidecar.wait_populated();
    sidecar.wait_tier("redis", "ready");
    sidecar
}

/// Stores chunks and waits until Redis has them.
fn stored(sidecar: &Sidecar, prompt: u64, count: u32) {
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("r", &hashes(prompt, count));
    let written = "tier_write_chunks_total{result=\"stored\",tier=\"redis\"}";
    sidecar.wait_metric(written, f64::from(count));
}

fn ready(reply: &ProbeReply) -> usize {
    let ready = reply.states.iter().filter(|s| **s == CHUNK_READY);
    ready.count()
}

#[test]
fn what_was_stored_is_found_in_redis_by_another_sidecar_and_another_vllm() {
    let servers = [Redis::start(), Redis::start(), Redis::start()];
    let first = start(&servers);
    stored(&first, 1, 8);
    let second = start(&servers);
    let mut vllm = Vllm::attach(&second.socket());
    vllm.finds_below(&hashes(1, 10), 8, REDIS);
}

#[test]
fn what_is_written_back_is_in_redis_when_the_last_vllm_ended() {
    let servers = [Redis::start()];
    flushed_after_the_last_vllm(&writing_back(&config(&servers), "redis"), "redis");
    let other = start(&servers);
    Vllm::attach(&other.socket()).finds_below(&hashes(1, 6), 4, REDIS);
}

#[test]
fn a_sidecar_without_a_vllm_that_is_told_to_end_writes_to_redis_first_what_waits() {
    let servers = [Redis::start()];
    flushed_before_the_end(writing_back(&config(&servers), "redis"));
    let other = start(&servers);
    Vllm::attach(&other.socket()).finds_below(&hashes(1, 6), 4, REDIS);
}

#[test]
fn a_server_that_hangs_is_named_while_the_disk_serves_on_and_is_written_to() {
    let (servers, disk) = ([Redis::start()], TempDir::new().unwrap());
    stored(&start(&servers), FAR, 4);
    let config = config(&servers) + &disk_at(disk.path());
    // A PROBE is answered after this, and Redis given up after twice as long.
    let config = config.replace("cache: {", "cache: {loadTimeout: 1s, ");
    let written = "tier_write_chunks_total{result=\"stored\",tier=\"disk\"}";
    let given_up = "tier_operations_total{operation=\"put\",result=\"timeout\",tier=\"redis\"}";
    let more = ON_DISK.end() + 1;
    {
        let sidecar = start_by(&config);
        sidecar.wait_tier("disk", "ready");
        let mut vllm = Vllm::attach(&sidecar.socket());
        for prompt in ON_DISK.chain([more]) {
            vllm.store("r", &hashes(prompt, 2));
        }
        sidecar.wait_metric(written, 2.0 * more as f64);
    }
    let sidecar = start_by(&config);
    sidecar.wait_tier("disk", "ready");
    servers[0].signal(Signal::STOP);
    disk_serves_beside_misses(&sidecar, |vllm| {
        vllm.store("new", &hashes(more + 1, 8));
        sidecar.wait_metric(written, 8.0);
        // None of them was given up for Redis by now.
        assert_eq!(sidecar.metric(given_up), 0.0);
        // Redis is asked for how it goes on.
        vllm.finds_below(&hashes(more, 3), 2, DISK);
        sidecar.wait_off("redis", "Timeout");
    });
    servers[0].signal(Signal::CONT);
    wait_far(&sidecar, "redis");
}

#[test]
fn servers_that_die_cost_what_they_held_and_are_used_again_when_they_are_back() {
    let mut servers = [Redis::start()];
    let sidecar = start(&servers);
    stored(&sidecar, 1, 4);
    servers[0].kill();
    let down = sidecar.wait_tier("redis", "off");
    let reason = down["reason"].as_str().unwrap();
    assert!(reason.contains("Unreachable"), "{reason}");
    // Memory serves on, and what only Redis had is a miss.
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.check("r", &hashes(1, 4));
    assert_eq!(ready(&vllm.probe_below("miss", &hashes(2, 4)).1), 0);
    sidecar.wait_metric("tier_down{reason=\"unreachable\",tier=\"redis\"}", 1.0);
    // That nothing is tried for a while is not why.
    let shut = "tier_operations_total{operation=\"usage\",result=\"breaker_open\",tier=\"redis\"}";
    sidecar.wait_metric(shut, 1.0);
    assert_eq!(sidecar.tier("redis")["reason"], "Unreachable");
    vllm.store("meanwhile", &hashes(3, 4));
    servers[0].run();
    sidecar.wait_tier("redis", "ready");
    // What it lost, and what it was not there for, goes to it as soon as somebody uses it.
    assert_eq!(servers[0].keys(), 0);
    for prompt in [1, 3] {
        vllm.check("again", &hashes(prompt, 4));
    }
    sidecar.wait_metric(
        "tier_write_chunks_total{result=\"stored\",tier=\"redis\"}",
        12.0,
    );
    let fresh = start(&servers);
    for prompt in [1, 3] {
        Vllm::attach(&fresh.socket()).finds_below(&hashes(prompt, 4), 4, REDIS);
    }
}

#[test]
fn a_server_that_takes_no_more_is_named_while_it_is_read_from() {
    let servers = [Redis::start()];
    let sidecar = start(&servers);
    stored(&sidecar, 1, 4);
    assert_eq!(servers[0].ask("CONFIG SET maxmemory 1"), "+OK");
    let mut vllm = Vllm::attach(&sidecar.socket());
    let (open, mut prompt) = ("tier_breaker_open{operations=\"writes\",tier=\"redis\"}", 1);
    let mut seen = [false; 2];
    wait_for("the server named", || {
        prompt += 1;
        vllm.store("more", &hashes(prompt, 8));
        let tier = sidecar.tier("redis");
        seen[0] |= tier["state"] == "degraded" && tier["reason"] == "Full";
        seen[1] |= sidecar.metric(open) == 1.0;
        seen.iter().all(|seen| *seen).then_some(())
    });
    let fresh = start(&servers);
    Vllm::attach(&fresh.socket()).finds_below(&hashes(1, 4), 4, REDIS);
    assert_eq!(servers[0].ask("CONFIG SET maxmemory 0"), "+OK");
    let written = "tier_write_chunks_total{result=\"stored\",tier=\"redis\"}";
    let before = sidecar.metric(written);
    wait_for("writes again", || {
        prompt += 1;
        vllm.store("again", &hashes(prompt, 1));
        (sidecar.metric(written) > before).then_some(())
    });
    sidecar.wait_tier("redis", "ready");
}

#[test]
fn other_servers_are_used_without_a_restart() {
    let servers = [Redis::start(), Redis::start(), Redis::start()];
    let sidecar = start(&servers[..1]);
    stored(&sidecar, 1, 12);
    sidecar.configure(&config(&servers));
    sidecar.wait_metric("config_reloads_total{result=\"applied\"}", 1.0);
    let status = sidecar.status();
    assert_eq!(status["restart_needed"], serde_json::json!([]));
    let known = sidecar.tier("redis")["servers"].as_array().map(Vec::len);
    assert_eq!(known, Some(3));
    let mut vllm = Vllm::attach(&sidecar.socket());
    vllm.store("more", &hashes(2, 12));
    let written = "tier_write_chunks_total{result=\"stored\",tier=\"redis\"}";
    sidecar.wait_metric(written, 24.0);
    assert!(servers[1].keys() + servers[2].keys() > 0);
    let fresh = start(&servers);
    let mut other = Vllm::attach(&fresh.socket());
    other.finds_below(&hashes(2, 12), 12, REDIS);
}

#[test]
fn a_changed_url_that_cannot_be_right_is_named_and_the_servers_before_serve_on() {
    let servers = [Redis::start()];
    let sidecar = start(&servers);
    let degraded = "tier_degraded{reason=\"config\",tier=\"redis\"}";
    for (reload, more) in [(1.0, ""), (2.0, "write: {policy: WriteThrough}\n")] {
        sidecar.configure(&(config_of("'http://u:secret@host'") + more));
        sidecar.wait_metric("config_reloads_total{result=\"applied\"}", reload);
        let tier = sidecar.wait_tier("redis", "degraded");
        assert_eq!(tier["reason"], "Config");
        let message = tier["message"].as_str().unwrap();
        assert!(message.contains("keeping the previous"), "{message}");
        assert!(!message.contains("secret"), "{message}");
        sidecar.wait_metric(degraded, 1.0);
        assert!(sidecar.warned("redis", "Config"), "{}", sidecar.log());
    }
    stored(&sidecar, 1, 2);
    // What does not count is not said to.
    std::fs::write(sidecar.token_file(), "token").unwrap();
    let counts = sidecar.get("/v1/config", Some("token")).1;
    let socket = servers[0].socket().display().to_string();
    assert!(counts.contains(&socket), "{counts}");
    sidecar.configure(&config(&servers));
    sidecar.wait_tier("redis", "ready");
    assert_eq!(sidecar.metric(degraded), 0.0);
}

#[test]
fn a_url_that_cannot_be_right_is_mended_without_a_restart() {
    let servers = [Redis::start()];
    let sidecar = Sidecar::start(&config_of("'http://u:secret@host'"));
    sidecar.wait_populated();
    sidecar.wait_off("redis", "Config");
    for (url, fault) in [
        ("redis://host:port", "host and a port"),
        ("http://u:secret@host", "must be redis"),
    ] {
        sidecar.configure(&config_of(&format!("'{url}'")));
        wait_for(fault, || {
            let tier = sidecar.tier("redis");
            let message = tier["message"].as_str()?;
            message.contains(fault).then_some(())
        });
    }
    sidecar.configure(&config(&servers));
    sidecar.wait_tier("redis", "ready");
    assert_eq!(sidecar.status()["restart_needed"], serde_json::json!([]));
    stored(&sidecar, 1, 2);
}

#[test]
fn one_of_several_servers_that_dies_is_named_while_the_tier_serves_on() {
    let mut servers = [Redis::start(), Redis::start(), Redis::start()];
    let sidecar = start(&servers);
    stored(&sidecar, 1, 8);
    let up = |server: &Redis| {
        let name = server.socket().display().to_string();
        sidecar.metric(&format!(
            "tier_server_up{{server=\"{name}\",tier=\"redis\"}}"
        ))
    };
    assert_eq!(servers.iter().map(up).sum::<f64>(), 3.0);
    servers[1].kill();
    wait_for("the server to be lost", || {
        (up(&servers[1]) == 0.0).then_some(())
    });
    let tier = sidecar.tier("redis");
    assert_eq!(tier["state"], "ready", "{tier}");
    let states: Vec<_> = tier["servers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|s| &s["state"])
        .collect();
    assert_eq!(states, ["ready", "off", "ready"], "{tier}");
    assert_eq!(up(&servers[0]) + up(&servers[2]), 2.0);
    servers[1].run();
    wait_for("the server to be back", || {
        (up(&servers[1]) == 1.0).then_some(())
    });
}

#[test]
fn a_master_that_dies_is_named_until_the_sentinel_has_another_one_which_has_what_was_stored() {
    let ports = [(); 3].map(|()| free_port().to_string());
    let [first, second, third] = ports.each_ref().map(String::as_str);
    let mut master = Redis::start_with(&["--port", first]);
    let replica = Redis::start_with(&["--port", second, "--replicaof", "127.0.0.1", first]);
    replica.wait("INFO replication", "master_link_status:up");
    let sentinel = Redis::sentinel(third, first);
    sentinel.wait("SENTINEL REPLICAS kv", "slave-priority");
    let config = config_of(&format!("\"redis-sentinel://127.0.0.1:{third}/kv\""));
    let sidecar = start_by(&config);
    stored(&sidecar, 1, 4);
    wait_for("the replica", || {
        (replica.keys() == master.keys()).then_some(())
    });
    master.kill();
    let down = sidecar.wait_tier("redis", "off");
    let reason = down["reason"].as_str().unwrap();
    assert!(reason.contains("Unreachable"), "{reason}");
    let named = "tier_down{reason=\"unreachable\",tier=\"redis\"}";
    sidecar.wait_metric(named, 1.0);
    // A replica whose link was down for longer than ten times this, before the sentinel saw it, would not be taken.
    let quick = "SENTINEL SET kv down-after-milliseconds 3000";
    assert_eq!(sentinel.ask(quick), "+OK");
    sidecar.wait_tier("redis", "ready");
    wait_for("the metric's end", || {
        (sidecar.metric(named) == 0.0).then_some(())
    });
    stored(&sidecar, 2, 8);
    let other = start_by(&config);
    let mut vllm = Vllm::attach(&other.socket());
    vllm.finds_below(&hashes(1, 4), 4, REDIS);
}

#[test]
fn a_tier_whose_servers_never_answered_is_not_said_to_be_ready() {
    let mut servers = [Redis::start()];
    servers[0].kill();
    let sidecar = Sidecar::start(&config(&servers));
    let known = wait_for("the tier to be known", || {
        let tier = sidecar.tier("redis");
        (tier["state"] != "starting").then_some(tier)
    });
    assert_eq!(known["state"], "off", "{known}");
    servers[0].run();
    sidecar.wait_tier("redis", "ready");
}

/// A sidecar with a folder that has two chunks, and Redis that it cannot use by this reason, serves from the folder and from memory.
/// Returns what status says of Redis.
fn is_named_while_the_others_serve(redis: &str, disk: &Path, reason: &str) -> (Sidecar, Value) {
    let disk = disk_at(disk);
    let sidecar = Sidecar::start(&format!(
        "memory: {{size: 64Mi}}\ncache: {{minLoadTokens: 0}}\n{disk}redis: {redis}\n"
    ));
    sidecar.wait_populated();
    let tier = sidecar.wait_off("redis", reason);
    disk_and_memory_serve(&sidecar);
    (sidecar, tier)
}

#[test]
fn settings_that_cannot_be_right_are_named_and_disk_and_memory_serve_on() {
    let disk = filled();
    for (redis, reason) in [
        ("{urls: ['http://u:secret@host']}", "Config"),
        (
            "{urls: ['redis://127.0.0.1:1'], auth: /not/there}",
            "Unauthenticated",
        ),
    ] {
        let (sidecar, tier) = is_named_while_the_others_serve(redis, disk.path(), reason);
        assert!(!tier.to_string().contains("secret"), "{tier}");
        assert!(!sidecar.log().contains("secret"));
    }
}

#[test]
fn a_server_that_lets_nobody_in_is_named_in_status_metric_and_log_while_the_disk_serves() {
    let [port, of_tls] = [(); 2].map(|()| free_port().to_string());
    let (auth, disk) = (TempDir::new().unwrap(), filled());
    let certificates = Certificates::local();
    let [certificate, key, ca] =
        ["tls.crt", "tls.key", "ca.crt"].map(|name| certificates.path(name).display().to_string());
    let tls = [
        ["--tls-port", &of_tls],
        ["--tls-cert-file", &certificate],
        ["--tls-key-file", &key],
        ["--tls-ca-cert-file", &ca],
    ];
    let args = [["--port", &port], ["--requirepass", "right"]];
    let server = Redis::start_with(&[&args[..], &tls[..]].concat().concat());
    std::fs::write(auth.path().join("password"), "hunter-2").unwrap();
    let with = |url: String, more: String| format!("{{urls: ['{url}']{more}}}");
    let wrong = format!(", auth: {}", auth.path().display());
    for (redis, reason) in [
        (
            with(format!("redis+unix://{}", server.socket().display()), wrong),
            "Unauthenticated",
        ),
        (
            with(format!("redis://127.0.0.1:{port}"), String::new()),
            "Unauthenticated",
        ),
        (
            with(format!("rediss://127.0.0.1:{port}"), String::new()),
            "Unreachable",
        ),
        // A certificate that none of the system's authorities vouches for.
        (
            with(format!("rediss://127.0.0.1:{of_tls}"), String::new()),
            "Unauthenticated",
        ),
    ] {
        let (sidecar, tier) = is_named_while_the_others_serve(&redis, disk.path(), reason);
        let log = sidecar.log();
        assert!(!log.contains("hunter-2") && !tier.to_string().contains("hunter-2"));
    }
}
