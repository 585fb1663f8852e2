//! Ways for KV between a GPU and the arena: which one works here, and why the other does not. Copies in vLLM's process cannot be tried from here,
//! so of them nothing more is said than that nothing is known to stand against them; a window works when a second process has used one.

use super::gpu::{Device, DeviceLimit, Gpu, GpuReason};
use super::report::{Facility, FacilityName, Speed, SpeedName};
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
pub fn judged(gpu: &Gpu, facilities: &[Facility], speeds: &[Speed]) -> Vec<Mode> {
    let missing = missing(facilities);
    if !missing.is_empty() {
        let unavailable = |name| Mode {
            name,
            state: ModeState::Unavailable,
            reasons: missing.clone(),
            detail: "vLLM cannot be given the arena".into(),
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
            "it maps the arena and copies with plain instructions. For one on GPUs nothing was seen from here",
        ),
        works(
            ModeName::CudaWindow,
            "a window in host memory. For one on GPUs the sidecar would need to see them",
        ),
    ]
}

/// There is a driver, and it does not work here. vLLM may have another one in its container, but not another machine.
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
            "copies run in vLLM's process, and the driver does not work from here",
        ),
        mode(
            ModeName::CudaWindow,
            ModeState::Unavailable,
            "no window in device memory without a driver that works",
        ),
    ]
}

fn engine(gpu: &Gpu, speeds: &[Speed]) -> Mode {
    let prohibited = |device: &Device| device.limits.contains(&DeviceLimit::Prohibited);
    let [to, from] = [SpeedName::PinnedToDevice, SpeedName::PinnedFromDevice];
    let copied = match (measured(speeds, to), measured(speeds, from)) {
        (Some(Ok(to)), Some(Ok(from))) => {
            format!("copies from here moved {to} to the device and {from} from it")
        }
        (Some(Err(reason)), _) | (_, Some(Err(reason))) => {
            format!("copies from here could not be measured: {reason}")
        }
        _ => "nothing was copied from here".into(),
    };
    Mode {
        name: ModeName::Engine,
        state: unless_all(&gpu.devices, prohibited),
        reasons: engine_limits(gpu),
        detail: format!("copies run in vLLM's process, over its own CUDA context; {copied}"),
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

fn window(gpu: &Gpu, facilities: &[Facility], speeds: &[Speed]) -> Mode {
    let bars = |limit: DeviceLimit| limit != DeviceLimit::DriverTooOld;
    let barred = |device: &Device| device.limits.iter().any(|limit| bars(*limit));
    let round_trip = measured(speeds, SpeedName::WindowRoundTrip);
    let copies_fail = matches!(round_trip, Some(Err(_)));
    let made = match round_trip {
        Some(Ok(speed)) => format!("one moved {speed} there and back"),
        Some(Err(reason)) => format!("none could be measured: {reason}"),
        None => "none was made from here, and this version's was never run on a GPU".into(),
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

/// Whether a window reaches another process, where that is known, and words for it; with the names of what stands against it where it
/// reaches none. A sidecar passes a window by descriptor, and by IPC handle only where the driver makes no descriptor.
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
        let said = format!("; a second process used one, passed by {by}");
        return (Some(Ok(())), said);
    }
    names.push(way.reason.clone());
    let said = format!("; none reached a second process: {}", names.join(", "));
    let against = AGAINST_WINDOWS.contains(&way.reason.as_str());
    (against.then_some(Err(names)), said)
}

/// Why a window reached no second process that would keep it from a vLLM as well. One that there was no time or memory for, beside the
/// second context, says nothing.
const AGAINST_WINDOWS: [&str; 4] = ["NoIpc", "NotMapped", "PatternMismatch", "DriverFailed"];

fn unless_all(devices: &[Device], barred: impl Fn(&Device) -> bool) -> ModeState {
    match devices.iter().all(barred) {
        true => ModeState::Unavailable,
        false => ModeState::NotTried,
    }
}

/// How fast a way was, or why that is not known; none where it was not asked for.
fn measured(speeds: &[Speed], name: SpeedName) -> Option<Result<String, &str>> {
    let speed = speeds.iter().find(|speed| speed.name == name)?;
    Some(match speed.bytes_per_second {
        Some(bytes) => Ok(format!("{:.2} GB/s", bytes as f64 / 1e9)),
        None => Err(&speed.reason),
    })
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
            // It would be passed by descriptor all the same.
            (with(&[]), "NotMapped", "", Unavailable, vec!["NotMapped"]),
            (
                with(&[]),
                "NoDescriptor",
                "PatternMismatch",
                Unavailable,
                vec!["NoDescriptor", "PatternMismatch"],
            ),
            // What failed on the first device says nothing of others.
            (two, "NoIpc", "", NotTried, vec!["NoIpc"]),
            (
                second_is_barred,
                "NoIpc",
                "",
                Unavailable,
                vec!["MigEnabled", "NoIpc"],
            ),
            // A small one had room; the one that is asked for has not.
            (first_is_barred, "", "", NotTried, vec!["OutOfMemory"]),
            (
                with(&[OutOfMemory]),
                "",
                "",
                Unavailable,
                vec!["OutOfMemory"],
            ),
            // What says nothing of a vLLM.
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
        assert!(mode.detail.ends_with("used one, passed by descriptor"));
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
            all[0].contains("moved 1.00 GB/s to the device and 2.50 GB/s from it"),
            "{all:?}"
        );
        assert!(
            all[1].contains("one moved 1.00 GB/s there and back"),
            "{all:?}"
        );
        let none = said([refused; 3]);
        assert!(
            none[0].ends_with("could not be measured: OutOfMemory"),
            "{none:?}"
        );
        assert!(
            none[1].ends_with("could be measured: OutOfMemory"),
            "{none:?}"
        );
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
