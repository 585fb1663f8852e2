//! A second process of this program in a worker's role. It maps memory that it receives, and each side reads what the other wrote. For the
//! doctor, and for the program that checks windows on a device.

use super::Failed;
use super::api::OUT_OF_MEMORY;
use super::buffer::Buffer;
use super::context::{self, Context, refused};
use super::import::Imported;
use crate::device::{Device, DeviceError, NoWindow};
use kvcachepool_memory::link::{self, LinkError};
use kvcachepool_protocol::message::WindowKind;
use kvcachepool_protocol::window::Unavailable;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the passed window: eight stages of the smallest size.
pub const WINDOW_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{name}: {detail}")]
pub struct NotPassed {
    /// Name: one of [`Unavailable`], or `NoDescriptor`, `NoIpc`, `NotMapped`, `NoProcess`, `TimedOut`.
    pub name: String,
    /// For people.
    pub detail: String,
}

impl NotPassed {
    fn of(name: &str, detail: impl ToString) -> Self {
        Self {
            name: name.to_owned(),
            detail: detail.to_string(),
        }
    }

    fn no_process(error: impl ToString) -> Self {
        Self::of("NoProcess", error)
    }
}

impl From<NoWindow> for NotPassed {
    fn from(none: NoWindow) -> Self {
        Self::of(&format!("{:?}", none.why), none.detail)
    }
}

impl From<Failed> for NotPassed {
    fn from(failed: Failed) -> Self {
        refused(failed).into()
    }
}

impl From<DeviceError> for NotPassed {
    fn from(error: DeviceError) -> Self {
        NoWindow::new(Unavailable::DriverFailed, error).into()
    }
}

/// Test pattern that one side writes and the other reads.
pub fn pattern(seed: u8) -> Vec<u8> {
    (0..4096u32)
        .map(|at| (at.wrapping_mul(31) >> 3) as u8 ^ seed)
        .collect()
}

/// Checks that these bytes are a side's pattern with this seed.
fn seen(bytes: &[u8], seed: u8, whose: &str) -> Result<(), NotPassed> {
    match bytes == pattern(seed) {
        true => Ok(()),
        false => Err(NoWindow::new(
            Unavailable::PatternMismatch,
            format!("the memory does not contain what the {whose} side wrote"),
        )
        .into()),
    }
}

/// A request to the second process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Make a window of [`WINDOW_BYTES`] and write the first side's pattern. Returns its descriptor, if it has one.
    MakeWindow,
    /// Like `MakeWindow`, with memory behind a legacy IPC handle. Returns the handle.
    MakeBuffer,
    /// Map the window behind the passed descriptor.
    MapDescriptor,
    /// Map the window behind this legacy IPC handle.
    MapHandle(Vec<u8>),
    /// Compare the mapped memory with the first side's pattern, and write the second side's.
    TurnRound,
    Unmap,
}

impl Ask {
    /// Name without the handle, because the handle is enough to map the memory.
    fn name(&self) -> &'static str {
        match self {
            Self::MakeWindow => "MakeWindow",
            Self::MakeBuffer => "MakeBuffer",
            Self::MapDescriptor => "MapDescriptor",
            Self::MapHandle(_) => "MapHandle",
            Self::TurnRound => "TurnRound",
            Self::Unmap => "Unmap",
        }
    }
}

/// An IPC handle, empty unless one was requested; or an error.
type Answer = Result<Vec<u8>, NotPassed>;

/// The second process. It is killed when this is dropped.
pub struct Peer {
    child: Child,
    link: OwnedFd,
}

impl Peer {
    /// Starts this program with arguments that make it call [`serve`]. `longest` is the timeout per reply, because the process first
    /// creates a context. Its output is discarded, because a program may read this process's output.
    pub fn start(arguments: &[&str], longest: Duration) -> Result<Self, NotPassed> {
        let (own, theirs) = link::pair().map_err(NotPassed::no_process)?;
        set_socket_timeout(&own, Timeout::Recv, Some(longest)).map_err(NotPassed::no_process)?;
        let program = std::env::current_exe().map_err(NotPassed::no_process)?;
        let child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(NotPassed::no_process)?;
        Ok(Self { child, link: own })
    }

