//! The start script and the probes with a real server, whose passwords change.

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
    redis: ManagedRedis,
    server: Child,
}

impl Pod {
    fn start(keys: Value) -> Self {
        let pool = managing(keys);
        let redis = managed(&pool).unwrap().clone();
        let root = tempfile::tempdir().unwrap();
        for folder in [SECRET_PATH, RUN_PATH, DATA_PATH] {
            fs::create_dir_all(below(&root, folder)).unwrap();
        }
        for key in [PASSWORD, MANAGER_PASSWORD] {
            fs::write(below(&root, SECRET_PATH).join(key), "first").unwrap();
        }
        let [port, bus] = [(); 2].map(|()| {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port().to_string()
        });
        let mut words = command(&redis).to_vec();
        // Redis 7.0, which this machine may have, knows no names of nodes.
        let arguments = arguments(&pool, &redis, 64 << 20);
        let known = |pair: &[String]| pair[0] != "--cluster-announce-human-nodename";
        let (pairs, rest) = arguments.split_at(arguments.len() / 2 * 2);
        words.extend(
            pairs
                .chunks(2)
                .filter(|pair| known(pair))
                .flatten()
                .cloned(),
        );
        words.extend_from_slice(rest);
        if is_cluster(&redis) {
            words.extend(["--cluster-port".to_owned(), bus]);
        }
        let mut start = here(&root, &port, &words);
        let server = start.stdout(Stdio::null()).spawn().unwrap();
        let pod = Self {
            root,
            port,
            redis,
            server,
        };
        let end = Instant::now() + Duration::from_secs(30);
        while pod.ask("default", "first", "ping") != "PONG" {
            assert!(Instant::now() < end, "the server does not start");
            sleep(Duration::from_millis(20));
        }
        pod
    }

    fn change(&self, key: &str, password: &str) {
        fs::write(below(&self.root, SECRET_PATH).join(key), password).unwrap();
    }

    /// The last change of this password is older.
    fn age(&self, key: &str, seconds: u64) {
        let file = below(&self.root, RUN_PATH).join(format!("{key}.since"));
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
        self.server.kill().unwrap();
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
