//! Limits windows in host memory: their pages are charged to this container, and the kernel kills it beyond its limit.

use super::device::NoWindow;
use kvcachepool_protocol::window::Unavailable;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a new window waits for an ending one, whose copies must end first.
const PATIENCE: Duration = Duration::from_secs(2);

#[derive(Debug, Default)]
pub struct Room {
    windows: Mutex<u64>,
    left: Condvar,
}

/// A window's reservation. Dropping it frees the room.
#[derive(Debug)]
pub struct Place(Arc<Room>);

impl Room {
    /// Reserves room for one more window if `fits` accepts the new count. Waits a little for an ending window.
    pub fn take(
        self: &Arc<Self>,
        fits: impl Fn(u64) -> Result<(), String>,
    ) -> Result<Place, NoWindow> {
        let until = Instant::now() + PATIENCE;
        let mut windows = self.windows.lock();
        while let Err(reason) = fits(*windows + 1) {
            // Without other windows, no room can become free.
            if *windows == 0 || self.left.wait_until(&mut windows, until).timed_out() {
                return Err(NoWindow::new(Unavailable::OutOfMemory, reason));
            }
        }
        *windows += 1;
        Ok(Place(self.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.windows.lock() -= 1;
        self.0.left.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_windows_are_made_than_fit_and_one_that_ends_makes_room() {
        let room = Arc::new(Room::default());
        let fits = |windows| match windows {
            0..=1 => Ok(()),
            more => Err(format!("{more} do not fit")),
        };
        let first = room.take(fits).unwrap();
        let other = room.clone();
        let waits = std::thread::spawn(move || other.take(fits).map(drop));
        drop(first);
        assert_eq!(waits.join().unwrap(), Ok(()));
        let none = room.take(|_| Err("no".into())).unwrap_err();
        assert_eq!(none.why, Unavailable::OutOfMemory);
    }
}
