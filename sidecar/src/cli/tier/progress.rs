//! A progress line on standard error, if that is a terminal.

use super::size;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// Time between two updates.
const EVERY: Duration = Duration::from_millis(250);

#[derive(Debug)]
pub struct Progress {
    shown: bool,
    /// The line is visible.
    stands: bool,
    began: Instant,
    written: Instant,
    /// Total number of objects; 0 if unknown.
    objects: u64,
}

impl Progress {
    /// `objects`: the total number; 0 if unknown.
    pub fn new(objects: u64) -> Self {
        let now = Instant::now();
        Self {
            shown: std::io::stderr().is_terminal(),
            stands: false,
            began: now,
            written: now,
            objects,
        }
    }

    /// Reports the progress so far.
    pub fn at(&mut self, objects: u64, bytes: u64) {
        if !self.shown || self.written.elapsed() < EVERY {
            return;
        }
        self.written = Instant::now();
        self.stands = true;
        let line = line(objects, self.objects, bytes, self.began.elapsed());
        // A line that cannot be shown is not an error.
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
    }

    /// Removes the line before other output.
    pub fn clear(&mut self) {
        if std::mem::take(&mut self.stands) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

fn line(objects: u64, of: u64, bytes: u64, took: Duration) -> String {
    let rate = bytes as f64 / took.as_secs_f64().max(0.001);
    let of = if of == 0 {
        String::new()
    } else {
        format!(" of {of}")
    };
    let (bytes, rate) = (size(bytes), size(rate as u64));
    format!("{objects}{of} objects, {bytes}, {rate}/s")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_far_and_how_fast() {
        let took = Duration::from_secs(2);
        assert_eq!(line(3, 10, 4 << 20, took), "3 of 10 objects, 4Mi, 2Mi/s");
        assert_eq!(line(3, 0, 4 << 20, took), "3 objects, 4Mi, 2Mi/s");
    }
}
