//! The start script and the probes with a real server, whose passwords change and which starts again.

use super::*;
use crate::desired::redis::managed;
use crate::desired::redis::tests::managing;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A pod with one server. Its folders are below a temporary one.
struct Pod {
    root: TempDir,
    port: String,
    bus: String,
    pool: KVCachePool,
    redis: ManagedRedis,
    server: Child,
}

impl Pod {
    /// A pod whose server is ready.
    fn start(keys: Value) -> Self {
        let pool = managing(keys);
        let redis = managed(&pool).unwrap().clone();
        let root = tempfile::tempdir().unwrap();
        for folder in [SECRET_PATH, RUN_PATH, DATA_PATH, EXPORTER_PATH] {
            fs::create_dir_all(below(&root, folder)).unwrap();
        }
        for key in [PASSWORD, MANAGER_PASSWORD] {
            fs::write(below(&root, SECRET_PATH).join(key), "first").unwrap();
        }
        let [port, bus] = [(); 2].map(|()| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port().to_string()
        });
        let server = Command::new("true").spawn().unwrap();
        let mut pod = Self {
            root,
            port,
            bus,
            pool,
            redis,
            server,
        };
        pod.start_again();
        pod
    }

    /// Starts the container, and waits until its server answers.
    fn start_again(&mut self) {
        self.spawn();
        let end = Instant::now() + Duration::from_secs(30);
        while self.ask("default", "first", "ping") != "PONG" {
            assert!(Instant::now() < end, "the server does not start");
            sleep(Duration::from_millis(20));
        }
    }

    /// Starts the container, whose last process has ended.
    fn spawn(&mut self) {
        self.server.wait().unwrap();
        let mut words = command(&self.redis).to_vec();
        let mut arguments = arguments(&self.pool, &self.redis, 64 << 20);
        // Redis 7.0, which this machine may have, knows no names of nodes.
        let unknown = "--cluster-announce-human-nodename";
        if let Some(at) = arguments.iter().position(|word| word == unknown) {
            arguments.drain(at..at + 2);
        }
        words.extend(arguments);
        if is_cluster(&self.redis) {
            words.extend(["--cluster-port".to_owned(), self.bus.clone()]);
        }
        let mut start = here(&self.root, &self.port, &words);
        self.server = start.stdout(Stdio::null()).spawn().unwrap();
    }

    /// Ends the server as the kubelet does.
    fn stop(&mut self) {
        let id = self.server.id().to_string();
        Command::new("kill").arg(id).status().unwrap();
        self.server.wait().unwrap();
    }

    fn file(&self, folder: &str, name: &str) -> PathBuf {
        below(&self.root, folder).join(name)
    }

    fn change(&self, key: &str, password: &str) {
        fs::write(self.file(SECRET_PATH, key), password).unwrap();
    }

    /// The last change of this password is older.
    fn age(&self, key: &str, seconds: u64) {
        let file = self.file(RUN_PATH, &format!("{key}.since"));
        let since: u64 = fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        fs::write(file, format!("{}\n", since - seconds)).unwrap();
    }

    /// Runs readiness and liveness.
    fn probe(&self) -> [Output; 2] {
        probes(&self.redis).map(|probe| {
            let words = probe["exec"]["command"].as_array().unwrap().iter();
            let words: Vec<String> = words.map(|w| w.as_str().unwrap().to_owned()).collect();
            here(&self.root, &self.port, &words).output().unwrap()
        })
    }

    fn ask(&self, user: &str, password: &str, command: &str) -> String {
        let mut client = Command::new("redis-cli");
        client.args(["-p", &self.port, "--user", user, "--pass", password]);
        client.arg("--no-auth-warning").args(command.split(' '));
        let output = client.output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Which of these passwords the server accepts from a user.
    fn accepted<'a>(&self, user: &str, passwords: &[&'a str]) -> Vec<&'a str> {
        let is_accepted = |password: &&str| self.ask(user, password, "ping") == "PONG";
        passwords.iter().copied().filter(is_accepted).collect()
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        let _ = self.server.kill();
        self.server.wait().unwrap();
    }
}

fn below(root: &TempDir, path: &str) -> PathBuf {
    root.path().join(Path::new(path).strip_prefix("/").unwrap())
}

/// A command of the container, with folders and ports of this machine.
fn here(root: &TempDir, port: &str, words: &[String]) -> Command {
    let replaced = words.iter().map(|word| {
        let word = word.replace(&PORT.to_string(), port);
        let word = word.replace(&format!("$({POD_NAME})"), "pod-0");
        [SECRET_PATH, RUN_PATH, DATA_PATH]
            .iter()
            .fold(word, |word, folder| {
                word.replace(folder, below(root, folder).to_str().unwrap())
            })
    });
    let words: Vec<String> = replaced.collect();
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]).current_dir(root.path());
    command
}

