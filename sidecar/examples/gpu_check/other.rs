//! A second process, which is this program: makes memory that others map, or maps what it is given. They talk over a socket in the place of
//! the other's standard input.

use crate::report::{Why, holds};
use kvcachepool_sidecar::gpu;
use kvcachepool_sidecar::gpu::cuda::buffer::Buffer;
use kvcachepool_sidecar::gpu::cuda::context;
use kvcachepool_sidecar::gpu::cuda::import::Imported;
use kvcachepool_sidecar::gpu::device::Device;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// By this argument the program is the other process.
pub const ARGUMENT: &str = "--other-process";
/// Bytes of a window.
pub const WINDOW_BYTES: u64 = 16 << 20;
/// Longest that the other process may take for one thing: it makes a context first.
const LONGEST: Duration = Duration::from_secs(60);
const MESSAGE_BYTES: usize = 4096;

/// What one side writes and the other reads.
pub fn pattern(seed: u8) -> Vec<u8> {
    (0..4096u32)
        .map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ seed)
        .collect()
}

/// The other process; it ends with its socket.
pub struct Other {
    child: Child,
    socket: OwnedFd,
}

impl Other {
    /// Starts it.
    pub fn start(uuid: &str) -> Result<Self, Why> {
        let (ours, theirs) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        rustix::net::sockopt::set_socket_timeout(
            &ours,
            rustix::net::sockopt::Timeout::Recv,
            Some(LONGEST),
        )?;
        let child = Command::new(std::env::current_exe()?)
            .args([ARGUMENT, uuid])
            .stdin(Stdio::from(theirs))
            .spawn()?;
        Ok(Self {
            child,
            socket: ours,
        })
    }

    /// Has it do something; what it answers. An answer that begins with `!` says why it could not.
    pub fn ask(
        &self,
        what: &str,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(String, Option<OwnedFd>), Why> {
        send(self.socket.as_fd(), what, fd)?;
        let (said, fd) = receive(self.socket.as_fd())?;
        holds(
            !said.is_empty(),
            format!("the other process died over {what:?}"),
        )?;
        match said.strip_prefix('!') {
            Some(why) => Err(Why::Failed(format!("{what:?}: {why}"))),
            None => Ok((said, fd)),
        }
    }

    /// Kills it; it is gone when this returns.
    pub fn kill(mut self) -> Result<(), Why> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn send(socket: BorrowedFd<'_>, what: &str, fd: Option<BorrowedFd<'_>>) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<BorrowedFd<'_>> = fd.into_iter().collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    sendmsg(
        socket,
        &[IoSlice::new(what.as_bytes())],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

fn receive(socket: BorrowedFd<'_>) -> rustix::io::Result<(String, Option<OwnedFd>)> {
    let mut bytes = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let mut fd = None;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            fd = fds.next();
        }
    }
    Ok((
        String::from_utf8_lossy(&bytes[..got.bytes]).into_owned(),
        fd,
    ))
}

/// Lives until nobody asks any more.
pub fn main() -> ExitCode {
    let stdin = std::io::stdin();
    let uuid = std::env::args().nth(2).unwrap_or_default();
    let mut kept = Kept::default();
    while let Ok((asked, fd)) = receive(stdin.as_fd()) {
        if asked.is_empty() {
            break;
        }
        let (said, fd) = match kept.answer(&uuid, &asked, fd) {
            Ok(answer) => answer,
            Err(Why::Failed(why) | Why::Skipped(why)) => (format!("!{why}"), None),
        };
        if send(stdin.as_fd(), &said, fd.as_ref().map(|fd| fd.as_fd())).is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// What the other process holds.
#[derive(Default)]
struct Kept {
    window: Option<Box<dyn Device>>,
    buffer: Option<Buffer>,
    imported: Option<Imported>,
}

impl Kept {
    fn answer(
        &mut self,
        uuid: &str,
        asked: &str,
        fd: Option<OwnedFd>,
    ) -> Result<(String, Option<Arc<OwnedFd>>), Why> {
        let context = context::of(uuid)?;
        let bytes = WINDOW_BYTES as usize;
        let (verb, rest) = asked.split_once(' ').unwrap_or((asked, ""));
        match verb {
            "make-window" => {
                let mut window = gpu::cuda::open_alone(uuid, WINDOW_BYTES)?;
                window.write(0, &pattern(1))?;
                let export = window.export();
                self.window = Some(window);
                return Ok(("made".into(), export.fd));
            }
            "make-buffer" => {
                let buffer = Buffer::new(&context, WINDOW_BYTES)?;
                buffer.write(0, &pattern(1))?;
                let handle = buffer.ipc_handle()?;
                self.buffer = Some(buffer);
                return Ok((hex(&handle), None));
            }
            "map-descriptor" => {
                let fd = fd.ok_or_else(|| Why::Failed("no descriptor came".into()))?;
                let imported = Imported::by_descriptor(&context, fd.as_fd(), bytes)?;
                self.imported = Some(imported);
            }
            "map-handle" => {
                let imported = Imported::by_handle(&context, &unhex(rest), bytes)?;
                self.imported = Some(imported);
            }
            "turn-round" => {
                let mut seen = vec![0; pattern(0).len()];
                let imported = self.imported.as_ref();
                let imported = imported.ok_or_else(|| Why::Failed("nothing is mapped".into()))?;
                imported.read(&mut seen)?;
                holds(
                    seen == pattern(1),
                    "what the first side wrote is not seen here",
                )?;
                imported.write(&pattern(2))?;
            }
            "unmap" => self.imported = None,
            _ => return Err(Why::Failed("nobody knows what that is".into())),
        }
        Ok(("done".into(), None))
    }
}

/// Bytes as text.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes of a text.
pub fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text
        .chars()
        .filter_map(|c| c.to_digit(16))
        .map(|d| d as u8)
        .collect();
    digits
        .chunks_exact(2)
        .map(|pair| pair[0] << 4 | pair[1])
        .collect()
}
