//! Speeds on a GPU, each beside what bounds it in the same run: `cargo run --example gpu_bench`.
//!
//! The first line says what device that was, each other line is a row: name, value, unit, reference. Without a GPU the only line says why.
//! `--small` moves little: for tests of this program. `--mps`, in the environment of an MPS daemon, measures only what that may change.
//! Takes 1.5 GiB of the device.

#![allow(clippy::unwrap_used, reason = "a tool for developers")]

mod decode;
mod rooflines;

use kvcachepool_gpu::cuda::context::{self, Context};
use kvcachepool_gpu::cuda::launch::Kernels;
use kvcachepool_gpu::cuda::management::Management;
use kvcachepool_gpu::cuda::measure::{JOB_BYTES, Link, NotMeasured, WindowLink};
use kvcachepool_gpu::device::NoWindow;
use kvcachepool_protocol::window::Direction;
use serde_json::json;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a window, as by default.
pub const WINDOW_BYTES: u64 = 128 << 20;

/// What is measured on, and how much is moved.
pub struct Rig {
    /// The first device.
    pub uuid: String,
    /// Its context.
    pub context: Arc<Context>,
    /// That one row is measured for.
    pub time: Duration,
    /// Bytes of a kernel's section.
    pub section_bytes: usize,
    /// Kernels of a step, and bytes of each.
    pub step: (usize, u64),
}

impl Rig {
    fn open(small: bool) -> Result<Self, NoWindow> {
        let uuid = context::devices()?.swap_remove(0);
        let context = context::of(&uuid)?;
        Ok(match small {
            false => Self {
                uuid,
                context,
                time: Duration::from_secs(2),
                section_bytes: 256 << 20,
                step: (32, 64 << 20),
            },
            true => Self {
                uuid,
                context,
                time: Duration::from_millis(10),
                section_bytes: 256 << 10,
                step: (2, 256 << 10),
            },
        })
    }
}

/// One row; speeds are bytes per second, and shown by the gigabyte.
pub fn row(name: &str, speed: f64, reference: &str, bound: Option<f64>) {
    shown(name, speed / 1e9, "GB/s", reference, bound.map(|b| b / 1e9));
}

/// One row in its unit.
pub fn shown(name: &str, value: f64, unit: &str, reference: &str, bound: Option<f64>) {
    let rounded = |value: f64| (value * 1e4).round() / 1e4;
    let line = json!({
        "name": name,
        "value": rounded(value),
        "unit": unit,
        "reference": reference,
        "reference_value": bound.map(rounded),
        "ratio": bound.map(|bound| rounded(value / bound)),
    });
    println!("{line}");
}

/// Plain copies one way and both; the peaks one way.
fn link(rig: &Rig, link: &Link) -> Result<[f64; 2], NotMeasured> {
    let job = format!("page-locked copies of {} MiB", JOB_BYTES >> 20);
    let load = link.one_way(Direction::Load, rig.time)?;
    let store = link.one_way(Direction::Store, rig.time)?;
    row("pinned_h2d", load, &job, None);
    row("pinned_d2h", store, &job, None);
    let both = link.both(rig.time)?;
    let faster = load.max(store);
    row(
        "both_directions_vs_one",
        both.load + both.store,
        "the faster direction alone",
        Some(faster),
    );
    Ok([load, store])
}

/// The sidecar's half of a window.
fn window(rig: &Rig, [load, store]: [f64; 2]) -> Result<(), NotMeasured> {
    let mut window = WindowLink::new(&rig.context, &rig.uuid, WINDOW_BYTES)?;
    let peak = "the pinned-copy peak of this run";
    let found = window.one_way(Direction::Load, rig.time)?;
    row("window_copies_h2d_vs_pinned_peak", found, peak, Some(load));
    let found = window.one_way(Direction::Store, rig.time)?;
    row("window_copies_d2h_vs_pinned_peak", found, peak, Some(store));
    // There and back one after the other: twice the time of one way.
    let bound = 1.0 / (1.0 / load + 1.0 / store);
    let found = window.round_trip(rig.time)?;
    row(
        "window_round_trip_vs_pinned_peak",
        found,
        "the same by the pinned-copy peaks",
        Some(bound),
    );
    Ok(())
}

fn measured(rig: &Rig) -> Result<(), NotMeasured> {
    let lanes = Link::new(&rig.context)?;
    let peaks = link(rig, &lanes)?;
    window(rig, peaks)?;
    let Some(kernels) = kernels(rig) else {
        return Ok(());
    };
    rooflines::measured(rig, &kernels)?;
    decode::measured(rig, kernels, &lanes)
}

fn measured_with_mps(rig: &Rig) -> Result<(), NotMeasured> {
    kernels(rig).map_or(Ok(()), |kernels| decode::measured_with_mps(rig, kernels))
}

/// None: the driver does not take them, which is said.
fn kernels(rig: &Rig) -> Option<Arc<Kernels>> {
    let loaded = Kernels::load(&rig.context).map_err(|error| {
        let why = format!("{}: {error}", error.name());
        println!(
            "{}",
            json!({"skipped": why, "rows": "kernels and decoding"})
        );
    });
    loaded.ok().map(Arc::new)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [first, uuid] = arguments.as_slice()
        && first == decode::ARGUMENT
    {
        return decode::other(uuid);
    }
    let asked = |name: &str| arguments.iter().any(|one| one == name);
    let rig = match Rig::open(asked("--small")) {
        Ok(rig) => rig,
        Err(none) => {
            println!("{}", json!({"skipped": none.to_string()}));
            return ExitCode::SUCCESS;
        }
    };
    let driver = Management::open().map(|management| management.driver_version());
    let device = json!({
        "device": rig.context.name,
        "uuid": rig.uuid,
        "cuda": rig.context.cuda().ok(),
        "driver": driver.unwrap_or_default(),
        "memory_bytes": rig.context.memory().ok().map(|(_, total)| total),
    });
    println!("{device}");
    let measured = match asked("--mps") {
        true => measured_with_mps(&rig),
        false => measured(&rig),
    };
    match measured {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
