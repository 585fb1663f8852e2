//! A sidecar of a test: its folder, its config, its processes, and what it says over HTTP.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::testing::free_port;
pub use crate::wait::{DEADLINE, wait_for};
use kvcachepool_metrics::snake_case;

pub fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_kvcachepool-sidecar")
}

pub struct Sidecar {
    folder: tempfile::TempDir,
    port: u16,
    process: Option<Child>,
}

impl Sidecar {
    /// A folder and a config; nothing runs yet. `extra` holds lines of YAML without the keys `socket`, `admin` and `log`.
    pub fn prepare(extra: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let this = Self {
            folder,
            port,
            process: None,
        };
        this.configure(extra);
        this
    }

    /// Starts with `extra` config and waits until the socket is served.
    pub fn start(extra: &str) -> Self {
        let mut this = Self::prepare(extra);
        this.run();
        this.wait_socket();
        this
    }

    /// A small memory tier, fully populated.
    pub fn small() -> Self {
        let this = Self::start("memory: {size: 64Mi}\n");
        this.wait_populated();
        this
    }

    pub fn configure(&self, extra: &str) {
        let text = format!(
            "socket: {}\nadmin: {{listen: \"127.0.0.1:{}\", tokenFile: {}}}\nlog: {{format: text, level: debug}}\n{extra}",
            self.socket().display(),
            self.port,
            self.token_file().display(),
        );
        self.write_config(&text);
    }

    pub fn write_config(&self, text: &str) {
        std::fs::write(self.config(), text).unwrap();
    }

    pub fn run(&mut self) {
        self.run_by("exec \"$@\"");
    }

    /// Runs in the cgroup whose `cgroup.procs` is given.
    pub fn run_below(&mut self, procs: &Path) {
        let procs = procs.display();
        self.run_by(&format!("echo $$ > {procs} && exec \"$@\""));
    }

