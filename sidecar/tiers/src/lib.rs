//! Tiers below memory: one trait for all of them, and around every tier the same layers in one order.
//! Bytes go between the arena and disk or socket, nothing is kept on the way. What is looked up, fetched and written down is
//! decided by the engine; here it is only done.

// What lies in `testing` names this crate as other crates do, which include it, too.
#[cfg(test)]
extern crate self as kvcachepool_tiers;

mod directory;
pub mod disk;
mod error;
mod info;
pub mod layers;
mod open;
mod raw;
pub mod redis;
pub mod s3;
mod span;
mod sweep;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod tls;
mod work;

pub use error::TierError;
pub use info::{Reading, Server, TierInfo};
pub use kvcachepool_engine::tier::{Cause, Kind, Status, Stored};
pub use open::{Opening, configured};
pub use span::{Running, Span};
pub use sweep::{PAGE, PASSES_MAX, Pages, Source, Swept, Whose, clear, sweep, sweep_all};

use kvcachepool_protocol::object::{Object, ObjectName};
use std::borrow::Cow;
use std::fmt;
use std::pin::Pin;

/// What a tier's operation is while it runs. Dropping it gives up the answer and proves nothing about its writes: see [`Span`].
pub type Operation<'a, T> = Pin<Box<dyn Future<Output = Result<T, TierError>> + Send + 'a>>;

/// A section and where its stored bytes lie or shall lie.
#[derive(Debug, Clone)]
pub struct Place {
    /// KV group.
    pub group: u32,
    /// Shard of the group.
    pub shard: u32,
    /// As long as the section's stored bytes.
    pub span: Span,
}

/// An object to read.
#[derive(Debug, Clone)]
pub struct Get {
    /// Which.
    pub name: ObjectName,
    /// The sections that are wanted, and where they go; others of the object are left where they are.
    pub places: Vec<Place>,
}

/// An object to write.
#[derive(Debug, Clone)]
pub struct Put {
    /// Its head: names the object, and the length and digests of every section.
    pub object: Object,
    /// Every section of the head, in its order.
    pub spans: Vec<Span>,
}

/// What a tier holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Objects; 0 where the tier cannot count them.
    pub objects: u64,
    /// Their bytes, as the tier is charged for them.
    pub bytes: u64,
    /// Most bytes that it may hold; 0 = it decides that itself.
    pub capacity_bytes: u64,
}

/// An object of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Which.
    pub name: ObjectName,
    /// Its bytes.
    pub bytes: u64,
    /// When it was written, Unix seconds.
    pub written_unix_s: u64,
}

/// A part of a listing.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// In the tier's own order.
    pub objects: Vec<Listed>,
    /// Names in our place that are none of ours.
    pub foreign: u64,
    /// Where to go on; none = this was the last.
    pub next: Option<String>,
}

/// Which objects to remove, and how they are known.
#[derive(Debug, Clone, Copy)]
pub enum Removal<'a> {
    /// Objects of these names, whoever wrote them. Names that are not there are no error and do not count.
    Named(&'a [ObjectName]),
    /// Objects that a listing has just told of. One that somebody else removed since may count.
    Listed(&'a [Listed]),
    /// An object that was read here and cannot be used. Where the tier can tell them apart, one that was written since stays.
    Unusable(&'a ObjectName),
}

impl<'a> Removal<'a> {
    /// The names of all.
    pub fn names(self) -> Cow<'a, [ObjectName]> {
        match self {
            Self::Named(names) => Cow::Borrowed(names),
            Self::Listed(listed) => listed.iter().map(|listed| listed.name.clone()).collect(),
            Self::Unusable(name) => Cow::Borrowed(std::slice::from_ref(name)),
        }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        match self {
            Self::Named(names) => names.len(),
            Self::Listed(listed) => listed.len(),
            Self::Unusable(_) => 1,
        }
    }
}

/// A place for objects. Every operation may be called from any number of tasks at once, and each ends on its own: one that hangs or
/// fails holds up no other. An object is there whole or not at all, whatever dies when.
///
/// No method has a default: what a layer around a tier does not hand on is a compile error.
pub trait Tier: Send + Sync + fmt::Debug {
    /// What is known of it since it was opened.
    fn info(&self) -> &TierInfo;

    /// Is each of these there? One answer per name, in order. Where each question costs a request, many names are taken for a prefix:
    /// behind one that is not there others count as not there, and one between two that are there as there. A get knows better.
    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>>;

    /// The head of an object. [`Cause::Missing`]: it is not there.
    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object>;

    /// Reads sections into their places and returns the head. Only when it is `Ok` do the places hold the sections' bytes; else they
    /// hold anything. The head is of the name that was asked for ([`Cause::Foreign`] else), and every place is as long as its section.
    fn get(&self, get: Get) -> Operation<'_, Object>;

    /// Writes an object. When it ends, the object is durable as far as the tier is; when it fails, none is visible.
    fn put(&self, put: Put) -> Operation<'_, Stored>;

    /// Removes objects. Returns how many were removed.
    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64>;

    /// What it holds.
    fn usage(&self) -> Operation<'_, Usage>;

    /// Objects from `from` on (where an earlier page ended; none = the first), at most `limit`.
    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page>;
}