const ALL: [&str; 3] = ["first", "second", "third"];

#[test]
fn a_new_password_is_accepted_beside_the_one_before_until_all_clients_have_it() {
    let pod = Pod::start(json!({}));
    pod.ask("default", "first", "set kvcp:a 1");
    assert_eq!(pod.accepted("default", &ALL), ["first"]);
    let [ready, alive] = pod.probe();
    assert!(ready.status.success(), "{ready:?}");
    assert!(alive.status.success(), "{alive:?}");
    pod.change(PASSWORD, "second");
    assert!(pod.probe().iter().all(|probe| probe.status.success()));
    assert_eq!(pod.accepted("default", &ALL), ["first", "second"]);
    pod.age(PASSWORD, u64::from(REFUSED_AFTER) - 60);
    pod.probe();
    assert_eq!(pod.accepted("default", &ALL), ["first", "second"]);
    pod.change(PASSWORD, "third");
    pod.probe();
    assert_eq!(pod.accepted("default", &ALL), ["second", "third"]);
    pod.age(PASSWORD, u64::from(REFUSED_AFTER) + 1);
    assert!(pod.probe().iter().all(|probe| probe.status.success()));
    assert_eq!(pod.accepted("default", &ALL), ["third"]);
    assert_eq!(pod.ask("default", "third", "get kvcp:a"), "1");
    // The rights are those of before.
    for command in ["flushall", "config get maxmemory", "acl list"] {
        let denied = pod.ask("default", "third", command);
        assert!(denied.contains("NOPERM"), "{command}: {denied}");
    }
}

#[test]
fn a_password_that_no_config_file_can_hold_is_ignored() {
    let pod = Pod::start(json!({}));
    for unusable in ["", "line\nline", "two words", "a\\", "a\"", "a'"] {
        pod.change(PASSWORD, unusable);
        assert!(pod.probe().iter().all(|probe| probe.status.success()));
        assert_eq!(pod.accepted("default", &["first", unusable]), ["first"]);
    }
    for odd in ["$HOME`id`", "b/c&d", "*?[#%>;"] {
        pod.change(PASSWORD, odd);
        assert!(pod.probe().iter().all(|probe| probe.status.success()));
        assert_eq!(pod.accepted("default", &[odd]), [odd]);
    }
}

#[test]
fn a_server_does_not_start_with_an_unusable_password_and_says_why() {
    let redis = managed(&managing(json!({}))).unwrap().clone();
    for unusable in ["", "two words"] {
        let root = tempfile::tempdir().unwrap();
        for folder in [SECRET_PATH, RUN_PATH] {
            fs::create_dir_all(below(&root, folder)).unwrap();
        }
        fs::write(below(&root, SECRET_PATH).join(PASSWORD), unusable).unwrap();
        let output = here(&root, "1", &command(&redis)).output().unwrap();
        assert!(!output.status.success());
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(
            message,
            "password in the Secret is not usable: expected no spaces, quotes and backslashes\n"
        );
    }
}

#[test]
fn servers_of_a_cluster_use_a_new_password_only_when_all_accept_it() {
    let pod = Pod::start(json!({"mode": "Cluster", "shards": 3}));
    let masterauth = || pod.ask(MANAGER, "second", "config get masterauth");
    pod.change(MANAGER_PASSWORD, "second");
    pod.age(MANAGER_PASSWORD, 24 * 60 * 60);
    let [_, alive] = pod.probe();
    assert!(alive.status.success());
    assert_eq!(pod.accepted(MANAGER, &ALL), ["first", "second"]);
    assert_eq!(pod.accepted("default", &ALL), ["first"]);
    assert_eq!(masterauth(), "masterauth\nfirst");
    pod.age(MANAGER_PASSWORD, u64::from(USED_AFTER) + 1);
    pod.probe();
    assert_eq!(masterauth(), "masterauth\nsecond");
    assert_eq!(pod.accepted(MANAGER, &ALL), ["first", "second"]);
    pod.age(MANAGER_PASSWORD, u64::from(REFUSED_AFTER));
    pod.probe();
    assert_eq!(pod.accepted(MANAGER, &ALL), ["second"]);
}

#[test]
fn a_stopped_server_has_its_chunks_when_it_starts_again() {
    let mut pod = Pod::start(json!({"persistence": {"size": "1Gi"}}));
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
    assert_eq!(pod.ask("default", "first", "set kvcp:old 1 px 1000"), "OK");
    let killed = pod.file(DATA_PATH, "temp-7.rdb");
    fs::write(&killed, "part of a snapshot").unwrap();
    pod.stop();
    sleep(Duration::from_millis(1100));
    pod.start_again();
    assert_eq!(pod.ask("default", "first", "get kvcp:a"), "1");
    assert_eq!(pod.ask("default", "first", "get kvcp:old"), "");
    assert!(!killed.exists(), "the volume does not fill");
    assert!(pod.probe().iter().all(|probe| probe.status.success()));
    assert!(!pod.file(DATA_PATH, "starts").exists());
}

