//! What a phase of operations cost: time of each, of all, processor and memory.

use super::Load;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// A phase that runs.
pub struct Phase {
    of: &'static str,
    begun: Instant,
    cpu: Duration,
}

/// Gets that each worker makes on average, at least: those at the end, when fewer and fewer are in flight, are a part of what is measured.
const GETS_MIN: u64 = 4;

/// Which object is next, of 0..`count`: each is put once, and they are got in turn, again and again, until the time is over.
pub struct Turns {
    part: Part,
    count: u64,
    gets_min: u64,
    next: AtomicU64,
    until: Instant,
}

impl Turns {
    /// The time begins now.
    pub fn begin(part: Part, count: u64, load: Load) -> Self {
        Self {
            part,
            count,
            gets_min: GETS_MIN * load.in_flight as u64,
            next: AtomicU64::new(0),
            until: Instant::now() + load.time(),
        }
    }

    /// None: no more.
    pub fn next(&self) -> Option<u64> {
        let over = Instant::now() >= self.until;
        if over && matches!(self.part, Part::Put) {
            return None;
        }
        let number = self.next.fetch_add(1, Relaxed);
        match self.part {
            Part::Put => Some(number).filter(|number| *number < self.count),
            Part::Get if over && number >= self.gets_min => None,
            Part::Get => number.checked_rem(self.count),
        }
    }
}

/// Runs a thread for each worker, as long as there are objects. Returns how long each operation took.
/// What workers need is made before a phase begins: no tier makes its memory or its connections while it is measured either.
pub fn threads<W: Send>(
    turns: &Turns,
    workers: &mut [W],
    operation: impl Fn(&mut W, u64) + Sync,
) -> Vec<Duration> {
    let work = |worker: &mut W| {
        let mut times = Vec::new();
        while let Some(number) = turns.next() {
            let begun = Instant::now();
            operation(worker, number);
            times.push(begun.elapsed());
        }
        times
    };
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = workers
            .iter_mut()
            .map(|worker| scope.spawn(move || work(worker)))
            .collect();
        let ended = threads.into_iter().flat_map(|t| t.join().unwrap());
        ended.collect()
    })
}

/// Which part of a run a line is about.
#[derive(Clone, Copy)]
pub enum Part {
    Put,
    Get,
}

impl Phase {
    /// Of this one: a tier, or what bounds it.
    pub fn begin(of: &'static str) -> Self {
        Self {
            of,
            begun: Instant::now(),
            cpu: cpu(),
        }
    }

    /// Prints what became of it: GB (10^9 bytes) per second, times of single operations in ms, seconds of processor per GB.
    pub fn end(self, part: Part, load: Load, mut times: Vec<Duration>) {
        let (wall, cpu) = (self.begun.elapsed(), cpu() - self.cpu);
        times.sort_unstable();
        let gb = times.len() as f64 * load.size.0 as f64 / 1e9;
        let at = |percent: usize| {
            let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
            times.get(index).map_or(0.0, |t| t.as_secs_f64() * 1e3)
        };
        let part = match part {
            Part::Put => "put",
            Part::Get => "get",
        };
        println!(
            "{}",
            serde_json::json!({
                "of": self.of,
                "op": part,
                "size": load.size.0,
                "in_flight": load.in_flight,
                "operations": times.len(),
                "gbps": gb / wall.as_secs_f64(),
                "p50_ms": at(50),
                "p99_ms": at(99),
                "cpu_s_per_gb": cpu.as_secs_f64() / gb,
                "rss_peak_mib": rss_peak_mib(),
            })
        );
    }
}

/// Of all threads, in the kernel too. The kernel tells it in ticks of 10 ms.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name before it may hold blanks.
    let numbers = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |field| -> u64 {
        let text = numbers.split_ascii_whitespace().nth(field);
        text.and_then(|t| t.parse().ok()).unwrap_or(0)
    };
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// Most memory of the process's own so far.
pub fn rss_peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|l| l.strip_prefix("VmHWM:"));
    let kib = line.and_then(|l| l.trim().strip_suffix(" kB")?.trim().parse().ok());
    kib.unwrap_or(0.0) / 1024.0
}
