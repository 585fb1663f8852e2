//! Tiers below memory: one trait for all of them, and the same layers around each. Bytes move between the arena and disk or socket
//! without an intermediate copy. The engine decides what is looked up, fetched and written.

// Modules in `testing` are also included by other crates, so they use this crate's name.
#[cfg(test)]
extern crate self as kvcachepool_tiers;

mod census;
mod clock;
mod directory;
pub mod disk;
mod error;
mod files;
pub mod filesystem;
mod info;
pub mod layers;
mod mode;
mod open;
mod prefix;
mod raw;
pub mod redis;
pub mod s3;
mod span;
mod sweep;
mod tags;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tls;
mod work;
mod writes;

pub use error::TierError;
pub use info::{Reading, Server, TierInfo};
pub use kvcachepool_engine::tier::{Cause, Kind, Status, Stored};
pub use open::{Opening, configured};
pub use span::{Running, Span};
pub use sweep::{PAGE, PASSES_MAX, Pages, Source, Swept, Whose, clear, sweep, sweep_all};
pub use writes::Writes;

use kvcachepool_protocol::object::{Object, ObjectName};
use std::borrow::Cow;
use std::fmt;
use std::pin::Pin;

/// A running operation of a tier. Dropping it gives up the result, but its writes may go on: see [`Span`].
pub type Operation<'a, T> = Pin<Box<dyn Future<Output = Result<T, TierError>> + Send + 'a>>;

/// A section, and the place of its stored bytes in the arena.
#[derive(Debug, Clone)]
pub struct Place {
    pub group: u32,
    /// Shard of the group.
    pub shard: u32,
    /// As long as the section's stored bytes.
    pub span: Span,
}

#[derive(Debug, Clone)]
pub struct Get {
    pub name: ObjectName,
    /// The wanted sections and their places; other sections of the object are not read.
    pub places: Vec<Place>,
}

#[derive(Debug, Clone)]
pub struct Put {
    /// The header: the object's name, and the length and digests of every section.
    pub object: Object,
    /// One span per section of the header, in its order.
    pub spans: Vec<Span>,
}

/// Content of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Objects; 0 if the tier cannot count them.
    pub objects: u64,
    /// Bytes used for the objects.
    pub bytes: u64,
    /// Capacity in bytes; 0 if the server decides it.
    pub capacity_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: ObjectName,
    pub bytes: u64,
    /// Write time, Unix seconds.
    pub written_unix_s: u64,
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// In the tier's own order.
    pub objects: Vec<Listed>,
    /// Foreign names in the tier's place.
    pub foreign: u64,
    /// Token of the next page; `None` after the last.
    pub next: Option<String>,
    /// The error of the first name that could not be inspected; the page lacks such names.
    pub unread: Option<TierError>,
}

/// Objects to remove, by how they are known.
#[derive(Debug, Clone, Copy)]
pub enum Removal<'a> {
    /// Objects with these names, whoever wrote them. Names without an object are no error and are not counted.
    Named(&'a [ObjectName]),
    /// Objects of a recent listing. An object that another process removed since then may be counted.
    Listed(&'a [Listed]),
    /// An object that was read and cannot be used. If the tier can distinguish versions, a newer one is kept.
    Unusable(&'a ObjectName),
}

impl<'a> Removal<'a> {
    pub fn names(self) -> Cow<'a, [ObjectName]> {
        match self {
            Self::Named(names) => Cow::Borrowed(names),
            Self::Listed(listed) => listed.iter().map(|listed| listed.name.clone()).collect(),
            Self::Unusable(name) => Cow::Borrowed(std::slice::from_ref(name)),
        }
    }

    pub fn count(self) -> usize {
        match self {
            Self::Named(names) => names.len(),
            Self::Listed(listed) => listed.len(),
            Self::Unusable(_) => 1,
        }
    }
}

/// A place for objects. Every operation may be called from many tasks at once, and operations are independent: one that hangs or fails
/// does not delay the others. An object exists completely or not at all, whichever process dies.
///
/// No method has a default: a layer that does not forward one fails to compile.
pub trait Tier: Send + Sync + fmt::Debug {
    /// Properties of the tier, known since it was opened.
    fn info(&self) -> &TierInfo;

    /// Whether each object exists, in order of the names. If each lookup costs a request, many names are treated as a prefix: after a
    /// missing name the rest counts as missing, and names between two existing ones count as existing. A get is exact.
    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>>;

    /// The header of an object. [`Cause::Missing`]: it does not exist.
    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object>;

    /// Reads sections into their places and returns the header. The places hold the sections' bytes only after `Ok`, otherwise arbitrary
    /// bytes. The header has the requested name (otherwise [`Cause::Foreign`]), and every place is as long as its section.
    fn get(&self, get: Get) -> Operation<'_, Object>;

    /// Writes an object. After `Ok` it is as durable as the tier; after an error no part of it is visible.
    fn put(&self, put: Put) -> Operation<'_, Stored>;

    /// Removes objects. Returns the number of removed objects.
    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64>;

    /// The tier's content.
    fn usage(&self) -> Operation<'_, Usage>;

    /// At most `limit` objects after the page token `from`; `None` starts from the beginning.
    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page>;
}
