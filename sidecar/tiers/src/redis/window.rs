//! Limits the segments of one object that are in flight on a connection.

use kvcachepool_protocol::object::REDIS_SEGMENT_BYTES;
use std::collections::VecDeque;

/// Two full segments, and the rest of any number of sections of 1 MiB: the server works on one while this side receives the other. It
/// replies at once and keeps what does not fit into the socket: with eight per connection that exceeded a CPU cache.
const BYTES_MAX: u64 = 2 * REDIS_SEGMENT_BYTES + 4096;
/// Short segments would cost a round trip each if they waited for each other.
const SEGMENTS_MAX: usize = 64;

/// Segments whose replies have not arrived yet.
#[derive(Debug, Default)]
pub struct Window {
    under_way: VecDeque<u64>,
    bytes: u64,
}

impl Window {
    /// Whether a segment of this size may be sent too. A single one always may.
    pub fn has_room(&self, bytes: u64) -> bool {
        let fits =
            self.bytes.saturating_add(bytes) <= BYTES_MAX && self.under_way.len() < SEGMENTS_MAX;
        fits || self.under_way.is_empty()
    }

    /// Records that a segment of this size is sent.
    pub fn goes(&mut self, bytes: u64) {
        self.under_way.push_back(bytes);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Records the reply to the oldest segment.
    pub fn came(&mut self) {
        self.bytes -= self.under_way.pop_front().unwrap_or(0);
    }

    /// Number of segments in flight.
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
