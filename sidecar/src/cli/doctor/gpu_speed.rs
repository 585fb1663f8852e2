//! Copy speed between a GPU and the host. Only on request, because it creates a CUDA context and uses device memory.

use super::deadline::Deadline;
use super::report::{Speed, SpeedName};
use super::speed;
use kvcachepool_gpu::cuda::context;
use kvcachepool_gpu::cuda::launch::Kernels;
use kvcachepool_gpu::cuda::measure::{Decode, JOB_BYTES, Link, NotMeasured, WindowLink};
use kvcachepool_protocol::config::CONTEXT_BYTES;
use kvcachepool_protocol::window::Direction;
use std::sync::Arc;
use std::time::Duration;

/// Duration of one measurement.
const LONG: Duration = Duration::from_millis(300);
/// Timeout of all measurements: creating a context alone takes a second or more.
const LONGEST: Duration = Duration::from_secs(9);
/// Reason name when the driver hangs.
pub const LATE: &str = "TimedOut";
/// Bytes of the window: a small one, since loads and stores use a half each.
const WINDOW_BYTES: u64 = JOB_BYTES;
/// Page-locked host memory: as much as the copies use on the device.
const PINNED_BYTES: u64 = 2 * JOB_BYTES + WINDOW_BYTES;
/// Host memory that all measurements use.
const HOST_BYTES: u64 = CONTEXT_BYTES + PINNED_BYTES;
/// Kernels per step, and bytes of each.
const STEP: (usize, u64) = (32, 64 << 20);

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Copies alone.
    Copies,
    /// Also the slowdown of a computing device, which runs kernels.
    Decode,
}

type Found = (SpeedName, Result<u64, String>);

impl Asked {
    fn names(self) -> &'static [SpeedName] {
        let all = &[
            SpeedName::PinnedToDevice,
            SpeedName::PinnedFromDevice,
            SpeedName::PinnedBothWays,
            SpeedName::WindowRoundTrip,
            SpeedName::DecodeIdle,
            SpeedName::DecodeBeside,
        ];
        match self {
            Self::Copies => all.get(..4).unwrap_or_default(),
            Self::Decode => all,
        }
    }

    /// Device memory used beside the context's.
    fn bytes(self) -> u64 {
        match self {
            Self::Copies => PINNED_BYTES,
            Self::Decode => PINNED_BYTES + 2 * STEP.1,
        }
    }
}

/// Measures the first device, within `room_bytes` of host memory.
pub fn measured(asked: Asked, room_bytes: u64) -> Vec<Speed> {
    let found = match room_bytes < HOST_BYTES {
        true => Some(Err(NotMeasured::new("NoRoom"))),
        false => Deadline::start().within(LONGEST, move || on_device(asked)),
    };
    let rows: Vec<Found> = match found {
        Some(Ok(rows)) => rows,
        Some(Err(error)) => refused(asked, &error.to_string()),
        None => refused(asked, LATE),
    };
    rows.into_iter().map(row).collect()
}

fn refused(asked: Asked, reason: &str) -> Vec<Found> {
    let names = asked.names().iter();
    names.map(|name| (*name, Err(reason.to_owned()))).collect()
}

fn on_device(asked: Asked) -> Result<Vec<Found>, NotMeasured> {
    let uuid = context::devices()?.swap_remove(0);
    // Fails with a reason when vLLM has left too little memory.
    let context = context::beside_vllm(&uuid, asked.bytes())?;
    let link = Link::new(&context)?;
    let both = link.both(LONG)?;
    let mut speeds = vec![
        Ok(link.one_way(Direction::Load, LONG)?),
        Ok(link.one_way(Direction::Store, LONG)?),
        Ok(both.load + both.store),
        WindowLink::new(&context, &uuid, WINDOW_BYTES)
            .and_then(|mut window| window.round_trip(LONG))
            .map_err(|error| error.to_string()),
    ];
    if asked == Asked::Decode {
        speeds.extend(match Kernels::load(&context) {
            Ok(kernels) => decoding(Arc::new(kernels), &link)?.map(Ok),
            Err(error) => [(); 2].map(|()| Err(format!("{}: {error}", error.name()))),
        });
    }
    let speeds = speeds.into_iter().map(|speed| Ok(speed? as u64));
    Ok(asked.names().iter().copied().zip(speeds).collect())
}

/// Kernel speed alone, and beside copies in both directions.
fn decoding(kernels: Arc<Kernels>, link: &Link) -> Result<[f64; 2], NotMeasured> {
    let decode = Decode::new(kernels, STEP.0, STEP.1)?;
    let idle = decode.steps(LONG)?;
    let (beside, _) = decode.steps_beside(link, LONG)?;
    let bytes = decode.step_bytes() as f64;
    Ok([bytes / idle.p50, bytes / beside.p50])
}

fn row((name, found): Found) -> Speed {
    speed::row(name, found, JOB_BYTES, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_room_no_device_is_looked_at() {
        let rows = measured(Asked::Copies, HOST_BYTES - 1);
        assert!(rows.iter().all(|row| row.reason == "NoRoom"), "{rows:?}");
    }

    #[test]
    fn every_row_that_is_asked_for_has_its_reason_where_nothing_was_measured() {
        for (asked, count) in [(Asked::Copies, 4), (Asked::Decode, 6)] {
            let rows: Vec<Speed> = refused(asked, "NoDriver").into_iter().map(row).collect();
            assert_eq!(rows.len(), count);
            assert!(rows.iter().all(|row| row.reason == "NoDriver"), "{rows:?}");
        }
    }
}
