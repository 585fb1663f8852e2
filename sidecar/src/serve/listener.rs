//! The Unix socket: binding, also over a stale one, accepting, and one task per connection.

use super::connection::Connection;
use super::daemon::Daemon;
use super::shell::Shell;
use kvcachepool_protocol::config::Limits;
use kvcachepool_protocol::frame::Op;
use kvcachepool_protocol::message::ErrorCode;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::time::Instant;
use tracing::warn;

/// Pause after an accept that failed for lack of descriptors or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// How long a closing connection may take to read what was sent to it.
const FAREWELL: Duration = Duration::from_secs(1);

/// Opcode and tag of an unsolicited error.
const UNASKED: (Op, u64) = (Op::Hello, 0);

/// Binds beside the path and renames over it: a stale socket is replaced atomically, and no client sees one that refuses connections.
/// Mode 0666, because vLLM runs under another uid. Access is limited to containers that mount the folder.
pub fn bind(path: &Path) -> std::io::Result<UnixListener> {
    let mut fresh = path.as_os_str().to_owned();
    fresh.push(".new");
    let fresh = Path::new(&fresh);
    match std::fs::remove_file(fresh) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = UnixListener::bind(fresh)?;
    std::fs::set_permissions(fresh, std::fs::Permissions::from_mode(0o666))?;
    std::fs::rename(fresh, path)?;
    Ok(listener)
}

/// Accepts without end.
pub async fn accept(shell: Arc<Shell>, listener: UnixListener, daemon: Arc<Daemon>) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(e) => {
                warn!(error = %e, "failed to accept on the socket");
                shell.metrics.add("accept_failures_total", &[], 1);
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        take(&shell, stream, &daemon.config().effective.limits);
    }
}

fn take(shell: &Arc<Shell>, stream: UnixStream, limits: &Limits) {
    let connection = Arc::new(Connection::new(
        shell.next_conn(),
        stream,
        usize::try_from(limits.frame_bytes.0).unwrap_or(usize::MAX),
        usize::try_from(limits.send_bytes.0).unwrap_or(usize::MAX),
    ));
    if shell.connection_count() >= limits.connections as usize {
        shell.named_end(&connection, "TooManyConnections");
        let message = format!(
            "limit of connections reached (limits.connections = {}); close one or raise the limit",
            limits.connections
        );
        shell.farewell(&connection, UNASKED, ErrorCode::LimitReached, &message);
        return;
    }
    shell.connected(connection.clone());
    let hello_by = Instant::now() + Duration::from_millis(limits.hello_timeout.ms);
    tokio::spawn(serve(shell.clone(), connection, hello_by));
}

/// Reads and writes as the stream is ready, until the connection ends.
async fn serve(shell: Arc<Shell>, connection: Arc<Connection>, hello_by: Instant) {
    loop {
        if connection.is_closed() {
            return finish(&connection).await;
        }
        let backlog = connection.has_backlog();
        tokio::select! {
            ready = connection.stream.readable() => {
                if ready.is_err() {
                    return shell.lost(connection.id);
                }
                // `WouldBlock` clears only the readiness seen above, and no later one.
                let _ = connection.stream.try_io(Interest::READABLE, || {
                    match shell.read(&connection) {
                        true => Err(std::io::ErrorKind::WouldBlock.into()),
                        false => Ok(()),
                    }
                });
            }
            ready = connection.stream.writable(), if backlog => {
                if ready.is_err() || connection.flush().is_err() {
                    return shell.lost(connection.id);
                }
            }
            () = connection.wake.notified() => {}
            () = tokio::time::sleep_until(hello_by), if !connection.has_greeted() => {
                shell.named_end(&connection, "HelloTimeout");
                shell.farewell(
                    &connection,
                    UNASKED,
                    ErrorCode::HelloFirst,
                    "no HELLO within limits.helloTimeout",
                );
                shell.lost(connection.id);
            }
        }
    }
}

/// Gives a closing connection a moment to read what was sent to it.
async fn finish(connection: &Connection) {
    let _ = tokio::time::timeout(FAREWELL, async {
        while connection.has_backlog() {
            if connection.stream.writable().await.is_err() || connection.flush().is_err() {
                return;
            }
        }
    })
    .await;
    connection.close_now();
}
