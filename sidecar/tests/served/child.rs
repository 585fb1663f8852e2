//! A client in a process of its own: this test binary again, told by an environment variable what to do. Its death is the point.

use crate::vllm::{Vllm, content, hashes};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

const TASK: &str = "KVCACHEPOOL_TEST_CHILD";

pub struct Process {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Process {
    /// `task` is `store` (stores chunks of prompt 1 and stays) or `grant` (is granted chunks of prompt 2, writes and stays) or
    /// `window`, `doubt`, `hang`, `handle` (what there does with a window).
    pub fn start(task: &str, socket: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child::body", "--nocapture"])
            .env(TASK, format!("{task} {}", socket.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut this = Self { child, lines };
        this.wait_line("ready");
        this
    }

    fn wait_line(&mut self, wanted: &str) {
        let mut line = String::new();
        while self.lines.read_line(&mut line).unwrap() > 0 {
            if line.trim_end().ends_with(wanted) {
                return;
            }
            line.clear();
        }
        panic!("the child ended before it was {wanted}");
    }

    /// Tells it that the sidecar was restarted; returns when it is attached again.
    pub fn reattach(&mut self) {
        self.tell("reattach");
    }

    /// Tells it something and waits until it is ready again.
    pub fn tell(&mut self, word: &str) {
        let input = self.child.stdin.as_mut().unwrap();
        input.write_all(format!("{word}\n").as_bytes()).unwrap();
        self.wait_line("ready");
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What the child does; as a test of the ordinary run it has nothing to do.
#[test]
fn body() {
    let Ok(task) = std::env::var(TASK) else {
        return;
    };
    let (task, socket) = task.split_once(' ').unwrap();
    let mut vllm = Vllm::attach(Path::new(socket));
    match task {
        "store" => vllm.store("r", &hashes(1, 4)),
        "grant" => {
            let chunks = hashes(2, 4);
            let refs = vllm.grant("r", &chunks);
            for (slot, hash) in refs.iter().zip(&chunks) {
                vllm.write(slot, &content(hash));
            }
        }
        "window" => return crate::window::child(vllm),
        "handle" => return crate::window::handled(vllm),
        "doubt" => return crate::window::doubting(vllm),
        "hang" => return crate::window::hanging(vllm),
        other => panic!("unknown task {other}"),
    }
    println!("\nready");
    // The end of standard input is the end of the test that started this process.
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "reattach");
        vllm.reconnect();
        println!("\nready");
    }
}
