//! ETags of recently read objects: if one turns out to be corrupt, exactly that version is removed, and none written since then.

use parking_lot::Mutex;
use std::collections::VecDeque;

/// Number of remembered reads: more than can be in flight or have their digests computed.
const MOST: usize = 1_024;

/// ETags of read objects, the latest at the end.
#[derive(Debug, Default)]
pub struct Tags(Mutex<VecDeque<(String, Option<String>)>>);

impl Tags {
    /// Records a read of this version. A response without an ETag may come from a proxy instead of the object.
    pub fn read(&self, key: &str, etag: Option<&str>) {
        let mut tags = self.0.lock();
        if tags.len() >= MOST {
            tags.pop_front();
        }
        tags.push_back((key.to_string(), etag.map(str::to_string)));
    }

    /// The ETag of the version that was read last under the key, if it is remembered.
    pub fn last(&self, key: &str) -> Option<String> {
        let tags = self.0.lock();
        let found = tags.iter().rev().find(|(read, _)| read == key);
        found.and_then(|(_, etag)| etag.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_read_of_a_name_counts_and_only_so_many_are_remembered() {
        let tags = Tags::default();
        for (key, etag) in [("a", Some("1")), ("b", Some("2")), ("a", Some("3"))] {
            tags.read(key, etag);
        }
        assert_eq!(tags.last("a").as_deref(), Some("3"));
        assert_eq!(tags.last("b").as_deref(), Some("2"));
        assert_eq!(tags.last("c"), None);
        tags.read("b", None);
        assert_eq!(tags.last("b"), None);
        for n in 0..MOST {
            tags.read("c", Some(&n.to_string()));
        }
        assert_eq!((tags.last("a"), tags.0.lock().len()), (None, MOST));
    }
}