    /// Sends a request and returns the reply. After a timeout, the peer must not be asked again.
    pub fn ask(
        &self,
        what: &Ask,
        fd: Option<BorrowedFd<'_>>,
    ) -> Result<(Vec<u8>, Option<OwnedFd>), NotPassed> {
        let died = |error| match error {
            LinkError::Ended => {
                NotPassed::no_process(format!("the second process exited during {}", what.name()))
            }
            error => NotPassed::no_process(error),
        };
        let fds: Vec<_> = fd.into_iter().collect();
        link::send(&self.link, what, &fds).map_err(died)?;
        let Some((answer, mut fds)) = link::receive::<Answer>(&self.link, true).map_err(died)?
        else {
            let detail = format!("no answer to {}", what.name());
            return Err(NotPassed::of("TimedOut", detail));
        };
        Ok((answer?, fds.pop()))
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes a window of the device with this UUID by descriptor, twice. Succeeds if each side has read what the other wrote.
pub fn by_descriptor(uuid: &str, peer: &Peer) -> Result<(), NotPassed> {
    let mut window = super::open_alone(uuid, WINDOW_BYTES)?;
    let export = window.export();
    let Some(fd) = export.fd.filter(|_| export.kind == WindowKind::PosixFd) else {
        return Err(NotPassed::of("NoDescriptor", window.memory()));
    };
    window.write(0, &pattern(1))?;
    peer.ask(&Ask::MapDescriptor, Some(fd.as_fd()))?;
    peer.ask(&Ask::TurnRound, None)?;
    let mut bytes = vec![0; pattern(0).len()];
    window.read(0, &mut bytes)?;
    seen(&bytes, 2, "second")?;
    peer.ask(&Ask::Unmap, None)?;
    peer.ask(&Ask::MapDescriptor, Some(fd.as_fd()))?;
    Ok(())
}

/// Passes memory by legacy IPC handle. Succeeds if each side has read what the other wrote. The peer has exited when this returns, because
/// the memory must not be freed while the peer maps it.
pub fn by_handle(context: &Arc<Context>, peer: Peer) -> Result<(), NotPassed> {
    let buffer = Buffer::new(context, WINDOW_BYTES)?;
    let turned = turn_round(&buffer, &peer);
    drop(peer);
    turned
}

fn turn_round(buffer: &Buffer, peer: &Peer) -> Result<(), NotPassed> {
    buffer.write(0, &pattern(1))?;
    let handle = buffer.ipc_handle();
    let handle = handle.map_err(|failed| NotPassed::of("NoIpc", failed))?;
    peer.ask(&Ask::MapHandle(handle), None)?;
    peer.ask(&Ask::TurnRound, None)?;
    let mut bytes = vec![0; pattern(0).len()];
    buffer.read(0, &mut bytes)?;
    seen(&bytes, 2, "second")
}

/// Runs as the second process, on the device with this UUID, until the first one hangs up. They communicate over standard input.
pub fn serve(uuid: &str) {
    // If a driver call hangs, this process cannot notice that the first one exited. If this call fails, it exits after the driver call.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let stdin = std::io::stdin();
    let mut kept = Kept::default();
    while let Ok(Some((asked, mut fds))) = link::receive(&stdin, true) {
        let (answer, fd) = match kept.answer(uuid, asked, fds.pop()) {
            Ok((handle, fd)) => (Ok(handle), fd),
            Err(why) => (Err(why), None),
        };
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        if link::send::<Answer>(&stdin, &answer, &fds).is_err() {
            break;
        }
    }
}

/// State of the second process.
#[derive(Default)]
struct Kept {
    imported: Option<Imported>,
    window: Option<Box<dyn Device>>,
    buffer: Option<Buffer>,
    context: Option<Arc<Context>>,
}

impl Kept {
    fn answer(
        &mut self,
        uuid: &str,
        asked: Ask,
        fd: Option<OwnedFd>,
    ) -> Result<(Vec<u8>, Option<Arc<OwnedFd>>), NotPassed> {
        let context = match &self.context {
            Some(context) => context.clone(),
            None => self.context.insert(context::of(uuid)?).clone(),
        };
        let bytes = WINDOW_BYTES as usize;
        let not_mapped = |failed: Failed| match failed.result {
            OUT_OF_MEMORY => failed.into(),
            _ => NotPassed::of("NotMapped", failed),
        };
        match asked {
            Ask::MakeWindow => {
                let mut window = super::open_alone(uuid, WINDOW_BYTES)?;
                window.write(0, &pattern(1))?;
                let export = window.export();
                self.window = Some(window);
                return Ok((Vec::new(), export.fd));
            }
            Ask::MakeBuffer => {
                let buffer = Buffer::new(&context, WINDOW_BYTES)?;
                buffer.write(0, &pattern(1))?;
                let handle = buffer.ipc_handle()?;
                self.buffer = Some(buffer);
                return Ok((handle, None));
            }
            Ask::MapDescriptor => {
                let fd =
                    fd.ok_or_else(|| NotPassed::of("NotMapped", "no descriptor was passed"))?;
                let imported = Imported::by_descriptor(&context, fd.as_fd(), bytes);
                self.imported = Some(imported.map_err(not_mapped)?);
            }
            Ask::MapHandle(handle) => {
                let imported = Imported::by_handle(&context, &handle, bytes);
                self.imported = Some(imported.map_err(not_mapped)?);
            }
            Ask::TurnRound => {
                let imported = self.imported.as_ref();
                let imported =
                    imported.ok_or_else(|| NotPassed::of("NotMapped", "nothing is mapped"))?;
                let mut bytes = vec![0; pattern(0).len()];
                imported.read(&mut bytes)?;
                seen(&bytes, 1, "first")?;
                imported.write(&pattern(2))?;
            }
            Ask::Unmap => self.imported = None,
        }
        Ok((Vec::new(), None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_names_the_request_and_not_its_content() {
        let (own, theirs) = link::pair().unwrap();
        set_socket_timeout(&own, Timeout::Recv, Some(Duration::from_millis(1))).unwrap();
        let mut silent = Command::new("sleep");
        let child = silent.arg("60").stdin(Stdio::from(theirs)).spawn().unwrap();
        let peer = Peer { child, link: own };
        let late = peer.ask(&Ask::MapHandle(vec![7; 64]), None).unwrap_err();
        assert_eq!(late, NotPassed::of("TimedOut", "no answer to MapHandle"));
    }
}
