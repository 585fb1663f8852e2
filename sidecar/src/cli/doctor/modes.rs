//! Transfer modes between a GPU and the arena: which one works here, and why another does not. Copies in vLLM's process cannot be tried
//! here, so the report only says whether something prevents them. A window works when a second process has used one.

use super::gpu::{Device, DeviceLimit, Gpu, GpuReason};
use super::report::{Facility, FacilityName, Speed, SpeedName};
use serde::Serialize;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Mode {
    pub name: ModeName,
    pub state: ModeState,
    /// Reasons that prevent the mode or slow it down.
    pub reasons: Vec<String>,
    pub detail: String,
}

/// Modes, by the names of a pool's `transfer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ModeName {
    /// vLLM's worker copies between its KV pages and the arena.
    Engine,
    /// The sidecar copies through a window in device memory.
    CudaWindow,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum ModeState {
    /// All parts were tried and work.
    Works,
    /// Not tried; no known reason prevents it.
    NotTried,
    Unavailable,
}

pub fn judged(gpu: &Gpu, facilities: &[Facility], speeds: &[Speed]) -> Vec<Mode> {
    let missing = missing(facilities);
    if !missing.is_empty() {
        let unavailable = |name| Mode {
            name,
            state: ModeState::Unavailable,
            reasons: missing.clone(),
            detail: "the arena cannot be passed to vLLM".into(),
        };
        return vec![
            unavailable(ModeName::Engine),
            unavailable(ModeName::CudaWindow),
        ];
    }
    let modes = match gpu.reason {
        Some(reason) if reason.is_absence() => without_gpu(reason),
        Some(reason) => broken(reason, &gpu.detail),
        None => [engine(gpu, speeds), window(gpu, facilities, speeds)],
    };
    modes.into()
}

fn without_gpu(reason: GpuReason) -> [Mode; 2] {
    let works = |name, detail: &str| Mode {
        name,
        state: ModeState::Works,
        reasons: vec![format!("{reason:?}")],
        detail: format!("for a vLLM on CPUs: {detail}"),
    };
    [
        works(
            ModeName::Engine,
            "the worker maps the arena and copies with the CPU. A vLLM on GPUs could not be checked here",
        ),
        works(
            ModeName::CudaWindow,
            "a window in host memory. For a vLLM on GPUs the sidecar would need access to them",
        ),
    ]
}

/// The driver exists and does not work here. vLLM's container may have another driver library, but the machine is the same.
fn broken(reason: GpuReason, said: &str) -> [Mode; 2] {
    let engine = match reason {
        GpuReason::SystemNotReady => ModeState::Unavailable,
        _ => ModeState::NotTried,
    };
    let mode = |name, state, detail: &str| Mode {
        name,
        state,
        reasons: vec![format!("{reason:?}")],
        detail: format!("{detail}: {said}"),
    };
    [
        mode(
            ModeName::Engine,
            engine,
            "copies run in vLLM's process, but the driver does not work in this one",
        ),
        mode(
            ModeName::CudaWindow,
            ModeState::Unavailable,
            "a window in device memory needs a working driver",
        ),
    ]
}

fn engine(gpu: &Gpu, speeds: &[Speed]) -> Mode {
    let prohibited = |device: &Device| device.limits.contains(&DeviceLimit::Prohibited);
    let [to, from] = [SpeedName::PinnedToDevice, SpeedName::PinnedFromDevice];
    let copied = match (measured(speeds, to), measured(speeds, from)) {
        (Some(Ok(to)), Some(Ok(from))) => {
            format!("copies measured here ran at {to} to the device and {from} from it")
        }
        (Some(Err(reason)), _) | (_, Some(Err(reason))) => {
            format!("copies could not be measured here: {reason}")
        }
        _ => "no copies were measured here".into(),
    };
    Mode {
        name: ModeName::Engine,
        state: unless_all(&gpu.devices, prohibited),
        reasons: engine_limits(gpu),
        detail: format!("copies run in vLLM's process, over its own CUDA context; {copied}"),
    }
}

/// MIG instances and exclusive devices do not affect copies by the process that uses them.
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

