//! Messages between two processes of this program over a SOCK_SEQPACKET pair. Each is one JSON message, with optional descriptors.

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::io::{Errno, IoSlice, IoSliceMut};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Serialize, de::DeserializeOwned};
use std::mem::MaybeUninit;

/// Longest message in bytes.
const MESSAGE_BYTES_MAX: usize = 4096;
/// Limit on descriptors per message.
const FDS_MAX: usize = 4;

/// The other side ended, or sent an invalid message.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("socket between two processes of the sidecar: {0}")]
    Io(#[from] Errno),
    #[error("socket between two processes of the sidecar: the other process has ended")]
    Ended,
    /// A message that this version does not know.
    #[error("socket between two processes of the sidecar: invalid message: {0}")]
    Garbled(#[from] serde_json::Error),
}

/// Creates both ends of a new link.
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

/// Receives one message. Waits for it, unless `wait` is false; then `None` means that there is none.
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
        assert!(receive::<u64>(&a, false).unwrap().is_none());
        send(&b, &4u64, &[a.as_fd(), b.as_fd()]).unwrap();
        let (message, fds) = receive::<u64>(&a, true).unwrap().unwrap();
        assert_eq!(message, 4u64);
        assert_eq!(fds.len(), 2);
        drop((b, fds));
        assert!(matches!(receive::<u64>(&a, true), Err(LinkError::Ended)));
    }
}
