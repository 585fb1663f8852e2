//! Whether memory of the first GPU can be passed to another process, in each of the ways in which a window is: tried with a second process of
//! this program, only when copies are measured, too, since it makes two CUDA contexts.

use super::deadline::Deadline;
use super::report::{Facility, FacilityName};
use kvcachepool_gpu::cuda::context::{self, CONTEXT_BYTES};
use kvcachepool_gpu::cuda::peer::{self, NotPassed, Peer, WINDOW_BYTES};
use kvcachepool_protocol::config;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// By this argument the program is the second process.
pub const SUBCOMMAND: &str = "window-peer";
/// Longest that the second process may take for one answer: it makes a context first.
const ANSWER_LONGEST: Duration = Duration::from_secs(4);
/// Longest that all of it may take.
const LONGEST: Duration = Duration::from_secs(9);
/// Memory of the host that it takes: two contexts, and the second process.
const HOST_BYTES: u64 = 2 * config::CONTEXT_BYTES + (32 << 20);

type Found = Result<String, NotPassed>;

/// Tries each way on the first device that this process sees, where so much memory of the host may be taken.
pub fn tried(room_bytes: u64) -> [Facility; 2] {
    if room_bytes < HOST_BYTES {
        let none = not_passed("NoRoom", "too little memory is left to try it");
        return rows([Err(none.clone()), Err(none)]);
    }
    rows(found(LONGEST, on_device))
}

/// There is no time for it: the driver hung before.
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

/// What is said of each way, one after the other; and of those of which nothing is said in time, or at all, why not.
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
    // Refused by name where a vLLM has left too little for a second context.
    let context = context::beside_vllm(&uuid, WINDOW_BYTES + CONTEXT_BYTES)?;
    let peer = || Peer::start(&[SUBCOMMAND, &uuid], ANSWER_LONGEST);
    let tell = |passed: Result<(), NotPassed>| {
        let name = &context.name;
        let both =
            format!("a second process and this one read in memory of {name} what the other wrote");
        // Nobody listens any more where it took too long.
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
    .map(|(name, found)| {
        let works = found.is_ok();
        let (reason, detail) = match found {
            Ok(said) => (String::new(), said),
            Err(why) => (why.name, why.detail),
        };
        Facility {
            name,
            works,
            reason,
            detail,
        }
    })
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
