//! Launchers of the GPU kernels. Each checks that memory holds all that its kernel touches, so that a launch is safe. What the arguments mean
//! is said in `cuda/*.cu`; the references in this crate take the same and do the same.
//!
//! Not here: a driver. Memory, streams and launches are those of a [`Device`], which whoever has a GPU implements.
#![allow(
    unsafe_code,
    reason = "a kernel trusts the addresses and sizes that it is launched with"
)]

pub mod cachegen;
pub mod pages;
#[cfg(test)]
mod tests;

use crate::manifest::{ArgumentType, Count, Entry};
use crate::pages::PagesError;

/// A GPU into which the kernels of the [manifest](crate::manifest) are loaded.
///
/// # Safety
/// - [`Device::upload`] returns memory of this device with all of the bytes, aligned to 256 bytes.
/// - [`Device::range`] returns an address that the device can read and write for as many bytes as it says. The address of a
///   [`Device::Memory`] does not change while it lives.
/// - [`Device::Memory`] is freed only after all kernels that were launched before have run.
/// - [`Device::launch`] runs the named kernel with these arguments on the grid of the manifest, and refuses a stream of another device.
pub unsafe trait Device {
    /// Memory of a device.
    type Memory;
    /// Work that a device does in order.
    type Stream;
    /// Why the device refused.
    type Error: From<Refused>;

    /// Allocates memory and copies these bytes there.
    fn upload(&self, bytes: &[u8]) -> Result<Self::Memory, Self::Error>;

    /// Address and bytes of memory. Fails where that is another device's: its kernels could write to it all the same.
    fn range(&self, memory: &Self::Memory) -> Result<(u64, u64), Self::Error>;

    /// Queues a kernel with arguments by name, in the manifest's order. `of` returns how much work there is.
    ///
    /// # Safety
    /// Every pointer is to device memory that is as large as what the kernel touches for these arguments, and that stays until the kernel
    /// has run.
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        kernel: &str,
        arguments: &[(&str, Value)],
        of: impl Fn(Count) -> u64,
    ) -> Result<(), Self::Error>;
}

/// Why a kernel was not launched, before the device was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Arguments are not those of the manifest.
    #[error("{kernel}: {why}")]
    Arguments {
        /// Name of the kernel.
        kernel: String,
        /// What is wrong with them.
        why: String,
    },
    /// Memory is shorter than what the kernel would touch.
    #[error("{what} has {got} bytes where {want} are needed")]
    TooSmall {
        /// Name of the memory.
        what: &'static str,
        /// Its bytes.
        got: u64,
        /// Bytes that it must have.
        want: u64,
    },
    /// Sizes that the references refuse too.
    #[error(transparent)]
    Pages(#[from] PagesError),
}

impl Refused {
    /// A stable name, for reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Arguments { .. } => "Arguments",
            Self::TooSmall { .. } => "TooSmall",
            Self::Pages(_) => "Pages",
        }
    }
}

/// The direction of a kernel that has a counterpart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the KV cache to a section, from rank-verbatim to canonical order, from numbers to levels.
    Pack,
    /// Back.
    Unpack,
}

/// One argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Address that the device reaches.
    Pointer(u64),
    /// 4 bytes.
    U32(u32),
    /// 8 bytes.
    U64(u64),
}

impl Value {
    fn kind(self) -> ArgumentType {
        match self {
            Self::Pointer(_) => ArgumentType::Pointer,
            Self::U32(_) => ArgumentType::U32,
            Self::U64(_) => ArgumentType::U64,
        }
    }

    /// Its bytes from the start of a word, as a driver reads them through a pointer.
    fn word(self) -> u64 {
        match self {
            Self::Pointer(word) | Self::U64(word) => word,
            Self::U32(number) => {
                let mut word = [0; 8];
                word[..4].copy_from_slice(&number.to_ne_bytes());
                u64::from_ne_bytes(word)
            }
        }
    }
}

/// Words that hold the arguments of an entry. An error names the argument that the manifest does not have.
pub fn words(entry: &Entry, arguments: &[(&str, Value)]) -> Result<Vec<u64>, Refused> {
    let wrong = |why: String| Refused::Arguments {
        kernel: entry.name.clone(),
        why,
    };
    if arguments.len() != entry.arguments.len() {
        return Err(wrong(format!(
            "{} arguments were given, it takes {}",
            arguments.len(),
            entry.arguments.len()
        )));
    }
    let both = entry.arguments.iter().zip(arguments);
    for (at, (wanted, (name, value))) in both.enumerate() {
        if wanted.name != *name {
            return Err(wrong(format!(
                "argument {at} is {}, not {name}",
                wanted.name
            )));
        }
        if wanted.kind != value.kind() {
            let (is, given) = (wanted.kind, value.kind());
            return Err(wrong(format!("{name} is a {is:?}, not a {given:?}")));
        }
    }
    Ok(arguments.iter().map(|(_, value)| value.word()).collect())
}

/// Address of memory of the device that has at least `want` bytes.
fn address<D: Device>(
    device: &D,
    what: &'static str,
    memory: &D::Memory,
    want: u64,
) -> Result<u64, D::Error> {
    match device.range(memory)? {
        (_, got) if got < want => Err(Refused::TooSmall { what, got, want }.into()),
        (address, _) => Ok(address),
    }
}

/// The same as an argument.
fn pointer<D: Device>(
    device: &D,
    what: &'static str,
    memory: &D::Memory,
    want: u64,
) -> Result<Value, D::Error> {
    address(device, what, memory, want).map(Value::Pointer)
}