fn window(gpu: &Gpu, facilities: &[Facility], speeds: &[Speed]) -> Mode {
    let bars = |limit: DeviceLimit| limit != DeviceLimit::DriverTooOld;
    let barred = |device: &Device| device.limits.iter().any(|limit| bars(*limit));
    let round_trip = measured(speeds, SpeedName::WindowRoundTrip);
    let copies_fail = matches!(round_trip, Some(Err(_)));
    let made = match round_trip {
        Some(Ok(speed)) => format!("measured here: {speed} there and back"),
        Some(Err(reason)) => format!("not measured: {reason}"),
        None => "not tried here, and this version was never run on a GPU".into(),
    };
    let (passed, said) = passed(facilities);
    let mut reasons = limits(gpu, bars);
    let state = match (passed, gpu.devices.first()) {
        // It was tried on the first device.
        (Some(Ok(())), Some(first)) if !barred(first) && !copies_fail => ModeState::Works,
        (Some(Err(names)), _) => {
            reasons.extend(names);
            unless_all(gpu.devices.get(1..).unwrap_or_default(), barred)
        }
        _ => unless_all(&gpu.devices, barred),
    };
    Mode {
        name: ModeName::CudaWindow,
        state,
        reasons,
        detail: format!("a window in device memory; {made}{said}"),
    }
}

/// Whether a window reaches another process, if known, with a text; an error carries the reasons. The sidecar passes a window by
/// descriptor, and by IPC handle only if the driver cannot export a descriptor.
fn passed(facilities: &[Facility]) -> (Option<Result<(), Vec<String>>>, String) {
    let way = |name| facilities.iter().find(|facility| facility.name == name);
    let (Some(fd), Some(handle)) = (
        way(FacilityName::WindowByFd),
        way(FacilityName::WindowByHandle),
    ) else {
        return (None, String::new());
    };
    let (way, by, mut names) = match fd.reason.as_str() {
        "NoDescriptor" => (handle, "IPC handle", vec![fd.reason.clone()]),
        _ => (fd, "descriptor", vec![]),
    };
    if way.works {
        let said = format!("; a second process used it, passed by {by}");
        return (Some(Ok(())), said);
    }
    names.push(way.reason.clone());
    let said = format!(
        "; it could not be passed to a second process: {}",
        names.join(", ")
    );
    let against = AGAINST_WINDOWS.contains(&way.reason.as_str());
    (against.then_some(Err(names)), said)
}

/// Reasons why a second process could not use a window that would also apply to vLLM. Missing time or memory for the second context is
/// not among them.
const AGAINST_WINDOWS: [&str; 4] = ["NoIpc", "NotMapped", "PatternMismatch", "DriverFailed"];

fn unless_all(devices: &[Device], barred: impl Fn(&Device) -> bool) -> ModeState {
    match devices.iter().all(barred) {
        true => ModeState::Unavailable,
        false => ModeState::NotTried,
    }
}

/// Speed of a measurement, or why it is missing; `None` if it was not requested.
fn measured(speeds: &[Speed], name: SpeedName) -> Option<Result<String, &str>> {
    let speed = speeds.iter().find(|speed| speed.name == name)?;
    Some(match speed.bytes_per_second {
        Some(bytes) => Ok(format!("{:.2} GB/s", bytes as f64 / 1e9)),
        None => Err(&speed.reason),
    })
}

