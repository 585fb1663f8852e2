//! Launchers of the GPU kernels. Each checks that its buffers hold everything that the kernel touches, so that a launch is safe.
//! `cuda/*.cu` describes the arguments; the reference functions of this crate take the same ones and give the same results.
//!
//! This module contains no driver. A [`Device`] provides memory, streams and launches.
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

/// A GPU with the kernels of the [manifest](crate::manifest) loaded.
///
/// # Safety
/// - [`Device::upload`] returns memory of this device with all of the bytes, aligned to 256 bytes.
/// - [`Device::range`] returns an address that the device can read and write for as many bytes as it says. The address of a
///   [`Device::Memory`] does not change while it lives.
/// - [`Device::Memory`] is freed only after all kernels that were launched before have run.
/// - [`Device::launch`] runs the named kernel with these arguments on the grid of the manifest, and refuses a stream of another device.
pub unsafe trait Device {
    type Memory;
    /// An in-order queue of work.
    type Stream;
    type Error: From<Refused>;

    /// Allocates memory and copies `bytes` into it.
    fn upload(&self, bytes: &[u8]) -> Result<Self::Memory, Self::Error>;

    /// Address and length of memory. Fails for memory of another device, because this device's kernels could write to it.
    fn range(&self, memory: &Self::Memory) -> Result<(u64, u64), Self::Error>;

    /// Queues a kernel with arguments by name, in the manifest's order. `of` returns the amount of work.
    ///
    /// # Safety
    /// Every pointer is to device memory that is as large as what the kernel touches with these arguments, and that lives until the kernel
    /// has finished.
    unsafe fn launch(
        &self,
        stream: &Self::Stream,
        kernel: &str,
        arguments: &[(&str, Value)],
        of: impl Fn(Count) -> u64,
    ) -> Result<(), Self::Error>;
}

/// Why a launch was refused before it reached the device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The arguments do not match the manifest.
    #[error("{kernel}: {why}")]
    Arguments { kernel: String, why: String },
    /// A buffer is shorter than what the kernel would touch.
    #[error("{what} has {got} bytes, but {want} are needed")]
    TooSmall {
        /// Name of the buffer.
        what: &'static str,
        /// Its length in bytes.
        got: u64,
        /// The required length in bytes.
        want: u64,
    },
    /// Sizes that the reference functions refuse too.
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

/// Which of a kernel and its inverse to launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// KV cache to section, rank-verbatim to canonical order, or numbers to levels.
    Pack,
    /// The inverse.
    Unpack,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value {
    /// Device address.
    Pointer(u64),
    U32(u32),
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

/// Words with the arguments of an entry. An error names the argument that does not match the manifest.
pub fn words(entry: &Entry, arguments: &[(&str, Value)]) -> Result<Vec<u64>, Refused> {
    let wrong = |why: String| Refused::Arguments {
        kernel: entry.name.clone(),
        why,
    };
    if arguments.len() != entry.arguments.len() {
        return Err(wrong(format!(
            "{} arguments were given, expected {}",
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

/// The address of device memory with at least `want` bytes.
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

/// The address as an argument.
fn pointer<D: Device>(
    device: &D,
    what: &'static str,
    memory: &D::Memory,
    want: u64,
) -> Result<Value, D::Error> {
    address(device, what, memory, want).map(Value::Pointer)
}
