//! TLS towards servers, the same for every tier that has one.

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::BufReader;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Bytes of a call that reads: the library takes 4 KiB at a time, a quarter of a record.
const READ_BYTES: usize = 64 << 10;

/// An encrypted stream.
pub type Encrypted = TlsStream<BufReader<TcpStream>>;

/// Encrypts a stream to the server of this name, within so much time ([`TimedOut`](io::ErrorKind::TimedOut)).
pub async fn handshake(
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    stream: TcpStream,
    longest: Duration,
) -> io::Result<Encrypted> {
    let stream = BufReader::with_capacity(READ_BYTES, stream);
    let shaking = TlsConnector::from(config).connect(name, stream);
    timeout(longest, shaking).await.unwrap_or_else(|_| {
        let seconds = longest.as_secs_f64();
        let why = format!("no handshake within {seconds:.1} s");
        Err(io::Error::new(io::ErrorKind::TimedOut, why))
    })
}
