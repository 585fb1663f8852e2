//! Answers on the admin port while no engine does: alive, not ready. One short request at a time, bounded in bytes and time.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// A slow client may hold the supervisor for this long.
const PATIENCE: Duration = Duration::from_millis(100);
const REQUEST_BYTES_MAX: usize = 2048;

/// Facts for the answers.
#[derive(Debug, Clone, Default)]
pub struct Standby {
    pub starts: u64,
    pub last_exit: String,
}

impl Standby {
    /// Answers one client that waits on the non-blocking listener. The loop checks everything else before the next client: many idle
    /// connections must not delay a restart.
    pub fn answer(&self, listener: &TcpListener) {
        if let Ok((stream, _)) = listener.accept() {
            // On a failure the client sees a closed connection, as with any restart.
            let _ = self.one(stream);
        }
    }

    fn one(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut request = [0u8; REQUEST_BYTES_MAX];
        let got = stream.read(&mut request)?;
        let line = String::from_utf8_lossy(&request[..got]);
        let path = line.split_whitespace().nth(1).unwrap_or_default();
        let (status, kind, body) = self.page(path);
        write!(
            stream,
            "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )
    }

    fn page(&self, path: &str) -> (&'static str, &'static str, String) {
        let ended = match self.last_exit.as_str() {
            "" => String::new(),
            how => format!("; the last one ended: {how}"),
        };
        let reason = format!("EngineRestarting: the engine process is starting{ended}\n");
        match path.split('?').next().unwrap_or_default() {
            "/healthz" => ("200 OK", "text/plain", reason),
            "/metrics" => (
                "200 OK",
                "text/plain; version=0.0.4",
                format!(
                    "# TYPE kvcachepool_engine_up gauge\nkvcachepool_engine_up 0\n\
                     # TYPE kvcachepool_engine_starts_total counter\nkvcachepool_engine_starts_total {}\n",
                    self.starts
                ),
            ),
            _ => ("503 Service Unavailable", "text/plain", reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_call_answers_one_connection_whatever_waits_behind_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let address = listener.local_addr().unwrap();
        let _idle: Vec<_> = (0..3)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        let standby = Standby::default();
        standby.answer(&listener);
        standby.answer(&listener);
        assert!(listener.accept().is_ok(), "the third one still waits");
        standby.answer(&listener);
    }
}
