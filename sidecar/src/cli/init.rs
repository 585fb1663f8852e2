//! `init`: prepares a pod before vLLM starts. Writes the connector into the shared folder and waits a moment for the sidecar's
//! socket. Failures are reported by name, and vLLM starts in any case: without the cache, or with the connector that is already there.

use super::export::{self, ExistingConnector, ExportError, VERSION};
use crate::supervisor::somebody_listens;
use kvcachepool_protocol::config::{Config, Duration, Log};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;
use tracing::{info, warn};

/// Interval of the connection attempts.
const POLL: std::time::Duration = std::time::Duration::from_millis(10);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder that sidecar and vLLM share. It holds the connector and the socket, and is on vLLM's PYTHONPATH.
    #[arg(long, value_name = "DIR", default_value = "/kvcachepool")]
    folder: PathBuf,
    /// What the connector does if vLLM has another KV connector; written to settings.json.
    #[arg(long, value_enum, default_value = "refuse")]
    existing_connector: ExistingConnector,
    /// Longest wait for the sidecar's socket.
    #[arg(long, value_name = "TIME", default_value = "1s")]
    wait: Duration,
    /// A failure is also written to this file if it exists. Kubernetes shows it in the pod's status.
    #[arg(long, value_name = "FILE", default_value = "/dev/termination-log")]
    termination_log: PathBuf,
}

pub fn main(args: &Args) -> ExitCode {
    crate::log::start(&Log::default());
    let found = export::versions(&args.folder);
    let others: Vec<&str> = found
        .iter()
        .map(|(version, _)| version.as_str())
        .filter(|version| *version != VERSION)
        .collect();
    let others = others.join(" ");
    let written = export::write(&args.folder, args.existing_connector);
    let began = Instant::now();
    let socket = wait_socket(&args.folder, args.wait);
    let waited_ms = began.elapsed().as_millis() as u64;
    let problem = match (&written, socket) {
        (Err(e), _) => Some((name(e), e.to_string())),
        (Ok(()), false) => Some((
            "SocketNotOpen",
            format!(
                "the sidecar did not open its socket within {}; vLLM keeps trying",
                args.wait
            ),
        )),
        (Ok(()), true) => None,
    };
    match &problem {
        None => info!(
            connector = VERSION,
            replaced = others,
            waited_ms,
            "vLLM may start"
        ),
        Some((reason, message)) => {
            let connector = if written.is_ok() { VERSION } else { &others };
            warn!(
                reason,
                error = message,
                connector,
                socket,
                waited_ms,
                "vLLM may start"
            );
            tell(&args.termination_log, reason, message);
        }
    }
    ExitCode::SUCCESS
}

/// Reason name of a failed export.
fn name(e: &ExportError) -> &'static str {
    match e.source.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "FolderNotWritable",
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "FolderFull",
        _ => "ConnectorNotWritten",
    }
}

/// Whether the sidecar accepts connections before the time is over.
fn wait_socket(folder: &Path, wait: Duration) -> bool {
    let name = Config::default().socket;
    let socket = folder.join(name.file_name().unwrap_or_default());
    let until = Instant::now() + wait.std();
    loop {
        if somebody_listens(&socket) {
            return true;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return false;
        }
        std::thread::sleep(POLL.min(left));
    }
}

/// Best effort: the log line contains the same.
fn tell(file: &Path, reason: &str, message: &str) {
    if let Ok(mut file) = std::fs::OpenOptions::new().write(true).open(file) {
        let _ = writeln!(file, "{reason}: {message}");
    }
}
