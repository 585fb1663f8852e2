//! Real servers, each of one test: started in a temporary folder, killed with it or with this process.
#![allow(unsafe_code)]

use super::super::{Options, Redis, Settings};
use rustix::process::{Signal, set_parent_process_death_signal};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longest that a server may take for anything here.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A `redis-server`, or what else speaks its protocol.
pub struct Server {
    program: String,
    pub folder: TempDir,
    pub port: u16,
    args: Vec<String>,
    child: Option<Child>,
}

/// A port that nobody has at the moment.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

impl Server {
    /// A Redis server with these settings beside a port, a socket and no snapshots.
    pub fn start(args: &[&str]) -> Self {
        Self::of("redis-server", args)
    }

    /// The same, of a program.
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

    /// Starts it, also after it was killed.
    pub fn run(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut command = Command::new(&self.program);
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
            // Somebody else took the port.
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

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub fn tcp(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    pub fn unix(&self) -> String {
        format!("redis+unix://{}", self.socket().display())
    }
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
        ca: None,
        ttl: Duration::ZERO,
        options: Options::default(),
    }
}

/// The tier of these URLs.
pub fn open(urls: &[String]) -> Redis {
    Redis::open(settings(urls)).unwrap()
}
