//! A layer that does the same around every operation.

use crate::{Get, Kind, Operation, Page, Put, Removal, Stored, Tier, TierInfo, Usage};
use kvcachepool_protocol::object::{Object, ObjectName};
use std::fmt;
use std::sync::Arc;

/// Operations of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// [`Tier::lookup`]
    Lookup,
    /// [`Tier::head`]
    Head,
    /// [`Tier::get`]
    Get,
    /// [`Tier::put`]
    Put,
    /// [`Tier::remove`]
    Remove,
    /// [`Tier::usage`]
    Usage,
    /// [`Tier::list`]
    List,
}

impl Op {
    pub const ALL: [Self; 7] = [
        Self::Lookup,
        Self::Head,
        Self::Get,
        Self::Put,
        Self::Remove,
        Self::Usage,
        Self::List,
    ];

    /// Name in metrics and status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lookup => "lookup",
            Self::Head => "head",
            Self::Get => "get",
            Self::Put => "put",
            Self::Remove => "remove",
            Self::Usage => "usage",
            Self::List => "list",
        }
    }

    /// Whether the operation changes the tier's content.
    pub fn writes(self) -> bool {
        matches!(self, Self::Put | Self::Remove)
    }
}

/// Facts about an operation that layers need.
#[derive(Debug, Clone)]
pub struct Asked {
    pub tier: Kind,
    pub op: Op,
    /// Bytes of sections that move between tier and arena.
    pub bytes: u64,
    /// Number of names to remove.
    pub names: usize,
    /// The object, if the operation concerns exactly one.
    pub object: Option<ObjectName>,
}

/// Result of an operation.
pub trait Answer: Send {
    /// Whether the requested bytes moved between tier and arena.
    fn moved(&self) -> bool {
        true
    }
}

impl Answer for Vec<bool> {}
impl Answer for Object {}
impl Answer for u64 {}
impl Answer for Usage {}
impl Answer for Page {}
impl Answer for Stored {
    fn moved(&self) -> bool {
        *self == Self::New
    }
}

/// Behaviour of a layer around an operation.
pub trait Around: Send + Sync + fmt::Debug {
    /// Runs `inner`, or fails in its place. The tier gets no request before `inner` is called, and `inner` is not called before the
    /// operation is first polled.
    fn around<'a, T: Answer + 'a>(
        &'a self,
        asked: Asked,
        inner: impl FnOnce() -> Operation<'a, T> + Send + 'a,
    ) -> Operation<'a, T>;
}

/// A tier with a layer around it.
#[derive(Debug)]
pub struct Layer<A> {
    around: Arc<A>,
    inner: Arc<dyn Tier>,
}

impl<A> Layer<A> {
    pub fn new(around: Arc<A>, inner: Arc<dyn Tier>) -> Self {
        Self { around, inner }
    }

    fn asked(&self, op: Op) -> Asked {
        Asked {
            tier: self.inner.info().kind,
            op,
            bytes: 0,
            names: 0,
            object: None,
        }
    }
}

impl<A: Around> Tier for Layer<A> {
    fn info(&self) -> &TierInfo {
        self.inner.info()
    }

    fn lookup<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let asked = self.asked(Op::Lookup);
        self.around.around(asked, || self.inner.lookup(names))
    }

    fn head<'a>(&'a self, name: &'a ObjectName) -> Operation<'a, Object> {
        let asked = Asked {
            object: Some(name.clone()),
            ..self.asked(Op::Head)
        };
        self.around.around(asked, || self.inner.head(name))
    }

    fn get(&self, get: Get) -> Operation<'_, Object> {
        let asked = Asked {
            bytes: get.places.iter().map(|place| place.span.length).sum(),
            object: Some(get.name.clone()),
            ..self.asked(Op::Get)
        };
        self.around.around(asked, || self.inner.get(get))
    }

    fn put(&self, put: Put) -> Operation<'_, Stored> {
        let asked = Asked {
            bytes: put.spans.iter().map(|span| span.length).sum(),
            object: Some(put.object.name()),
            ..self.asked(Op::Put)
        };
        self.around.around(asked, || self.inner.put(put))
    }

    fn remove<'a>(&'a self, removal: Removal<'a>) -> Operation<'a, u64> {
        let asked = Asked {
            names: removal.count(),
            object: match removal {
                Removal::Unusable(name) => Some(name.clone()),
                Removal::Named(_) | Removal::Listed(_) => None,
            },
            ..self.asked(Op::Remove)
        };
        self.around
            .around(asked, move || self.inner.remove(removal))
    }

    fn usage(&self) -> Operation<'_, Usage> {
        let asked = self.asked(Op::Usage);
        self.around.around(asked, || self.inner.usage())
    }

    fn list<'a>(&'a self, from: Option<&'a str>, limit: usize) -> Operation<'a, Page> {
        let asked = self.asked(Op::List);
        self.around
            .around(asked, move || self.inner.list(from, limit))
    }
}
