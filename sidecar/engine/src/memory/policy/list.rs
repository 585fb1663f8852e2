//! Doubly linked lists over entry numbers: every operation is O(1), nodes are allocated once per entry.

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Node {
    before: u32,
    after: u32,
    /// The list that contains the entry; `u8::MAX` = none.
    list: u8,
}

/// Several lists that share their nodes: an entry is in at most one of them.
#[derive(Debug)]
pub struct Lists {
    nodes: Vec<Node>,
    /// (front, back, length) per list.
    ends: Vec<(u32, u32, u32)>,
}

impl Lists {
    /// Creates `count` empty lists (fewer than 255).
    pub fn new(count: u8) -> Self {
        Self {
            nodes: Vec::new(),
            ends: vec![(NONE, NONE, 0); count as usize],
        }
    }

    pub fn len(&self, list: u8) -> u32 {
        self.ends.get(list as usize).map_or(0, |e| e.2)
    }

    /// The list that contains an entry.
    pub fn list_of(&self, entry: u32) -> Option<u8> {
        self.nodes
            .get(entry as usize)
            .map(|n| n.list)
            .filter(|l| *l != u8::MAX)
    }

    /// Moves an entry to the back of a list. The front is taken next.
    pub fn push_back(&mut self, list: u8, entry: u32) {
        self.remove(entry);
        let Some(back) = self.ends.get(list as usize).map(|e| e.1) else {
            return;
        };
        self.link(list, entry, back, NONE);
    }

    /// Moves an entry to the front of a list.
    pub fn push_front(&mut self, list: u8, entry: u32) {
        self.remove(entry);
        let Some(front) = self.ends.get(list as usize).map(|e| e.0) else {
            return;
        };
        self.link(list, entry, NONE, front);
    }

    pub fn pop_front(&mut self, list: u8) -> Option<u32> {
        let front = self
            .ends
            .get(list as usize)
            .map(|e| e.0)
            .filter(|f| *f != NONE)?;
        self.remove(front);
        Some(front)
    }

    /// Removes an entry from its list, if any.
    pub fn remove(&mut self, entry: u32) {
        let Some(node) = self.nodes.get(entry as usize).copied() else {
            return;
        };
        if node.list == u8::MAX {
            return;
        }
        match self.nodes.get_mut(node.before as usize) {
            Some(before) => before.after = node.after,
            None => self.ends[node.list as usize].0 = node.after,
        }
        match self.nodes.get_mut(node.after as usize) {
            Some(after) => after.before = node.before,
            None => self.ends[node.list as usize].1 = node.before,
        }
        self.ends[node.list as usize].2 -= 1;
        self.nodes[entry as usize].list = u8::MAX;
    }

    /// Appends all of list `from` to the back of `to`, in order.
    pub fn append(&mut self, to: u8, from: u8) {
        while let Some(entry) = self.pop_front(from) {
            self.push_back(to, entry);
        }
    }

    fn link(&mut self, list: u8, entry: u32, before: u32, after: u32) {
        let at = entry as usize;
        if self.nodes.len() <= at {
            self.nodes.resize(
                at + 1,
                Node {
                    before: NONE,
                    after: NONE,
                    list: u8::MAX,
                },
            );
        }
        self.nodes[at] = Node {
            before,
            after,
            list,
        };
        match self.nodes.get_mut(before as usize) {
            Some(node) => node.after = entry,
            None => self.ends[list as usize].0 = entry,
        }
        match self.nodes.get_mut(after as usize) {
            Some(node) => node.before = entry,
            None => self.ends[list as usize].1 = entry,
        }
        self.ends[list as usize].2 += 1;
    }
}
