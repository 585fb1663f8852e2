//! A stream to a server: TCP, Unix socket or TLS.

use super::fault::Fault;
use super::tls;
use super::url::Address;
use crate::tiers::Span;
use crate::tiers::raw::{self, Around};
use rustix::fd::{AsFd, BorrowedFd};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};
use rustls::ClientConnection;
use std::io;
use std::path::Path;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::client::TlsStream;

/// Bytes that pass through memory of ours at a time where they are encrypted.
const PIECE_BYTES: u64 = 64 << 10;
/// A connection on which nothing happens is probed after this, so that a peer that is gone without a word is noticed.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Times that is read what came unasked over an encrypted connection: servers send a few tickets of their sessions, some hundred bytes.
const UNASKED_READS_MAX: usize = 4;

/// A stream.
pub enum Stream {
    /// TCP.
    Tcp(TcpStream),
    /// A Unix socket.
    Unix(UnixStream),
    /// TLS over TCP.
    Tls(Box<TlsStream<TcpStream>>),
}

trait Both: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Both for T {}

impl Stream {
    /// Connects. With `tls` the server's certificate must be of its host's name and of `ca`, or of the system's authorities, and the
    /// handshake must have ended within that time.
    pub async fn connect(
        address: &Address,
        tls: Option<Duration>,
        ca: Option<&Path>,
    ) -> Result<Self, Fault> {
        let (host, port) = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await;
                return Ok(Self::Unix(stream.map_err(Fault::unreachable)?));
            }
            Address::Tcp(host, port) => (host, *port),
        };
        // A name that cannot be right is told whether the server is there or not.
        let tls = match tls {
            Some(longest) => Some((tls::name(host)?, longest)),
            None => None,
        };
        let stream = tcp(host, port).await.map_err(Fault::unreachable)?;
        match tls {
            None => Ok(Self::Tcp(stream)),
            Some((name, longest)) => {
                let stream = tls::connect(name, stream, ca, longest).await?;
                Ok(Self::Tls(Box::new(stream)))
            }
        }
    }

    /// Is it TLS?
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    fn both(&mut self) -> &mut dyn Both {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
            Self::Tls(stream) => stream,
        }
    }

    /// Did the other side close it, or say something that nobody asked for?
    pub fn is_stale(&mut self) -> bool {
        let fd = match self {
            Self::Tcp(stream) => AsFd::as_fd(&*stream),
            Self::Unix(stream) => AsFd::as_fd(&*stream),
            Self::Tls(stream) => {
                let (socket, session) = stream.get_mut();
                return says_more_than_tickets(session, socket.as_fd());
            }
        };
        let mut byte = [0; 1];
        let waiting = recv(fd, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(waiting, Err(Errno::AGAIN))
    }

    /// Reads some bytes to the end of `into`; 0 = it was closed.
    pub async fn read(&mut self, into: &mut Vec<u8>) -> io::Result<usize> {
        self.both().read_buf(into).await
    }

    /// Writes all of it.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let both = self.both();
        both.write_all(bytes).await?;
        both.flush().await
    }

    /// Reads at most `bytes` bytes into a span, from `at` on; 0 = it was closed.
    pub async fn read_span(&mut self, span: &Span, at: u64, bytes: u64) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => {
                let receive = || raw::receive(stream.as_fd(), span, at, bytes);
                stream.async_io(Interest::READABLE, receive).await
            }
            Self::Unix(stream) => {
                let receive = || raw::receive(stream.as_fd(), span, at, bytes);
                stream.async_io(Interest::READABLE, receive).await
            }
            Self::Tls(stream) => {
                let mut piece = Vec::with_capacity(bytes.min(PIECE_BYTES) as usize);
                let read = stream.take(bytes).read_buf(&mut piece).await?;
                if span.write(at, &piece) {
                    Ok(read)
                } else {
                    Err(Errno::FAULT.into())
                }
            }
        }
    }

    /// Writes the first of these bytes; returns how many.
    pub async fn write_around(&mut self, all: &Around<'_>) -> io::Result<usize> {
        let stream = match self {
            Self::Tcp(stream) => {
                let send = || raw::send(stream.as_fd(), all);
                return stream.async_io(Interest::WRITABLE, send).await;
            }
            Self::Unix(stream) => {
                let send = || raw::send(stream.as_fd(), all);
                return stream.async_io(Interest::WRITABLE, send).await;
            }
            Self::Tls(stream) => stream,
        };
        if !all.before.is_empty() {
            stream.write_all(all.before).await?;
            return Ok(all.before.len());
        }
        if all.bytes > 0 {
            let mut piece = vec![0; all.bytes.min(PIECE_BYTES) as usize];
            if !all.span.read(all.at, &mut piece) {
                return Err(Errno::FAULT.into());
            }
            stream.write_all(&piece).await?;
            return Ok(piece.len());
        }
        stream.write_all(all.behind).await?;
        stream.flush().await?;
        Ok(all.behind.len())
    }
}

/// What lies in a socket now. Asked of the kernel: the runtime may not have looked since it came.
struct Now<'a>(BorrowedFd<'a>);

impl io::Read for Now<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let (_, bytes) = recv(self.0, &mut *into, RecvFlags::DONTWAIT)?;
        Ok(bytes)
    }
}

/// Takes in tickets of an encrypted connection. True: it ended, or what came is none.
fn says_more_than_tickets(session: &mut ClientConnection, socket: BorrowedFd<'_>) -> bool {
    for _ in 0..UNASKED_READS_MAX {
        match session.process_new_packets() {
            Ok(state) if state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed() => {}
            _ => return true,
        }
        match session.read_tls(&mut Now(socket)) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() != io::ErrorKind::WouldBlock,
        }
    }
    true
}

async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(&stream, true)?;
    sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
    Ok(stream)
}
