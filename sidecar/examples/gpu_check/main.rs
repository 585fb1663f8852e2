//! Checks on a GPU: every kernel against its reference on the CPU, and the sidecar's half of a window in device memory.
//!
//! `cargo run --example gpu_check [-- PART-OF-A-NAME...]`: one line a check, then all of it as one line of JSON. Checks that cannot run are named with
//! the reason; without a GPU those are all of them. Fails where a check failed. A second process, where one is needed, is this program too.

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

mod cachegen;
mod data;
mod kernels;
mod report;
mod turns;
mod window;

use kvcachepool_gpu::cuda::context::{self, Context};
use kvcachepool_gpu::cuda::launch::{Kernels, LaunchError};
use kvcachepool_gpu::cuda::peer;
use kvcachepool_gpu::cuda::stream::Stream;
use kvcachepool_gpu::device::NoWindow;
use report::{Check, Report, Why};
use std::process::ExitCode;
use std::sync::Arc;

/// What checks run on.
pub struct Rig {
    /// The first device.
    pub uuid: String,
    /// Its context.
    pub context: Arc<Context>,
    /// A stream there.
    pub stream: Stream,
    kernels: Result<Kernels, LaunchError>,
}

impl Rig {
    fn open() -> Result<Self, NoWindow> {
        let uuid = context::devices()?.swap_remove(0);
        let context = context::of(&uuid)?;
        let stream = Stream::new(&context).map_err(context::refused)?;
        Ok(Self {
            uuid,
            kernels: Kernels::load(&context),
            stream,
            context,
        })
    }

    /// The kernels, or why there are none: a driver or a device that is too old is no mistake of ours.
    pub fn kernels(&self) -> Result<&Kernels, Why> {
        self.kernels.as_ref().map_err(|error| match error {
            LaunchError::PtxTooNew { .. }
            | LaunchError::DeviceTooOld { .. }
            | LaunchError::NoPtxCompiler(_) => Why::Skipped(format!("{}: {error}", error.name())),
            _ => Why::Failed(format!("{}: {error}", error.name())),
        })
    }
}

fn checks() -> Vec<Check> {
    let mut checks = kernels::checks();
    checks.extend(turns::checks());
    checks.extend(cachegen::checks());
    checks.extend(window::checks());
    checks
}

fn main() -> ExitCode {
    let chosen: Vec<String> = std::env::args().skip(1).collect();
    if let [first, uuid] = &chosen[..]
        && first == window::PEER
    {
        peer::serve(uuid);
        return ExitCode::SUCCESS;
    }
    let rig = Rig::open();
    let mut report = Report::new(&rig);
    for check in checks() {
        if chosen.is_empty() || chosen.iter().any(|part| check.name.contains(part)) {
            report.run(&rig, check);
        }
    }
    report.end()
}
