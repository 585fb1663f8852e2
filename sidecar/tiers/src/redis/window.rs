//! How much of one object is under way over a connection.

use kvcachepool_protocol::object::REDIS_SEGMENT_BYTES;
use std::collections::VecDeque;

/// Two full segments, and the rest of a section of 1 MiB, or of any number of them: the server has one to do while we take in the other. It
/// answers at once and keeps what does not fit into the socket: with eight on each connection that was more than a processor's cache holds.
const BYTES_MAX: u64 = 2 * REDIS_SEGMENT_BYTES + 4096;
/// Short ones cost a round trip if they wait for each other.
const SEGMENTS_MAX: usize = 64;

/// Segments whose replies have not come yet.
#[derive(Debug, Default)]
pub struct Window {
    under_way: VecDeque<u64>,
    bytes: u64,
}

impl Window {
    /// May one of so many bytes go as well? One alone always may.
    pub fn has_room(&self, bytes: u64) -> bool {
        let fits =
            self.bytes.saturating_add(bytes) <= BYTES_MAX && self.under_way.len() < SEGMENTS_MAX;
        fits || self.under_way.is_empty()
    }

    /// One of so many bytes goes.
    pub fn goes(&mut self, bytes: u64) {
        self.under_way.push_back(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// The reply to the first of them came.
    pub fn came(&mut self) {
        self.bytes -= self.under_way.pop_front().unwrap_or(0);
    }

    /// How many are under way.
    pub fn segments(&self) -> usize {
        self.under_way.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_segments_of_a_mib_are_under_way() {
        let mut window = Window::default();
        for bytes in [REDIS_SEGMENT_BYTES, REDIS_SEGMENT_BYTES, 32] {
            assert!(window.has_room(bytes), "{bytes}");
            window.goes(bytes);
        }
        assert!(!window.has_room(REDIS_SEGMENT_BYTES));
    }

    #[test]
    fn two_full_segments_or_many_short_ones_are_under_way() {
        for (bytes, most) in [
            (1, SEGMENTS_MAX),
            (100_000, 10),
            (REDIS_SEGMENT_BYTES, 2),
            (BYTES_MAX + 1, 1),
        ] {
            let mut window = Window::default();
            while window.has_room(bytes) {
                window.goes(bytes);
            }
            assert_eq!(window.segments(), most, "{bytes}");
            window.came();
            assert!(window.has_room(bytes), "{bytes}");
            for _ in 1..most {
                window.came();
            }
            assert_eq!((window.segments(), window.bytes), (0, 0));
        }
    }
}
