//! What a GPU that decodes notices of copies: step times alone, beside the worker's own copies, and beside those of another process.

use crate::{Rig, WINDOW_BYTES, shown};
use kvcachepool_gpu::cuda::context;
use kvcachepool_gpu::cuda::launch::Kernels;
use kvcachepool_gpu::cuda::measure::{Decode, Link, NotMeasured, Steps, WindowLink};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// By this argument, and a device's UUID behind it, the program is the other process.
pub const ARGUMENT: &str = "--window-of";

pub fn measured(rig: &Rig, kernels: Arc<Kernels>, link: &Link) -> Result<(), NotMeasured> {
    let decode = Decode::new(kernels, rig.step.0, rig.step.1)?;
    let idle = alone(&decode, "idle", rig)?;
    let (steps, both) = decode.steps_beside(link, rig.time)?;
    beside("engine", idle, steps, both.load, both.store);
    beside_window(&decode, "window", idle, rig)
}

/// What a window's copies do where both processes share a context's time by MPS: they are its clients.
pub fn measured_with_mps(rig: &Rig, kernels: Arc<Kernels>) -> Result<(), NotMeasured> {
    let decode = Decode::new(kernels, rig.step.0, rig.step.1)?;
    let idle = alone(&decode, "idle_mps", rig)?;
    beside_window(&decode, "window_mps", idle, rig)
}

fn alone(decode: &Decode, what: &str, rig: &Rig) -> Result<Steps, NotMeasured> {
    let idle = decode.steps(rig.time)?;
    let moved = decode.step_bytes() as f64 / idle.p50;
    let said = format!("{} kernels, {:.0} GB/s", rig.step.0, moved / 1e9);
    for (name, value) in [("p50", idle.p50), ("p99", idle.p99)] {
        shown(
            &format!("decode_{what}_{name}_ms"),
            value * 1e3,
            "ms",
            &said,
            None,
        );
    }
    Ok(idle)
}

fn beside_window(decode: &Decode, what: &str, idle: Steps, rig: &Rig) -> Result<(), NotMeasured> {
    let window = Window::start(&rig.uuid)?;
    let steps = decode.steps(rig.time)?;
    let found = window.end()?;
    let speed = |name: &str| found[name].as_f64().unwrap_or(0.0);
    beside(what, idle, steps, speed("load"), speed("store"));
    Ok(())
}

fn beside(what: &str, idle: Steps, steps: Steps, load: f64, store: f64) {
    let copies = format!(
        "idle; beside {:.1} GB/s in, {:.1} out",
        load / 1e9,
        store / 1e9
    );
    let rows = [("p50", steps.p50, idle.p50), ("p99", steps.p99, idle.p99)];
    for (name, value, alone) in rows {
        let name = format!("decode_beside_{what}_{name}_ms");
        shown(&name, value * 1e3, "ms", &copies, Some(alone * 1e3));
    }
}

/// A process that copies through a window of its own, both ways at full rate, as a sidecar would.
struct Window {
    child: Child,
    said: BufReader<std::process::ChildStdout>,
}

fn lost(error: impl ToString) -> NotMeasured {
    NotMeasured::new(format!("the other process: {}", error.to_string()))
}

impl Window {
    /// Copies have begun when this returns.
    fn start(uuid: &str) -> Result<Self, NotMeasured> {
        let mut child = Command::new(std::env::current_exe().map_err(lost)?)
            .args([ARGUMENT, uuid])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(lost)?;
        let said = child.stdout.take().ok_or_else(|| lost("no output"))?;
        let mut this = Self {
            child,
            said: BufReader::new(said),
        };
        this.line()?;
        Ok(this)
    }

    fn line(&mut self) -> Result<Value, NotMeasured> {
        let mut line = String::new();
        self.said.read_line(&mut line).map_err(lost)?;
        serde_json::from_str(&line).map_err(lost)
    }

    /// How fast it copied.
    fn end(mut self) -> Result<Value, NotMeasured> {
        drop(self.child.stdin.take());
        let found = self.line();
        self.child.wait().map_err(lost)?;
        found
    }
}

/// The other process: copies until its standard input ends.
pub fn other(uuid: &str) -> ExitCode {
    let run = || -> Result<(), NotMeasured> {
        let context = context::of(uuid)?;
        let mut window = WindowLink::new(&context, uuid, WINDOW_BYTES)?;
        println!("{}", json!({"window": window.memory()}));
        let over = Arc::new(AtomicBool::new(false));
        let told = over.clone();
        std::thread::spawn(move || {
            // Whatever comes: its end counts.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            told.store(true, Ordering::Relaxed);
        });
        let both = window.both_while(&|| !over.load(Ordering::Relaxed))?;
        println!("{}", json!({"load": both.load, "store": both.store}));
        Ok(())
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
