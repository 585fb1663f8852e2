//! Whether memory of the first GPU can be passed to another process, in each of the ways in which a window is: tried with a second process of
//! this program, only when copies are measured, too, since it makes two CUDA contexts.

use super::deadline::Deadline;
use super::report::{Facility, FacilityName};
use crate::gpu::cuda::context::{self, CONTEXT_BYTES};
use crate::gpu::cuda::peer::{self, NotPassed, Peer, WINDOW_BYTES};
use std::time::Duration;

/// By this argument the program is the second process.
pub const SUBCOMMAND: &str = "window-peer";
/// Longest that the second process may take for one answer: it makes a context first.
const ANSWER_LONGEST: Duration = Duration::from_secs(4);
/// Longest that all of it may take.
const LONGEST: Duration = Duration::from_secs(9);

type Found = Result<String, NotPassed>;

/// Tries each way on the first device that this process sees.
pub fn tried() -> [Facility; 2] {
    let found = Deadline::start().within(LONGEST, on_device);
    rows(match found {
        Some(Ok(found)) => found,
        Some(Err(none)) => [Err(none.clone()), Err(none)],
        None => return late(),
    })
}

/// There is no time for it: the driver hung before.
pub fn late() -> [Facility; 2] {
    rows([(); 2].map(|()| {
        Err(NotPassed {
            name: "TimedOut".into(),
            detail: "the driver took too long".into(),
        })
    }))
}

fn on_device() -> Result<[Found; 2], NotPassed> {
    let uuid = context::devices()?.swap_remove(0);
    // Refused by name where a vLLM has left too little for a second context.
    let context = context::beside_vllm(&uuid, WINDOW_BYTES + CONTEXT_BYTES)?;
    let peer = || Peer::start(&[SUBCOMMAND, &uuid], ANSWER_LONGEST);
    let said = |()| {
        let name = &context.name;
        format!("a second process and this one read in memory of {name} what the other wrote")
    };
    Ok([
        peer().and_then(|peer| peer::by_descriptor(&uuid, &peer).map(said)),
        peer().and_then(|peer| peer::by_handle(&context, peer).map(said)),
    ])
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
