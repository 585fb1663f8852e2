//! Ways for KV between a GPU and the arena: which one works here, and why the other does not. No byte of device memory is moved here, so
//! of a way over a GPU nothing more is said than that nothing is known to stand against it.

use super::gpu::{Device, DeviceLimit, Gpu, GpuReason};
use super::report::{Facility, FacilityName};
use serde::Serialize;

/// One way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mode {
    /// Its name.
    pub name: ModeName,
    /// What is known of it here.
    pub state: ModeState,
    /// Names of what stands against it, or makes it slower.
    pub reasons: Vec<String>,
    /// For people.
    pub detail: String,
}

/// Ways, by the names of `transfer` of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ModeName {
    /// vLLM's worker copies between its KV pages and the arena.
    Engine,
    /// The sidecar copies, by a window in device memory.
    CudaWindow,
}

/// What is known of a way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ModeState {
    /// It works: all that it needs was tried.
    Works,
    /// Nothing is known to stand against it, and it was not tried.
    NotTried,
    /// It does not work.
    Unavailable,
}

/// Both ways.
pub fn judged(gpu: &Gpu, facilities: &[Facility]) -> Vec<Mode> {
    vec![engine(gpu, facilities), window(gpu, facilities)]
}

fn engine(gpu: &Gpu, facilities: &[Facility]) -> Mode {
    let missing = missing(facilities);
    let (state, reasons, detail) = if !missing.is_empty() {
        let detail = "vLLM cannot be given the arena";
        (ModeState::Unavailable, missing, detail)
    } else if gpu.reason.is_some() {
        let detail = "for a vLLM on CPUs: it maps the arena and copies with plain instructions. For one on GPUs nothing was seen \
                      from here";
        (ModeState::Works, gpu_reasons(gpu), detail)
    } else {
        let detail =
            "copies run in vLLM's process, over its own CUDA context; nothing was copied from here";
        let reasons = engine_limits(gpu);
        let mut devices = gpu.devices.iter();
        let prohibited = devices.all(|d| d.limits.contains(&DeviceLimit::Prohibited));
        let state = match prohibited {
            true => ModeState::Unavailable,
            false => ModeState::NotTried,
        };
        (state, reasons, detail)
    };
    Mode {
        name: ModeName::Engine,
        state,
        reasons,
        detail: detail.into(),
    }
}

/// Instances and exclusive devices do not matter to a copy by the process that has them.
fn engine_limits(gpu: &Gpu) -> Vec<String> {
    let matter = [DeviceLimit::Prohibited, DeviceLimit::DriverTooOld];
    limits(gpu, |limit| matter.contains(&limit))
}

fn limits(gpu: &Gpu, counts: impl Fn(DeviceLimit) -> bool) -> Vec<String> {
    let all = gpu.devices.iter().flat_map(|device| &device.limits);
    let mut names: Vec<String> = all
        .filter(|limit| counts(**limit))
        .map(|limit| format!("{limit:?}"))
        .collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn gpu_reasons(gpu: &Gpu) -> Vec<String> {
    let reason = gpu.reason.map(|reason: GpuReason| format!("{reason:?}"));
    reason.into_iter().collect()
}

fn window(gpu: &Gpu, facilities: &[Facility]) -> Mode {
    let missing = missing(facilities);
    let bars = |limit: DeviceLimit| limit != DeviceLimit::DriverTooOld;
    let barred = |device: &Device| device.limits.iter().any(|limit| bars(*limit));
    let (state, reasons, detail) = if !missing.is_empty() {
        let detail = "vLLM cannot be given the arena";
        (ModeState::Unavailable, missing, detail)
    } else if gpu.reason.is_some() {
        let detail = "for a vLLM on CPUs: a window in host memory. For one on GPUs the sidecar would need to see them";
        (ModeState::Works, gpu_reasons(gpu), detail)
    } else {
        let detail = "a window in device memory; none was made from here, and this version's was never run on a GPU";
        let state = match gpu.devices.iter().all(barred) {
            true => ModeState::Unavailable,
            false => ModeState::NotTried,
        };
        (state, limits(gpu, bars), detail)
    };
    Mode {
        name: ModeName::CudaWindow,
        state,
        reasons,
        detail: detail.into(),
    }
}

/// What passing memory to vLLM needs and is not there.
fn missing(facilities: &[Facility]) -> Vec<String> {
    let needed = [FacilityName::Memfd, FacilityName::PassDescriptors];
    let missing = facilities.iter().filter(|f| needed.contains(&f.name));
    missing
        .filter(|f| !f.works)
        .map(|f| format!("{:?}", f.name))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(limits: &[DeviceLimit]) -> Gpu {
        Gpu {
            devices: vec![Device {
                limits: limits.to_vec(),
                ..Device::default()
            }],
            ..Gpu::default()
        }
    }

    fn without(reason: GpuReason) -> Gpu {
        Gpu {
            reason: Some(reason),
            ..Gpu::default()
        }
    }

    fn named(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn each_way_says_what_is_known_of_it_and_never_more() {
        use DeviceLimit::{DriverTooOld, ExclusiveProcess, MigEnabled, Prohibited};
        use ModeState::{NotTried, Unavailable, Works};
        for (gpu, states, engine, window) in [
            (
                without(GpuReason::NoDriver),
                (Works, Works),
                vec!["NoDriver"],
                vec!["NoDriver"],
            ),
            (with(&[]), (NotTried, NotTried), vec![], vec![]),
            (
                with(&[MigEnabled]),
                (NotTried, Unavailable),
                vec![],
                vec!["MigEnabled"],
            ),
            (
                with(&[ExclusiveProcess, DriverTooOld]),
                (NotTried, Unavailable),
                vec!["DriverTooOld"],
                vec!["ExclusiveProcess"],
            ),
            (
                with(&[DriverTooOld]),
                (NotTried, NotTried),
                vec!["DriverTooOld"],
                vec![],
            ),
            (
                with(&[Prohibited]),
                (Unavailable, Unavailable),
                vec!["Prohibited"],
                vec!["Prohibited"],
            ),
        ] {
            let modes = judged(&gpu, &[]);
            assert_eq!((modes[0].state, modes[1].state), states);
            assert_eq!(
                (&modes[0].reasons, &modes[1].reasons),
                (&named(&engine), &named(&window))
            );
        }
    }

    #[test]
    fn without_a_memfd_vllm_gets_no_arena() {
        let refused = Facility {
            name: FacilityName::Memfd,
            works: false,
            reason: "EPERM".into(),
            detail: String::new(),
        };
        let modes = judged(&without(GpuReason::NoDriver), &[refused]);
        for mode in modes {
            assert_eq!(mode.state, ModeState::Unavailable);
            assert_eq!(mode.reasons, ["Memfd"]);
        }
    }
}
