//! Names of objects in the index and the journal: 49 bytes without pointers.

use kvcachepool_protocol::key::{ChunkKey, LayoutId, ModelId};
use kvcachepool_protocol::object::{Fidelity, ObjectName};
use std::cmp::Ordering;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// An [`ObjectName`] in bytes, with the order of its text form.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(C)]
pub struct NameKey {
    model: [u8; 8],
    layout: [u8; 8],
    key: [u8; 32],
    fidelity: u8,
}

impl Ord for NameKey {
    fn cmp(&self, other: &Self) -> Ordering {
        // A single memory comparison: a large index spends its time here.
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for NameKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl NameKey {
    /// `None` if no object can have this name.
    pub fn of(name: &ObjectName) -> Option<Self> {
        Some(Self {
            model: hex8(&name.model)?,
            layout: hex8(&name.layout)?,
            key: name.key.0,
            fidelity: name.fidelity as u8,
        })
    }

    /// The object name. `None` for a fidelity that this build does not know.
    pub fn name(&self) -> Option<ObjectName> {
        let wide = |short: &[u8; 8]| {
            let mut id = [0; 32];
            id[..8].copy_from_slice(short);
            id
        };
        Some(ObjectName {
            model: ModelId(wide(&self.model)).hex16(),
            layout: LayoutId(wide(&self.layout)).hex16(),
            key: ChunkKey(self.key),
            fidelity: Fidelity::numbered(self.fidelity)?,
        })
    }
}

fn hex8(text: &str) -> Option<[u8; 8]> {
    let digits = text.len() == 16 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let value = digits.then(|| u64::from_str_radix(text, 16).ok())??;
    Some(value.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_name_comes_back_and_keeps_its_order(
            a in any::<([u8; 32], [u8; 32], [u8; 32])>(),
            b in any::<([u8; 32], [u8; 32], [u8; 32])>(),
            fidelity in 0..4u8,
        ) {
            let name = |(m, l, k): ([u8; 32], [u8; 32], [u8; 32])| ObjectName {
                model: ModelId(m).hex16(),
                layout: LayoutId(l).hex16(),
                key: ChunkKey(k),
                fidelity: Fidelity::numbered(fidelity).unwrap(),
            };
            let (a, b) = (name(a), name(b));
            let (x, y) = (NameKey::of(&a).unwrap(), NameKey::of(&b).unwrap());
            prop_assert_eq!(x.name().unwrap(), a.clone());
            prop_assert_eq!(x.cmp(&y), a.s3("").cmp(&b.s3("")));
        }
    }

    #[test]
    fn what_is_no_name_has_no_key() {
        for bad in ["", "0123", "+123456789abcde0", "ABCDEF0123456789"] {
            let name = ObjectName {
                model: bad.to_string(),
                layout: "0".repeat(16),
                key: ChunkKey::default(),
                fidelity: Fidelity::Exact,
            };
            assert_eq!(NameKey::of(&name), None, "{bad}");
        }
    }
}