    /// Runs what a shell makes of `$@`, the command line of the sidecar.
    pub fn run_by(&mut self, script: &str) {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.folder.path().join("log"))
            .unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "sh", binary(), "run", "--config"])
            .arg(self.config())
            .arg("--pool-config")
            .arg(self.pool_config())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .process_group(0);
        dies_with_us(&mut command);
        self.process = Some(command.spawn().unwrap());
    }

    pub fn wait_socket(&self) {
        wait_for("the socket", || {
            std::os::unix::net::UnixStream::connect(self.socket()).ok()
        });
    }

    pub fn wait_populated(&self) {
        wait_for("a populated arena", || {
            let memory = self.status()["memory"].clone();
            (memory["capacity_bytes"].as_u64()? > 0
                && memory["populated_bytes"] == memory["capacity_bytes"])
                .then_some(())
        });
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("sidecar.sock")
    }

    pub fn config(&self) -> PathBuf {
        self.folder.path().join("config.v1.yaml")
    }

    /// The pool's file, which most tests never write.
    pub fn pool_config(&self) -> PathBuf {
        self.folder.path().join("pool/config.v1.yaml")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn token_file(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// Where the admin port is.
    pub fn address(&self) -> (&'static str, u16) {
        ("127.0.0.1", self.port)
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub fn supervisor(&self) -> u32 {
        self.process.as_ref().unwrap().id()
    }

    /// The engine's process, as soon as there is one.
    pub fn engine(&self) -> u32 {
        let supervisor = self.supervisor();
        wait_for("the engine process", || {
            children(supervisor).first().copied()
        })
    }

    /// SIGKILL of supervisor and engine, as the death of a container.
    pub fn kill_all(&mut self) {
        let mut child = self.process.take().unwrap();
        let engines = children(child.id());
        child.kill().unwrap();
        child.wait().unwrap();
        // A process looks dead before the last of its threads has let go of the socket.
        wait_for("the engine's end", || {
            let gone = engines.iter().all(|pid| !alive(*pid));
            (gone && std::os::unix::net::UnixStream::connect(self.socket()).is_err()).then_some(())
        });
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        signal_to(self.supervisor(), signal);
    }

    /// Exit code after it ended by itself.
    pub fn wait_exit(&mut self) -> Option<i32> {
        let child = self.process.as_mut().unwrap();
        let status = wait_for("the end of the sidecar", || child.try_wait().unwrap());
        self.process = None;
        status.code()
    }

    pub fn get(&self, path: &str, token: Option<&str>) -> (u16, String) {
        let authorization =
            token.map_or(String::new(), |t| format!("authorization: Bearer {t}\r\n"));
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            stream.set_read_timeout(Some(DEADLINE))?;
            write!(
                stream,
                "GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{authorization}\r\n"
            )?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        // A restart of the engine may cut one request.
        let text = wait_for("an HTTP answer", || {
            ask().ok().filter(|t| t.contains("\r\n\r\n"))
        });
        let code = text.split_whitespace().nth(1).unwrap().parse().unwrap();
        (code, text.split_once("\r\n\r\n").unwrap().1.to_owned())
    }

    /// The status; null while the engine is restarting.
    pub fn status(&self) -> serde_json::Value {
        let (_, body) = self.get("/v1/status", None);
        serde_json::from_str(&body).unwrap_or_default()
    }

    /// What the status says of a tier.
    pub fn tier(&self, name: &str) -> serde_json::Value {
        let tiers = self.status()["tiers"].clone();
        let mut tiers = tiers.as_array().unwrap().iter();
        tiers.find(|t| t["name"] == name).unwrap().clone()
    }

    /// The same, once the tier is in this state.
    pub fn wait_tier(&self, name: &str, state: &str) -> serde_json::Value {
        wait_for(&format!("tier {name} to be {state}"), || {
            let tier = self.tier(name);
            (tier["state"] == state).then_some(tier)
        })
    }

    /// The same, once the tier is off by this reason, which metric and log name, too.
    pub fn wait_off(&self, name: &str, reason: &str) -> serde_json::Value {
        let tier = wait_for(&format!("tier {name} to be off by {reason}"), || {
            let tier = self.tier(name);
            (tier["state"] == "off" && tier["reason"] == reason).then_some(tier)
        });
        self.wait_metric(
            &format!(
                "tier_down{{reason=\"{}\",tier=\"{name}\"}}",
                snake_case(reason)
            ),
            1.0,
        );
        assert!(self.warned(name, reason), "{}", self.log());
        tier
    }

    /// Does the log warn of this reason for this tier?
    pub fn warned(&self, tier: &str, reason: &str) -> bool {
        let named = format!("tier=\"{tier}\" reason=\"{reason}\"");
        let warns = |line: &str| line.contains("WARN") && line.contains(&named);
        self.log().lines().any(warns)
    }

    pub fn metrics(&self) -> BTreeMap<String, f64> {
        let (_, body) = self.get("/metrics", None);
        body.lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| {
                let (name, value) = line.rsplit_once(' ')?;
                Some((
                    name.strip_prefix("kvcachepool_")?.to_owned(),
                    value.parse().ok()?,
                ))
            })
            .collect()
    }

    pub fn metric(&self, name: &str) -> f64 {
        self.metrics().get(name).copied().unwrap_or(0.0)
    }

    pub fn wait_metric(&self, name: &str, at_least: f64) {
        wait_for(&format!("{name} >= {at_least}"), || {
            (self.metric(name) >= at_least).then_some(())
        });
    }

    /// Names of the reasons why it serves less than configured.
    pub fn reasons(&self) -> Vec<String> {
        let status = self.status();
        let mut names: Vec<String> = status["reasons"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|r| r["code"].as_str().map(str::to_owned))
            .collect();
        names.extend(status["memory"]["reason"].as_str().map(str::to_owned));
        names
    }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("log of the sidecar:\n{}", self.log());
        }
        if self.process.is_some() {
            self.kill_all();
        }
    }
}

/// The process that a command starts is killed when this thread ends, however it ends.
pub fn dies_with_us(command: &mut Command) {
    // SAFETY: one system call between fork and exec.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))
                .map_err(Into::into)
        });
    }
}

/// Processes whose parent is `pid`.
pub fn children(pid: u32) -> Vec<u32> {
    std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))
        .unwrap_or_default()
        .split_whitespace()
        .filter_map(|p| p.parse().ok())
        .collect()
}

fn alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(") ").next().unwrap_or("Z").starts_with('Z'))
}

pub fn signal_to(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}
