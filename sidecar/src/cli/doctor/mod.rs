//! `doctor`: reports what a node provides and what that means for the cache, without privileges, toolkit or network. `host`,
//! `facilities`, `driver`, `speed`, `gpu_speed` and `passed` gather facts, each within a deadline. `gpu`, `modes` and `findings` judge
//! them and run no probes.

mod deadline;
mod driver;
mod facilities;
mod findings;
mod findings_gpu;
mod gpu;
mod gpu_speed;
mod host;
mod modes;
mod passed;
mod report;
mod speed;
mod sys;
mod table;

use super::ConfigFiles;
use super::output::Format;
use deadline::Deadline;
use host::Host;
use kvcachepool_gpu::cuda::context::needed_bytes;
use kvcachepool_memory::limit;
use kvcachepool_memory::memfd::Pages;
use kvcachepool_protocol::config::{Config, HugePages};
use kvcachepool_protocol::geometry::Geometry;
use report::{Facts, Report, Wanted};
use rustix::fs::Access;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Timeout of the driver's answers: the first one wakes the GPUs up.
const DRIVER_LONGEST: Duration = Duration::from_secs(4);

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    files: ConfigFiles,
    #[command(flatten)]
    format: Format,
    /// Also measure copies between host and GPU, and pass a window to a second process. This creates CUDA contexts and uses about
    /// 1.3 GiB of the first device's memory for some seconds. Do not use it beside a vLLM that serves requests.
    #[arg(long)]
    measure: bool,
    /// Like --measure, and also measure how much such copies slow down kernels like those of decoding.
    #[arg(long)]
    measure_decode: bool,
}

impl Args {
    fn asked(&self) -> Option<gpu_speed::Asked> {
        match (self.measure_decode, self.measure) {
            (true, _) => Some(gpu_speed::Asked::Decode),
            (false, true) => Some(gpu_speed::Asked::Copies),
            (false, false) => None,
        }
    }
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let config = args.files.read()?;
    let report = examined(config.as_ref(), args.asked());
    let text = match args.format.is_json() {
        true => serde_json::to_string_pretty(&report).map_err(|e| e.to_string())? + "\n",
        false => table::render(&report),
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())
        .map_err(|e| format!("cannot print: {e}"))?;
    Ok(match report.serves {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn examined(config: Option<&Config>, asked: Option<gpu_speed::Asked>) -> Report {
    let facts = gathered(config, asked);
    let findings = findings::judged(&facts);
    Report {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        serves: findings::serves(&findings),
        transfer_modes: modes::judged(&facts.gpu, &facts.facilities, &facts.speeds),
        facts,
        findings,
    }
}

fn gathered(config: Option<&Config>, asked: Option<gpu_speed::Asked>) -> Facts {
    let progress = Progress::new();
    progress.at("the node");
    let host = Host::read();
    let room = host.memory_room_bytes;
    // Before the other probes, so that a device is awake when its PCIe link is read.
    let gpu_speeds = asked.map(|asked| {
        progress.at("the speed of GPU copies");
        gpu_speed::measured(asked, room)
    });
    let passed = gpu_speeds.as_ref().map(|speeds| {
        progress.at("whether a window can be passed");
        match speeds.iter().any(|speed| speed.reason == gpu_speed::LATE) {
            true => passed::late(),
            false => passed::tried(room),
        }
    });
    let deadline = Deadline::start();
    progress.at("GPUs");
    let window = config.map_or(Config::default().transfer, |config| config.transfer.clone());
    let needed = needed_bytes(window.window_size.0);
    let gpu = gpu::judged(deadline.within(DRIVER_LONGEST, driver::ask), needed);
    progress.at("kernel features");
    let disk = config.and_then(|config| config.disk.path.clone());
    let mut facilities = facilities::tried(deadline, runtime(config), disk.clone(), room);
    facilities.extend(passed.into_iter().flatten());
    progress.at("the speed of memory and disk");
    let mut speeds = speed::measured(deadline, disk, room, host.cores);
    speeds.extend(gpu_speeds.into_iter().flatten());
    Facts {
        wanted: config.map(wanted),
        host,
        facilities,
        gpu,
        speeds,
    }
}

/// The folder of locks: that of the socket. Without a config, the first writable candidate: in our own container the temporary
/// folder is read-only.
fn runtime(config: Option<&Config>) -> PathBuf {
    if let Some(folder) = config.and_then(|config| config.socket.parent()) {
        return folder.to_owned();
    }
    let usual = Config::default().socket;
    let folders = [usual.parent(), Some(Path::new("/run"))];
    let mut folders = folders.into_iter().flatten();
    let writable = |folder: &&Path| rustix::fs::access(*folder, Access::WRITE_OK).is_ok();
    folders
        .find(writable)
        .map_or_else(std::env::temp_dir, Path::to_owned)
}

fn wanted(config: &Config) -> Wanted {
    let pages = match config.memory.huge_pages {
        HugePages::None => Pages::Base,
        HugePages::Size2Mi => Pages::Huge2Mi,
        HugePages::Size1Gi => Pages::Huge1Gi,
    };
    let geometry = Geometry::new(0, config.memory.size.0, config.limits.index_entries);
    let refused = limit::check(&geometry, pages, config.extras_bytes()).err();
    let disk = config.disk.path.as_deref();
    Wanted {
        arena_bytes: geometry.arena_bytes,
        page_bytes: pages.bytes(),
        arena_refused: refused.map(|e| e.to_string()).unwrap_or_default(),
        disk: disk
            .map(|path| path.display().to_string())
            .unwrap_or_default(),
    }
}

/// One line on a terminal's standard error with the current probe.
struct Progress {
    shown: bool,
}

impl Progress {
    fn new() -> Self {
        Self {
            shown: std::io::stderr().is_terminal(),
        }
    }

    fn at(&self, what: &str) {
        self.write(&format!("checking {what}"));
    }

    fn write(&self, line: &str) {
        if self.shown {
            // A line that cannot be shown is not an error.
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.write("");
    }
}
