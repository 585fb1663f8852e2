//! Existence markers of another tier's objects: small values under keys derived from the object keys.

use super::fault::Fault;
use super::many::{Answers, Lost};
use super::pool::Lent;
use super::resp::Reply;
use super::{Redis, objects};
use crate::{Operation, directory};
use kvcachepool_protocol::object::ObjectName;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Separates an object's name from the location of its tier.
const SIGN: &str = ":at:";
/// A marker expires after a week without a write or a read of its object.
const LIVES_MS: &[u8] = b"604800000";

/// Whether a key is that of a marker.
pub fn is_mark(key: &str) -> bool {
    key.contains(SIGN)
}

/// Markers of one tier's objects.
#[derive(Debug)]
pub struct Marks {
    redis: Redis,
    /// Suffix of all keys.
    end: Arc<str>,
}

impl Marks {
    /// `place` identifies the tier: all its users pass the same text.
    pub fn new(redis: Redis, place: &str) -> Self {
        let end = format!("{SIGN}{:016x}", xxh3_64(place.as_bytes())).into();
        Self { redis, end }
    }

    fn keys(&self) -> impl Fn(&[ObjectName]) -> Vec<String> + Clone + Send + 'static {
        let end = self.end.clone();
        move |names| names.iter().map(|name| name.redis() + &end).collect()
    }

    fn change(&self, names: &[ObjectName], change: Change) -> Operation<'_, ()> {
        let (names, keys) = (names.to_vec(), self.keys());
        let batch = move |mut c: Lent, names: Vec<ObjectName>| {
            let keys = keys(&names);
            async move { change.of(&mut c, &keys).await }
        };
        self.redis.apart(|now| async move {
            let changed = now.each(names, Lost::IsAnError, batch).await;
            changed.map(drop)
        })
    }
}

#[derive(Debug, Clone, Copy)]
enum Change {
    Mark,
    Unmark,
}

impl Change {
    async fn of(self, c: &mut Lent, keys: &[String]) -> Answers {
        for key in keys {
            match self {
                Self::Mark => c.command(&[b"SET", key.as_bytes(), b"", b"PX", LIVES_MS]),
                Self::Unmark => c.command(&[b"DEL", key.as_bytes()]),
            }
        }
        let mut answers = Vec::with_capacity(keys.len());
        for _ in keys {
            answers.push(match c.optional().await? {
                Reply::Error(text) => Err(Fault::Refused(text)),
                _ => Ok(true),
            });
        }
        Ok(answers)
    }
}

impl directory::Marks for Marks {
    fn marked<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, Vec<bool>> {
        let (names, keys) = (names.to_vec(), self.keys());
        let batch = move |mut c: Lent, names: Vec<ObjectName>| {
            let keys = keys(&names);
            async move { objects::exist(&mut c, &keys).await }
        };
        self.redis
            .apart(|now| now.each(names, Lost::IsAbsent, batch))
    }

    fn mark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()> {
        self.change(names, Change::Mark)
    }

    fn unmark<'a>(&'a self, names: &'a [ObjectName]) -> Operation<'a, ()> {
        self.change(names, Change::Unmark)
    }
}
