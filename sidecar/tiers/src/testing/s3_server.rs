//! A real S3 server for one test: versitygw over a folder. It ends with the test, also when the test's process dies.
#![allow(unsafe_code)]
#![allow(dead_code, reason = "two programs include it, each uses a part")]

use crate::testing::free_port;
use kvcachepool_protocol::config::S3;
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub const ID: &str = "kvcachepool-test";
pub const SECRET: &str = "only-for-this-test";
/// Timeout of a start.
const LONGEST: Duration = Duration::from_secs(30);

/// A server with an empty bucket `kv-bucket`.
#[derive(Debug)]
pub struct Server {
    folder: TempDir,
    port: u16,
    child: Child,
}

impl Server {
    pub fn start() -> Self {
        Self::start_with(&[])
    }

    /// `options` are further options of the server.
    pub fn start_with(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["data/kv-bucket", "auth", "home"] {
            std::fs::create_dir_all(folder.path().join(name)).unwrap();
        }
        let (port, child) = spawn(&folder, options);
        let this = Self {
            folder,
            port,
            child,
        };
        this.write_auth(ID, SECRET);
        this
    }

    /// Config of a tier in its bucket.
    pub fn config(&self) -> S3 {
        S3 {
            bucket: "kv-bucket".into(),
            endpoint: format!("http://127.0.0.1:{}", self.port),
            auth: Some(self.auth()),
            ..S3::default()
        }
    }

    /// Folder with the credentials.
    pub fn auth(&self) -> PathBuf {
        self.folder.path().join("auth")
    }

    /// Folder with the bucket's objects.
    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data/kv-bucket")
    }

    pub fn write_auth(&self, id: &str, secret: &str) {
        for (name, text) in [("AWS_ACCESS_KEY_ID", id), ("AWS_SECRET_ACCESS_KEY", secret)] {
            std::fs::write(self.auth().join(name), text).unwrap();
        }
    }

    /// Restores the credentials that the server knows.
    pub fn write_right_auth(&self) {
        self.write_auth(ID, SECRET);
    }

    pub fn stop(&mut self) {
        // An error means that it has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The program of a server, as `tools/setup.sh servers` installs it.
pub fn installed(name: &str) -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache");
    let cache = std::env::var_os("KVCACHEPOOL_CACHE").map(PathBuf::from);
    let base = || std::env::var_os("XDG_CACHE_HOME").map_or_else(home, PathBuf::from);
    let cache = cache.unwrap_or_else(|| base().join("kvcachepool"));
    let program = cache.join("tools/bin").join(name);
    let shown = program.display();
    assert!(
        program.exists(),
        "{shown} is not there: run `tools/setup.sh servers`"
    );
    program
}

/// A port that was free may be taken by now: then another one is tried.
fn spawn(folder: &TempDir, options: &[&str]) -> (u16, Child) {
    let until = Instant::now() + LONGEST;
    loop {
        let port = free_port();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let mut command = Command::new(installed("versitygw"));
        command
            .args([
                "--access",
                ID,
                "--secret",
                SECRET,
                "--quiet",
                "--keep-alive",
            ])
            .arg("--port")
            .arg(format!("127.0.0.1:{port}"))
            .args(options)
            .arg("posix")
            .arg(folder.path().join("data"))
            .env("HOME", folder.path().join("home"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // SAFETY: one system call between fork and exec.
        unsafe {
            command.pre_exec(|| {
                rustix::process::set_parent_process_death_signal(Some(
                    rustix::process::Signal::KILL,
                ))
                .map_err(Into::into)
            });
        }
        let mut child = command.spawn().unwrap();
        while child.try_wait().unwrap().is_none() {
            if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return (port, child);
            }
            assert!(Instant::now() < until, "the server does not listen");
            std::thread::sleep(Duration::from_millis(5));
        }
        let log = std::fs::read_to_string(folder.path().join("log")).unwrap_or_default();
        assert!(Instant::now() < until, "the server does not start: {log}");
    }
}
