//! Messages between supervisor and engine over a SOCK_SEQPACKET pair: one JSON message each, with descriptors beside it.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::mem::MaybeUninit;
use std::path::PathBuf;

/// Longest message in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;
/// Most descriptors of a message.
const FDS_MAX: usize = 4;

/// What the supervisor has of the socket that its engines serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// The config file cannot be read, or does not say which socket.
    #[default]
    NoConfig,
    /// The lock file beside the socket cannot be used, for this reason.
    LockFileUnusable(String),
    /// A live sidecar holds this socket.
    SocketTaken(PathBuf),
    /// The sidecar's byte of the lock file beside this socket is locked until the container ends: engines serve here, whatever
    /// the config file says by now.
    Held(PathBuf),
}

/// First message of the supervisor to a new engine. Descriptors: `admin` (when `admin`), then arena and slot table (when `region`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// Where to serve, or why nowhere.
    pub claim: Claim,
    /// Starts of the engine in this container, this one included.
    pub starts: u64,
    /// How the last one ended; empty at the first start.
    pub last_exit: String,
    /// Seconds since the supervisor started.
    pub container_uptime_s: u64,
    /// The admin listener comes along.
    pub admin: bool,
    /// Why it does not; empty when it does.
    pub admin_error: String,
    /// Region of the memory that comes along.
    pub region: Option<u64>,
}

/// From the supervisor to a running engine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToEngine {
    /// The admin port, which the boot message lacked, is open: its listener comes along.
    Admin,
}

/// From the engine to the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromEngine {
    /// The engine answers HTTP from now on.
    Serving,
    /// The engine still answers; said once a second.
    Alive,
    /// The engine reads a slot table of these counts next, without a sign of life meanwhile.
    Reads {
        /// Rows.
        rows: u32,
        /// Chunk records.
        chunks: u32,
    },
    /// Hold these: arena and slot table descriptors of this region come along. What was held before is let go.
    Keep {
        /// Region number.
        region: u64,
    },
    /// Let go of what is held: no engine wants it any more.
    LetGo,
    /// Told to end, the engine still writes what only memory holds to the tiers below; said once a second.
    Flushing,
}

/// The other side is gone, or spoke what it cannot have spoken.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// A system call failed.
    #[error("link between supervisor and engine: {0}")]
    Io(#[from] Errno),
    /// The other side has ended.
    #[error("link between supervisor and engine: the other side has ended")]
    Ended,
    /// A message that this version does not know.
    #[error("link between supervisor and engine: {0}")]
    Garbled(#[from] serde_json::Error),
}

/// Both ends: the supervisor's and the engine's.
pub fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Sends one message with descriptors. Never blocks.
pub fn send<T: Serialize>(
    link: impl AsFd,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> Result<(), LinkError> {
    let body = serde_json::to_vec(message)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::INVAL.into());
    }
    sendmsg(
        link,
        &[IoSlice::new(&body)],
        &mut ancillary,
        SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Receives one message; waits for it unless `wait` is false (then `None` = nothing there).
pub fn receive<T: DeserializeOwned>(
    link: impl AsFd,
    wait: bool,
) -> Result<Option<(T, Vec<OwnedFd>)>, LinkError> {
    let mut body = vec![0u8; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC
        | if wait {
            RecvFlags::empty()
        } else {
            RecvFlags::DONTWAIT
        };
    let got = loop {
        let mut into = [IoSliceMut::new(&mut body)];
        match recvmsg(link.as_fd(), &mut into, &mut ancillary, flags) {
            Ok(got) => break got,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Ok(None),
            Err(e) => return Err(e.into()),
        }
    };
    let fds = ancillary
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if got.bytes == 0 {
        return Err(LinkError::Ended);
    }
    Ok(Some((serde_json::from_slice(&body[..got.bytes])?, fds)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_travel_with_their_message_and_an_ended_peer_is_named() {
        let (a, b) = pair().unwrap();
        assert!(receive::<FromEngine>(&a, false).unwrap().is_none());
        send(&b, &FromEngine::Keep { region: 4 }, &[a.as_fd(), b.as_fd()]).unwrap();
        let (message, fds) = receive::<FromEngine>(&a, true).unwrap().unwrap();
        assert_eq!(message, FromEngine::Keep { region: 4 });
        assert_eq!(fds.len(), 2);
        drop((b, fds));
        assert!(matches!(
            receive::<FromEngine>(&a, true),
            Err(LinkError::Ended)
        ));
    }
}
