//! Lines and JSON.

use crate::Rig;
use kvcachepool_gpu::cuda::Failed;
use kvcachepool_gpu::cuda::launch::LaunchError;
use kvcachepool_gpu::cuda::peer::NotPassed;
use kvcachepool_gpu::device::{DeviceError, NoWindow};
use serde_json::{Value, json};
use std::process::ExitCode;

type Run = dyn Fn(&Rig) -> Result<String, Why>;

/// One thing to look at; says on success what it saw.
pub struct Check {
    pub name: String,
    pub run: Box<Run>,
}

impl Check {
    pub fn new(
        name: impl Into<String>,
        run: impl Fn(&Rig) -> Result<String, Why> + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            run: Box::new(run),
        }
    }
}

/// Why a check did not pass.
pub enum Why {
    /// It cannot be looked at here: a name, a colon, words.
    Skipped(String),
    Failed(String),
}

macro_rules! failures {
    ($($error:ty),*) => {
        $(impl From<$error> for Why {
            fn from(error: $error) -> Self {
                Self::Failed(error.to_string())
            }
        })*
    };
}
failures!(
    Failed,
    LaunchError,
    NoWindow,
    DeviceError,
    std::io::Error,
    rustix::io::Errno
);

impl From<NotPassed> for Why {
    fn from(why: NotPassed) -> Self {
        match why.name.as_str() {
            "NoDescriptor" | "NoIpc" => Self::Skipped(why.to_string()),
            _ => Self::Failed(why.to_string()),
        }
    }
}

/// `Ok` where it holds.
pub fn holds(what: bool, otherwise: impl Into<String>) -> Result<(), Why> {
    what.then_some(())
        .ok_or_else(|| Why::Failed(otherwise.into()))
}

/// Where two runs of bytes first differ.
pub fn same(what: &str, got: &[u8], want: &[u8]) -> Result<(), Why> {
    holds(
        got.len() == want.len(),
        format!("{what}: {} bytes instead of {}", got.len(), want.len()),
    )?;
    match got.iter().zip(want).position(|(a, b)| a != b) {
        None => Ok(()),
        Some(at) => Err(Why::Failed(format!(
            "{what}: byte {at} of {} is {:#04x}, not {:#04x}",
            want.len(),
            got[at],
            want[at]
        ))),
    }
}

/// What came of all checks.
pub struct Report {
    device: Value,
    checks: Vec<Value>,
    counts: [usize; 3],
}

const OUTCOMES: [&str; 3] = ["ok", "skip", "FAIL"];

impl Report {
    pub fn new(rig: &Result<Rig, NoWindow>) -> Self {
        let device = match rig {
            Err(_) => Value::Null,
            Ok(rig) => json!({
                "name": rig.context.name,
                "uuid": rig.uuid,
                "cuda": rig.context.cuda().ok(),
                "memory_bytes": rig.context.memory().ok().map(|(_, total)| total),
            }),
        };
        println!("device: {device}");
        Self {
            device,
            checks: Vec::new(),
            counts: [0; 3],
        }
    }

    pub fn run(&mut self, rig: &Result<Rig, NoWindow>, check: Check) {
        let found = match rig {
            Ok(rig) => (check.run)(rig),
            Err(none) => Err(Why::Skipped(none.to_string())),
        };
        let (outcome, said) = match found {
            Ok(said) => (0, said),
            Err(Why::Skipped(said)) => (1, said),
            Err(Why::Failed(said)) => (2, said),
        };
        self.counts[outcome] += 1;
        let outcome = OUTCOMES[outcome];
        println!("{outcome:4} {}: {said}", check.name);
        self.checks
            .push(json!({"name": check.name, "outcome": outcome, "detail": said}));
    }

    /// Prints the JSON; fails where a check failed.
    pub fn end(self) -> ExitCode {
        let [passed, skipped, failed] = self.counts;
        let all = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "device": self.device,
            "passed": passed,
            "skipped": skipped,
            "failed": failed,
            "checks": self.checks,
        });
        println!("{all}");
        match failed {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        }
    }
}
