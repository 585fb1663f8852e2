//! Which object was read last under a name: where it turns out to be corrupt, that very one is removed, and none that was written since.

use parking_lot::Mutex;
use std::collections::VecDeque;

/// Reads that are remembered: more than can be under way at once, and their digests made.
const MOST: usize = 1_024;

/// ETags of what was read, the last one at the end.
#[derive(Debug, Default)]
pub struct Tags(Mutex<VecDeque<(String, String)>>);

impl Tags {
    /// This object lay under the key.
    pub fn read(&self, key: &str, etag: &str) {
        let mut tags = self.0.lock();
        if tags.len() >= MOST {
            tags.pop_front();
        }
        tags.push_back((key.to_string(), etag.to_string()));
    }

    /// The object that was read last under the key, as far as that is remembered.
    pub fn last(&self, key: &str) -> Option<String> {
        let tags = self.0.lock();
        let found = tags.iter().rev().find(|(read, _)| read == key);
        found.map(|(_, etag)| etag.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_read_of_a_name_counts_and_only_so_many_are_remembered() {
        let tags = Tags::default();
        for (key, etag) in [("a", "1"), ("b", "2"), ("a", "3")] {
            tags.read(key, etag);
        }
        assert_eq!(tags.last("a").as_deref(), Some("3"));
        assert_eq!(tags.last("b").as_deref(), Some("2"));
        assert_eq!(tags.last("c"), None);
        for n in 0..MOST {
            tags.read("c", &n.to_string());
        }
        assert_eq!((tags.last("a"), tags.0.lock().len()), (None, MOST));
    }
}