/// Features needed to pass memory to vLLM that do not work.
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
        use DeviceLimit::{DriverTooOld, ExclusiveProcess, MigEnabled, OutOfMemory, Prohibited};
        use ModeState::{NotTried, Unavailable, Works};
        for (gpu, states, engine, window) in [
            (
                without(GpuReason::NoDriver),
                (Works, Works),
                vec!["NoDriver"],
                vec!["NoDriver"],
            ),
            (
                without(GpuReason::TimedOut),
                (NotTried, Unavailable),
                vec!["TimedOut"],
                vec!["TimedOut"],
            ),
            (
                without(GpuReason::SystemNotReady),
                (Unavailable, Unavailable),
                vec!["SystemNotReady"],
                vec!["SystemNotReady"],
            ),
            (
                with(&[OutOfMemory]),
                (NotTried, Unavailable),
                vec![],
                vec!["OutOfMemory"],
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
            let modes = judged(&gpu, &[], &[]);
            assert_eq!((modes[0].state, modes[1].state), states);
            assert_eq!(
                (&modes[0].reasons, &modes[1].reasons),
                (&named(&engine), &named(&window))
            );
        }
    }

    fn passed_by(ways: [(FacilityName, &str); 2]) -> Vec<Facility> {
        let way = |(name, reason): (FacilityName, &str)| Facility {
            name,
            works: reason.is_empty(),
            reason: reason.into(),
            detail: String::new(),
        };
        ways.map(way).into()
    }

    #[test]
    fn a_window_works_when_a_second_process_used_one_as_a_sidecar_passes_it() {
        use DeviceLimit::{DriverTooOld, MigEnabled, OutOfMemory};
        use ModeState::{NotTried, Unavailable, Works};
        let mut first_is_barred = with(&[OutOfMemory]);
        first_is_barred.devices.push(Device::default());
        let mut two = with(&[]);
        two.devices.push(Device::default());
        let mut second_is_barred = with(&[]);
        second_is_barred.devices.extend(with(&[MigEnabled]).devices);
        for (gpu, by_fd, by_handle, state, reasons) in [
            (with(&[]), "", "", Works, vec![]),
            (with(&[DriverTooOld]), "", "NotMapped", Works, vec![]),
            (with(&[]), "NoDescriptor", "", Works, vec![]),
            // It would be passed by descriptor anyway.
            (with(&[]), "NotMapped", "", Unavailable, vec!["NotMapped"]),
            (
                with(&[]),
                "NoDescriptor",
                "PatternMismatch",
                Unavailable,
                vec!["NoDescriptor", "PatternMismatch"],
            ),
            // A failure on the first device says nothing about others.
            (two, "NoIpc", "", NotTried, vec!["NoIpc"]),
            (
                second_is_barred,
                "NoIpc",
                "",
                Unavailable,
                vec!["MigEnabled", "NoIpc"],
            ),
            // The small window of the probe fits; the requested one does not.
            (first_is_barred, "", "", NotTried, vec!["OutOfMemory"]),
            (
                with(&[OutOfMemory]),
                "",
                "",
                Unavailable,
                vec!["OutOfMemory"],
            ),
            // Reasons that do not apply to vLLM.
            (with(&[]), "OutOfMemory", "OutOfMemory", NotTried, vec![]),
            (with(&[]), "TimedOut", "NotMapped", NotTried, vec![]),
        ] {
            let ways = [
                (FacilityName::WindowByFd, by_fd),
                (FacilityName::WindowByHandle, by_handle),
            ];
            let mode = judged(&gpu, &passed_by(ways), &[]).swap_remove(1);
            assert_eq!(mode.state, state, "{by_fd} {by_handle}: {mode:?}");
            assert_eq!(mode.reasons, named(&reasons), "{mode:?}");
        }
        let ways = [
            (FacilityName::WindowByFd, ""),
            (FacilityName::WindowByHandle, "NoIpc"),
        ];
        let mode = judged(&with(&[]), &passed_by(ways), &[]).swap_remove(1);
        assert!(mode.detail.ends_with("used it, passed by descriptor"));
    }

    #[test]
    fn a_window_whose_own_copies_failed_is_not_said_to_work() {
        let ways = [
            (FacilityName::WindowByFd, ""),
            (FacilityName::WindowByHandle, ""),
        ];
        for (found, state) in [
            (Ok(1_000_000_000), ModeState::Works),
            (Err("DriverFailed"), ModeState::NotTried),
        ] {
            let speeds = [speed(SpeedName::WindowRoundTrip, found)];
            let mode = judged(&with(&[]), &passed_by(ways), &speeds).swap_remove(1);
            assert_eq!(mode.state, state, "{mode:?}");
        }
    }

    fn speed(name: SpeedName, found: Result<u64, &str>) -> Speed {
        Speed {
            name,
            bytes_per_second: found.ok(),
            over_bytes: 0,
            threads: 1,
            bounds: String::new(),
            reason: found.err().unwrap_or_default().into(),
        }
    }

    #[test]
    fn what_was_measured_is_said_and_what_was_not_is_not() {
        let said = |found: [Result<u64, &str>; 3]| {
            let names = [
                SpeedName::PinnedToDevice,
                SpeedName::PinnedFromDevice,
                SpeedName::WindowRoundTrip,
            ];
            let speeds: Vec<Speed> = names
                .into_iter()
                .zip(found)
                .map(|(name, found)| speed(name, found))
                .collect();
            let modes = judged(&with(&[]), &[], &speeds);
            modes
                .into_iter()
                .map(|mode| mode.detail)
                .collect::<Vec<_>>()
        };
        let (gigabyte, refused) = (Ok(1_000_000_000), Err("OutOfMemory"));
        let all = said([gigabyte, Ok(2_500_000_000), gigabyte]);
        assert!(
            all[0].contains("ran at 1.00 GB/s to the device and 2.50 GB/s from it"),
            "{all:?}"
        );
        assert!(
            all[1].contains("measured here: 1.00 GB/s there and back"),
            "{all:?}"
        );
        let none = said([refused; 3]);
        assert!(
            none[0].ends_with("could not be measured here: OutOfMemory"),
            "{none:?}"
        );
        assert!(none[1].ends_with("not measured: OutOfMemory"), "{none:?}");
    }

    #[test]
    fn without_a_memfd_vllm_gets_no_arena() {
        let refused = Facility {
            name: FacilityName::Memfd,
            works: false,
            reason: "EPERM".into(),
            detail: String::new(),
        };
        let modes = judged(&without(GpuReason::NoDriver), &[refused], &[]);
        for mode in modes {
            assert_eq!(mode.state, ModeState::Unavailable);
            assert_eq!(mode.reasons, ["Memfd"]);
        }
    }
}
