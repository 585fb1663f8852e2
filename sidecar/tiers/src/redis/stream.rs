//! A stream to a server: TCP, Unix socket or TLS.

use super::fault::Fault;
use super::tls::{self, TlsFiles};
use super::url::Address;
use crate::Span;
use crate::raw::{self, Around};
use crate::tls::{Encrypted, read_span};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv, sockopt};
use rustls::ClientConnection;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::time::Duration;
use tokio::io::{
    AsyncBufRead, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, Interest,
};
use tokio::net::{TcpStream, UnixStream};

/// Bytes that are encrypted at a time: four records of maximum length. Each record costs the server two calls, however short it is.
const PIECE_BYTES: usize = 64 << 10;
/// Idle time before a connection is probed, to detect a peer that vanished.
const KEEPALIVE: Duration = Duration::from_secs(30);
/// Most reads of unsolicited data on an encrypted connection: servers send a few session tickets of some hundred bytes.
const UNASKED_READS_MAX: usize = 4;

pub enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<Sealing>),
}

/// A TLS stream, and the bytes to encrypt next.
pub struct Sealing {
    stream: Encrypted,
    piece: Vec<u8>,
}

impl Sealing {
    /// Writes as many of the first bytes as possible; returns their number.
    async fn write_around(&mut self, all: &Around<'_>) -> io::Result<usize> {
        // Commands and section bytes share records.
        self.piece.resize(PIECE_BYTES, 0);
        let before = all.before.len().min(PIECE_BYTES);
        let bytes = all.bytes.min((PIECE_BYTES - before) as u64) as usize;
        let behind = all.behind.len().min(PIECE_BYTES - before - bytes);
        let (to, rest) = self.piece.split_at_mut(before);
        to.copy_from_slice(&all.before[..before]);
        let (to, rest) = rest.split_at_mut(bytes);
        if bytes > 0 && !all.span.read(all.at, to) {
            return Err(Errno::FAULT.into());
        }
        rest[..behind].copy_from_slice(&all.behind[..behind]);
        let taken = before + bytes + behind;
        self.stream.write_all(&self.piece[..taken]).await?;
        if behind == all.behind.len() {
            self.stream.flush().await?;
        }
        Ok(taken)
    }
}

trait Both: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Both for T {}

impl Stream {
    /// Connects. With a time for TLS, the server's certificate must match its host name and be signed by an authority of the files or of the
    /// system, and the handshake must finish within that time.
    pub async fn connect(
        address: &Address,
        tls: Option<Duration>,
        files: &TlsFiles,
    ) -> Result<Self, Fault> {
        let (host, port) = match address {
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await;
                return Ok(Self::Unix(stream.map_err(Fault::unreachable)?));
            }
            Address::Tcp(host, port) => (host, *port),
        };
        // An invalid name is reported whether the server runs or not.
        let tls = match tls {
            Some(longest) => Some((tls::name(host)?, longest)),
            None => None,
        };
        let stream = tcp(host, port).await.map_err(Fault::unreachable)?;
        match tls {
            None => Ok(Self::Tcp(stream)),
            Some((name, longest)) => {
                let stream = tls::connect(name, stream, files, longest).await?;
                let piece = Vec::new();
                Ok(Self::Tls(Box::new(Sealing { stream, piece })))
            }
        }
    }

    /// Whether the stream uses TLS.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Self::Tls(_))
    }

    /// Address of the other end; `None` for a Unix socket.
    pub fn peer(&self) -> Option<IpAddr> {
        let address = match self {
            Self::Tcp(stream) => stream.peer_addr(),
            Self::Tls(encrypted) => encrypted.stream.get_ref().0.get_ref().peer_addr(),
            Self::Unix(_) => return None,
        };
        address.ok().map(|address| address.ip())
    }

    fn both(&mut self) -> &mut dyn Both {
        match self {
            Self::Tcp(stream) => stream,
            Self::Unix(stream) => stream,
            Self::Tls(encrypted) => &mut encrypted.stream,
        }
    }

    /// Whether the server closed it or sent unsolicited data.
    pub fn is_stale(&mut self) -> bool {
        let fd = match self {
            Self::Tcp(stream) => AsFd::as_fd(&*stream),
            Self::Unix(stream) => AsFd::as_fd(&*stream),
            Self::Tls(encrypted) => {
                let (socket, session) = encrypted.stream.get_mut();
                return says_more_than_tickets(session, &mut Now(socket));
            }
        };
        let mut byte = [0; 1];
        let waiting = recv(fd, &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT);
        !matches!(waiting, Err(Errno::AGAIN))
    }

    /// Appends received bytes to `into`; 0 after the end of the stream.
    pub async fn read(&mut self, into: &mut Vec<u8>) -> io::Result<usize> {
        self.both().read_buf(into).await
    }

    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let both = self.both();
        both.write_all(bytes).await?;
        both.flush().await
    }

    /// Reads at most `bytes` bytes into a span, from `at` on; 0 after the end of the stream.
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
            Self::Tls(encrypted) => read_span(&mut encrypted.stream, span, at, bytes).await,
        }
    }

    /// Writes as many of the first bytes as possible; returns their number.
    pub async fn write_around(&mut self, all: &Around<'_>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => {
                let send = || raw::send(stream.as_fd(), all);
                stream.async_io(Interest::WRITABLE, send).await
            }
            Self::Unix(stream) => {
                let send = || raw::send(stream.as_fd(), all);
                stream.async_io(Interest::WRITABLE, send).await
            }
            Self::Tls(encrypted) => encrypted.write_around(all).await,
        }
    }
}

/// Data that has already arrived. Asks the kernel too: the runtime may not have polled since then.
struct Now<'a>(&'a mut BufReader<TcpStream>);

impl io::Read for Now<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let kept = self.0.buffer();
        if kept.is_empty() {
            let (_, bytes) = recv(self.0.get_ref(), &mut *into, RecvFlags::DONTWAIT)?;
            return Ok(bytes);
        }
        let bytes = kept.len().min(into.len());
        into[..bytes].copy_from_slice(&kept[..bytes]);
        Pin::new(&mut *self.0).consume(bytes);
        Ok(bytes)
    }
}

/// Processes session tickets of an encrypted connection. True: it ended, or other data arrived.
fn says_more_than_tickets(session: &mut ClientConnection, now: &mut Now<'_>) -> bool {
    for _ in 0..UNASKED_READS_MAX {
        match session.process_new_packets() {
            Ok(state) if state.plaintext_bytes_to_read() == 0 && !state.peer_has_closed() => {}
            _ => return true,
        }
        match session.read_tls(now) {
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