#[test]
fn a_server_whose_snapshot_cannot_be_loaded_serves_without_it() {
    let mut pod = Pod::start(json!({"persistence": {"size": "1Gi"}}));
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
    pod.probe();
    pod.stop();
    let snapshot = pod.file(DATA_PATH, SNAPSHOT);
    let mut bytes = fs::read(&snapshot).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&snapshot, bytes).unwrap();
    for _ in 0..STARTS {
        pod.spawn();
        assert!(!pod.server.wait().unwrap().success());
        assert!(snapshot.exists(), "the next start tries again");
    }
    pod.start_again();
    assert_eq!(pod.ask("default", "first", "get kvcp:a"), "");
    assert_eq!(pod.ask("default", "first", "set kvcp:a 2"), "OK");
    pod.probe();
    pod.stop();
    pod.start_again();
    assert_eq!(pod.ask("default", "first", "get kvcp:a"), "2");
}

#[test]
fn a_snapshot_of_a_server_with_more_memory_is_discarded() {
    let mut pod = Pod::start(json!({"persistence": {"size": "1Gi"}, "memoryPerShard": "64Mi"}));
    let snapshot = fs::File::create(pod.file(DATA_PATH, SNAPSHOT)).unwrap();
    // Had it been loaded, the server would not start: it is no snapshot.
    snapshot.set_len(72 << 20).unwrap();
    pod.server.kill().unwrap();
    pod.spawn();
    assert!(!pod.server.wait().unwrap().success(), "it is small enough");
    snapshot.set_len((72 << 20) + 1).unwrap();
    pod.start_again();
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
}

#[test]
fn starts_that_the_kubelet_ends_do_not_count() {
    let mut pod = Pod::start(json!({"persistence": {"size": "1Gi"}}));
    let hook = before_stop(&pod.redis).unwrap()["preStop"]["exec"]["command"].clone();
    let hook: Vec<String> = serde_json::from_value(hook).unwrap();
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
    for _ in 0..=STARTS {
        assert!(
            here(&pod.root, &pod.port, &hook)
                .status()
                .unwrap()
                .success()
        );
        pod.stop();
        pod.start_again();
        assert!(pod.file(DATA_PATH, "starts").exists(), "no probe has run");
    }
    assert_eq!(pod.ask("default", "first", "get kvcp:a"), "1");
}

#[test]
fn a_volume_that_cannot_be_written_to_keeps_no_server_from_starting() {
    let mut pod = Pod::start(json!({"persistence": {"size": "1Gi"}}));
    pod.stop();
    let starts = pod.file(DATA_PATH, "starts");
    fs::remove_file(&starts).unwrap();
    // Root may write to any file, but not into a folder.
    fs::create_dir(&starts).unwrap();
    pod.start_again();
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
}

#[test]
fn a_server_without_a_volume_writes_nothing() {
    let mut pod = Pod::start(json!({}));
    assert_eq!(pod.ask("default", "first", "set kvcp:a 1"), "OK");
    pod.stop();
    assert_eq!(
        fs::read_dir(below(&pod.root, DATA_PATH)).unwrap().count(),
        0
    );
    assert!(!pod.root.path().join("dump.rdb").exists());
}

#[test]
fn an_exporter_may_read_counters_and_keeps_its_login() {
    let mut pod = Pod::start(json!({"exporter": {}}));
    let login = |pod: &Pod| -> Value {
        let file = fs::read(pod.file(EXPORTER_PATH, "passwords.json")).unwrap();
        serde_json::from_slice(&file).unwrap()
    };
    let before = login(&pod);
    let of = |user: &str| &before[format!("redis://{user}localhost:{}", pod.port)];
    let password = of("");
    assert_eq!(password, of("exporter@"));
    let ask = |pod: &Pod, command| pod.ask(EXPORTER, password.as_str().unwrap(), command);
    for read in ["ping", "info all", "latency latest", "slowlog len"] {
        assert!(!ask(&pod, read).contains("NOPERM"), "{read}");
    }
    for denied in [
        "get kvcp:a",
        "slowlog get",
        "config get maxmemory",
        "scan 0",
    ] {
        assert!(ask(&pod, denied).contains("NOPERM"), "{denied}");
    }
    pod.stop();
    pod.start_again();
    assert_eq!(login(&pod), before, "the exporter has read it already");
    assert_eq!(ask(&pod, "ping"), "PONG");
}
