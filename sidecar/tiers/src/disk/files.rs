//! Names of the folder's files. Each has exactly one spelling; any other name is foreign.

use super::classes::{SLOTS_MAX, UNIT, slot_bytes};
use kvcachepool_protocol::object::MAX_BYTES;

/// Contains the format of the folder.
pub const FORMAT: &str = "format";
/// Locked by the sidecar that uses the folder.
pub const LOCK: &str = "lock";
/// Created by file systems in their root.
const LOST_FOUND: &str = "lost+found";
/// Written and removed to test the folder.
pub const PROBE: &str = "probe";
/// Most units of a slot, so that sums of bytes cannot overflow.
const UNITS_MAX: u32 = 2 * (MAX_BYTES / UNIT) as u32;
/// Highest number of a container. A file name with a higher one is foreign.
pub const ID_MAX: u32 = u32::MAX / 2;
/// Suffix of unfinished files, which are removed at the next open.
const NEW: &str = ".new";

/// A container file, as its name describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContainerFile {
    pub id: u32,
    pub units: u32,
    pub slots: u32,
}

impl ContainerFile {
    pub fn name(&self) -> String {
        let Self { id, units, slots } = self;
        format!("slots-{id:08x}-{units:08x}-{slots:08x}")
    }

    pub fn bytes(&self) -> u64 {
        u64::from(self.slots) * slot_bytes(self.units)
    }

    fn read(name: &str) -> Option<Self> {
        let mut parts = name.strip_prefix("slots-")?.split('-');
        let mut part = || u32::from_str_radix(parts.next()?, 16).ok();
        let file = Self {
            id: part()?,
            units: part()?,
            slots: part()?,
        };
        // Exactly one spelling is valid.
        let sound = (1..=UNITS_MAX).contains(&file.units)
            && (1..=SLOTS_MAX).contains(&file.slots)
            && file.id <= ID_MAX;
        (sound && file.name() == name).then_some(file)
    }
}

/// Name of the snapshot of a generation: the state when its journal began.
pub fn snapshot_file(generation: u64) -> String {
    format!("snapshot-{generation:016x}")
}

pub fn journal_file(generation: u64) -> String {
    format!("journal-{generation:016x}")
}

fn generation(name: &str, of: fn(u64) -> String) -> Option<u64> {
    let (_, digits) = name.rsplit_once('-')?;
    let number = u64::from_str_radix(digits, 16).ok()?;
    (of(number) == name).then_some(number)
}

/// Meaning of a file name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Name {
    /// A file of the folder itself or of its file system.
    Known,
    Container(ContainerFile),
    Snapshot(u64),
    Journal(u64),
    /// An unfinished file of the tier.
    Unfinished,
    Foreign,
}

impl Name {
    /// Reads a name.
    pub fn read(name: &str) -> Self {
        if matches!(name, "." | ".." | FORMAT | LOCK | LOST_FOUND) {
            Self::Known
        } else if let Some(file) = ContainerFile::read(name) {
            Self::Container(file)
        } else if let Some(number) = generation(name, snapshot_file) {
            Self::Snapshot(number)
        } else if let Some(number) = generation(name, journal_file) {
            Self::Journal(number)
        } else if unfinished(name) {
            Self::Unfinished
        } else {
            Self::Foreign
        }
    }
}

fn unfinished(name: &str) -> bool {
    let finished = name.strip_suffix(NEW);
    name == PROBE || finished.is_some_and(|f| f == FORMAT || generation(f, snapshot_file).is_some())
}

/// Name of a file while it is written.
pub fn new_file(name: &str) -> String {
    format!("{name}{NEW}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_read_back_and_have_one_spelling() {
        let file = ContainerFile {
            id: 0xab,
            units: 2,
            slots: 77,
        };
        assert_eq!(ContainerFile::read(&file.name()), Some(file));
        for bad in [
            "slots-ab-2-4d",
            "slots-000000AB-00000002-0000004d",
            "slots-000000ab-00000000-0000004d",
            "slots-000000ab-00000002-0000004d-0",
            "slots-",
            "slots-ffffffff-00000001-00000001",
            "slots-00000001-ffffffff-00000001",
            "slots-00000001-00000001-ffffffff",
            "lost+found",
        ] {
            assert_eq!(ContainerFile::read(bad), None, "{bad}");
        }
        assert_eq!(generation(&journal_file(9), journal_file), Some(9));
        assert_eq!(generation(&journal_file(9), snapshot_file), None);
        assert_eq!(generation("journal-9", journal_file), None);
    }

    proptest! {
        #[test]
        fn any_name_of_a_container_is_its_own_and_its_bytes_are_countable(
            kind in "slots|snapshot|journal|[a-z]{0,3}", numbers in prop::collection::vec("[0-9a-f]{8}|0000000[0-9a-f]|[0-9a-f]{16}|[+A-Fé]{0,9}", 0..4),
        ) {
            let name = [vec![kind], numbers].concat().join("-");
            match Name::read(&name) {
                Name::Container(file) => {
                    prop_assert_eq!(file.name(), name);
                    prop_assert!(file.bytes() > 0 && file.id <= ID_MAX);
                }
                Name::Snapshot(number) => prop_assert_eq!(snapshot_file(number), name),
                Name::Journal(number) => prop_assert_eq!(journal_file(number), name),
                Name::Known | Name::Unfinished | Name::Foreign => {}
            }
        }
    }
}
