//! `flush`: asks the sidecar to start writing the chunks that only it holds to the lower tiers. For a preStop hook: it returns within
//! a second and never fails, because a failing hook only creates an event.

use super::ask;
use kvcachepool_protocol::config::Config;
use kvcachepool_protocol::status::Flush;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

/// Longest wait for the reply: a hook delays the end of its pod.
const PATIENCE: Duration = Duration::from_millis(900);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Socket of the sidecar.
    #[arg(long, value_name = "PATH", default_value_os_t = Config::default().socket)]
    socket: PathBuf,
}

pub fn main(args: &Args) -> ExitCode {
    let (answer, answered) = mpsc::channel();
    let socket = args.socket.clone();
    // A thread, because connecting to a stopped sidecar may block for ever. It ends with the process.
    std::thread::spawn(move || answer.send(ask::over_socket::<Flush>(&socket, "flush")));
    match answered.recv_timeout(PATIENCE) {
        Ok(Ok(flush)) => println!("{}", sentence(&flush)),
        Ok(Err(e)) => eprintln!("warning: no flush started: {e}"),
        Err(_) => eprintln!(
            "warning: no flush started: {}: no answer within {} ms",
            args.socket.display(),
            PATIENCE.as_millis()
        ),
    }
    ExitCode::SUCCESS
}

fn sentence(flush: &Flush) -> String {
    if flush.tiers.is_empty() {
        return "nothing to flush: memory is the only tier".into();
    }
    let tiers = flush.tiers.join(", ");
    format!("flush started: {} chunks to {tiers}", flush.chunks)
}
