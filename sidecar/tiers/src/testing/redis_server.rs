//! Real Redis servers, each for one test: started in a temporary folder, and killed with the test or its process.
#![allow(unsafe_code)]

use crate::testing::free_port;
use crate::testing::suite::{Memory, Sample};
use kvcachepool_tiers::Tier;
use kvcachepool_tiers::layers::{self, layered};
use kvcachepool_tiers::redis::{Options, Redis, Settings, TlsFiles};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener as AsyncListener;

/// Timeout of all waits.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// Waits until a condition holds.
pub async fn until(what: &str, mut good: impl AsyncFnMut() -> bool) {
    let began = Instant::now();
    while !good().await {
        assert!(began.elapsed() < PATIENCE, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A `redis-server` or a compatible program.
pub struct Server {
    program: String,
    pub folder: TempDir,
    pub port: u16,
    args: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// A Redis server with these options, besides port, socket and no snapshots.
    pub fn start(args: &[&str]) -> Self {
        Self::of("redis-server", args)
    }

    /// The same, of another program.
    pub fn of(program: &str, args: &[&str]) -> Self {
        let mut server = Self {
            program: program.into(),
            folder: tempfile::tempdir().unwrap(),
            port: free_port(),
            args: args.iter().map(ToString::to_string).collect(),
            child: None,
        };
        server.run();
        server
    }

    /// A sentinel that watches the master at this port as `kv`, with a quorum of one.
    pub fn sentinel(master: &str) -> Self {
        Self::sentinel_of("redis-server", &format!("127.0.0.1 {master} 1"), &[])
    }

    /// The same, of another program: `watched` is address, port and quorum. `args` are further options.
    pub fn sentinel_of(program: &str, watched: &str, args: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = folder.path().join("sentinel.conf");
        // A failed failover is retried after twice the last of these times.
        let watched = format!(
            "sentinel monitor kv {watched}\nsentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 2000\n"
        );
        std::fs::write(&config, watched).unwrap();
        let mut server = Self {
            program: program.into(),
            folder,
            port: free_port(),
            args: [&["--sentinel"], args]
                .concat()
                .iter()
                .map(ToString::to_string)
                .collect(),
            child: None,
        };
        server.run();
        server
    }

    /// Starts it again in its folder after it was killed.
    pub fn run_again(&mut self) {
        let port = self.port;
        self.run();
        assert_eq!(self.port, port, "somebody else took its port");
    }

    fn run(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut command = Command::new(&self.program);
            // A sentinel writes into its file.
            let file = self.folder.path().join("sentinel.conf");
            if file.exists() {
                command.arg(file);
            }
            command
                .current_dir(self.folder.path())
                .args([
                    "--port",
                    &self.port.to_string(),
                    "--bind",
                    "127.0.0.1",
                    "-::1",
                ])
                .args([
                    "--unixsocket",
                    "socket",
                    "--save",
                    "",
                    "--loglevel",
                    "warning",
                ])
                .args(["--logfile", "log"])
                .args(&self.args)
                .stdin(Stdio::null())
                .stdout(Stdio::null());
            // SAFETY: one system call between fork and exec.
            unsafe {
                command.pre_exec(|| {
                    set_parent_process_death_signal(Some(Signal::KILL))?;
                    Ok(())
                });
            }
            let child = command.spawn();
            let child = child.unwrap_or_else(|e| {
                panic!(
                    "{}: {e}; install it: apt-get install redis-server",
                    self.program
                )
            });
            self.child = Some(child);
            if self.is_up(end) {
                return;
            }
            assert!(
                Instant::now() < end,
                "{} does not start:\n{}",
                self.program,
                self.log()
            );
            // The port was taken meanwhile.
            self.port = free_port();
        }
    }

    fn is_up(&mut self, end: Instant) -> bool {
        while Instant::now() < end {
            if let Ok(mut stream) = UnixStream::connect(self.socket()) {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut answer = [0; 1];
                let asked = stream.write_all(b"PING\r\n");
                if asked.and_then(|()| stream.read_exact(&mut answer)).is_ok() {
                    return true;
                }
            }
            if self.child.as_mut().unwrap().try_wait().unwrap().is_some() {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        false
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// Kills it as a crash would.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let _ = std::fs::remove_file(self.socket());
    }

    pub fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.child.as_ref().unwrap())
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub fn tcp(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn unix(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }

    /// The reply to a command, as `redis-cli` shows it.
    pub fn say(&self, words: &[&str]) -> String {
        cli(&["-s", &self.socket().display().to_string()], words)
    }

    /// Calls of a command since the statistics were reset.
    pub fn calls(&self, command: &str) -> u64 {
        let stats = self.say(&["INFO", "commandstats"]);
        let named = format!("cmdstat_{command}:calls=");
        let line = stats.lines().find_map(|line| line.strip_prefix(&named));
        line.map_or(0, |line| line.split(',').next().unwrap().parse().unwrap())
    }

    /// Repeats a command until its reply is `good`.
    pub fn wait(&self, words: &[&str], good: impl Fn(&str) -> bool) {
        let end = Instant::now() + PATIENCE;
        loop {
            let answer = self.say(words);
            if good(&answer) {
                return;
            }
            assert!(Instant::now() < end, "{words:?}: {answer}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Output of `redis-cli`.
pub fn cli(to: &[&str], words: &[&str]) -> String {
    let output = Command::new("redis-cli").args(to).args(words).output();
    let output = output.expect("install it: apt-get install redis-tools");
    String::from_utf8_lossy(&output.stdout)
        .trim_end()
        .to_string()
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Settings for these URLs.
pub fn settings(urls: &[String]) -> Settings {
    Settings {
        urls: urls.to_vec(),
        auth: None,
        tls_files: TlsFiles::default(),
        ttl: Duration::ZERO,
        options: Options::default(),
    }
}

/// The tier of these URLs.
pub fn open(urls: &[String]) -> Redis {
    Redis::open(&settings(urls)).unwrap()
}

/// The same with a TTL of 1,000 s.
pub fn with_ttl(urls: &[String]) -> Redis {
    let mut settings = settings(urls);
    settings.ttl = Duration::from_secs(1_000);
    Redis::open(&settings).unwrap()
}

/// A tier, and memory to use with it.
pub struct Spot {
    pub tier: Arc<dyn Tier>,
    pub memory: Memory,
}

impl Spot {
    pub fn new(tier: Redis) -> Self {
        Self {
            tier: Arc::new(tier),
            memory: Memory::new(1 << 30),
        }
    }

    /// With all layers.
    pub fn layered(tier: Redis) -> Self {
        let tier = layered(Arc::new(tier), &layers::Options::default()).tier;
        let memory = Memory::new(1 << 30);
        Self { tier, memory }
    }

    /// Puts an object, which must succeed.
    pub async fn put(&self, sample: &Sample) {
        if let Err(e) = self.tier.put(sample.put(&self.memory)).await {
            panic!("{e}");
        }
    }

    /// Gets an object, whose bytes must be those of the put.
    pub async fn check(&self, sample: &Sample) {
        let get = sample.get_all(&self.memory);
        match self.tier.get(get.clone()).await {
            Ok(head) => assert_eq!(head, sample.object),
            Err(e) => panic!("{e}"),
        }
        assert!(sample.lies_in(&get.places));
    }
}

/// A fake server with a fixed reply.
pub struct Scripted {
    port: u16,
    open: Arc<AtomicI64>,
}

impl Scripted {
    /// Answers each command with this line.
    pub async fn start(line: &str) -> Self {
        Self::patient(1, line).await
    }

    /// Answers nothing.
    pub async fn silent() -> Self {
        Self::patient(usize::MAX, "").await
    }

    /// Answers all commands at once after it has received this many.
    pub async fn patient(commands: usize, line: &str) -> Self {
        let listener = AsyncListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let line = format!("{line}\r\n");
        let open = Arc::new(AtomicI64::new(0));
        let counted = open.clone();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let (line, open) = (line.clone(), counted.clone());
                open.fetch_add(1, SeqCst);
                tokio::spawn(async move {
                    let (mut heard, mut piece) = (0, [0; 65_536]);
                    while let Ok(n @ 1..) = stream.read(&mut piece).await {
                        heard += piece[..n].iter().filter(|byte| **byte == b'*').count();
                        if heard >= commands {
                            let answer = line.repeat(heard);
                            heard = 0;
                            if stream.write_all(answer.as_bytes()).await.is_err() {
                                break;
                            }
                        }
                    }
                    open.fetch_sub(1, SeqCst);
                });
            }
        });
        Self { port, open }
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Open connections.
    pub fn open(&self) -> i64 {
        self.open.load(SeqCst)
    }
}
