//! Whether memory of the first GPU can be passed to another process, by each method that a window uses. A second process of this
//! program tries it, and only together with the copy measurements, because it creates two CUDA contexts.

use super::deadline::Deadline;
use super::report::{Facility, FacilityName};
use kvcachepool_gpu::cuda::context::{self, CONTEXT_BYTES};
use kvcachepool_gpu::cuda::peer::{self, NotPassed, Peer, WINDOW_BYTES};
use kvcachepool_protocol::config;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// With this argument the program runs as the second process.
pub const SUBCOMMAND: &str = "window-peer";
/// Timeout of one answer of the second process, which creates a context first.
const ANSWER_LONGEST: Duration = Duration::from_secs(4);
const LONGEST: Duration = Duration::from_secs(9);
/// Host memory used: two contexts, and the second process.
const HOST_BYTES: u64 = 2 * config::CONTEXT_BYTES + (32 << 20);

type Found = Result<String, NotPassed>;

/// Tries each method on the first device, within `room_bytes` of host memory.
pub fn tried(room_bytes: u64) -> [Facility; 2] {
    if room_bytes < HOST_BYTES {
        let none = not_passed("NoRoom", "too little free memory to try it");
        return rows([Err(none.clone()), Err(none)]);
    }
    rows(found(LONGEST, on_device))
}

/// Results when no time is left: the driver hung before.
pub fn late() -> [Facility; 2] {
    rows([Err(too_late()), Err(too_late())])
}

fn too_late() -> NotPassed {
    not_passed("TimedOut", "the driver took too long")
}

fn not_passed(name: &str, detail: &str) -> NotPassed {
    NotPassed {
        name: name.into(),
        detail: detail.into(),
    }
}

/// The result of each method; methods without a result in time get a reason.
fn found(
    longest: Duration,
    look: impl FnOnce(&Sender<Found>) -> Result<(), NotPassed> + Send + 'static,
) -> [Found; 2] {
    let (say, said) = channel();
    let looked = Deadline::start().within(longest, move || look(&say));
    let none = looked.and_then(Result::err).unwrap_or_else(too_late);
    [(); 2].map(|()| said.try_recv().unwrap_or_else(|_| Err(none.clone())))
}

fn on_device(say: &Sender<Found>) -> Result<(), NotPassed> {
    let uuid = context::devices()?.swap_remove(0);
    // Fails with a reason when vLLM has left too little memory for a second context.
    let context = context::beside_vllm(&uuid, WINDOW_BYTES + CONTEXT_BYTES)?;
    let peer = || Peer::start(&[SUBCOMMAND, &uuid], ANSWER_LONGEST);
    let tell = |passed: Result<(), NotPassed>| {
        let name = &context.name;
        let both =
            format!("this process and a second one read each other's writes in memory of {name}");
        // The receiver no longer waits after a timeout.
        let _ = say.send(passed.map(|()| both));
    };
    tell(peer().and_then(|peer| peer::by_descriptor(&uuid, &peer)));
    tell(peer().and_then(|peer| peer::by_handle(&context, peer)));
    Ok(())
}

fn rows(found: [Found; 2]) -> [Facility; 2] {
    let [descriptor, handle] = found;
    [
        (FacilityName::WindowByFd, descriptor),
        (FacilityName::WindowByHandle, handle),
    ]
    .map(|(name, found)| Facility::of(name, found.map_err(|why| (why.name, why.detail))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_room_no_device_is_looked_at() {
        let rows = tried(HOST_BYTES - 1);
        assert!(rows.iter().all(|row| row.reason == "NoRoom"), "{rows:?}");
    }

    #[test]
    fn what_was_found_in_time_is_kept_when_the_rest_hangs() {
        let (hold, held) = channel::<()>();
        let [descriptor, handle] = found(Duration::from_secs(1), move |say| {
            say.send(Ok("passed".into())).unwrap();
            let _ = held.recv();
            Ok(())
        });
        assert_eq!((descriptor, handle), (Ok("passed".into()), Err(too_late())));
        drop(hold);
    }

    #[test]
    fn what_keeps_both_ways_from_being_tried_is_said_of_both() {
        let none = not_passed("NoDevice", "none is seen");
        let refused = none.clone();
        let found = found(Duration::from_secs(9), move |_| Err(refused));
        assert_eq!(found, [Err(none.clone()), Err(none)]);
    }
}
