//! The memory that a sidecar with a given config needs: the container's memory request, which the sidecar also checks before it populates
//! its arena. See the table in docs/internals/architecture.md.

use super::{Codec, Config, HugePages, TransferMode};
use crate::domain::MAX_PORTABLE_BYTES;
use crate::geometry::Geometry;
use crate::table::Row;

/// Bytes of both processes without an arena: modified code pages, stacks, allocator, connection buffers, the event ring. An idle sidecar
/// uses 2 MiB; the rest is reserved for what peers can make grow (`limits.*`).
const PROCESS_BYTES: u64 = 64 << 20;
/// Bytes per chunk in the engine's index, eviction policy and events. Measured: 490 with 32,000 chunks, 680 with 4,000. Hash tables double
/// when they grow.
pub const CHUNK_BYTES: u64 = 1 << 10;
/// Bytes of kernel memory per arena page, besides the page: 8 for the page table and 9 for the file's tree (measured together: 17.8), and 8
/// more while a dying engine and its successor both map the page.
pub const PAGE_BYTES: u64 = 32;
/// Bytes per object in the index of a disk tier. Measured: 180, and 210 while its table grows.
const DISK_OBJECT_BYTES: u64 = 256;
/// Bytes of the disk tier's volume besides its objects: journals, snapshots and the file system's reserve.
const DISK_SPARE_BYTES: u64 = 1 << 30;
/// Bytes of a tier's threads, connections and requests in flight.
const TIER_BYTES: u64 = 32 << 20;
/// Bytes per S3 request besides its payload buffer: what a connection reads ahead or has queued to send, about 400 KiB.
const S3_REQUEST_BYTES: u64 = 512 << 10;
/// Bytes for packing and unpacking per tier: packed objects in flight, and one unpacked section of each.
pub const PACKING_BYTES: u64 = 256 << 20;
/// Bytes for unpacking, all tiers together, if the codec is `None`. Objects that other pods packed are still read. Fits into every
/// sidecar's spare memory.
pub const UNPACKING_BYTES: u64 = 80 << 20;
/// Bytes for converting between the ranks' layout and that of objects in each direction, all tiers together: for the longest object.
pub const CONVERTING_BYTES: u64 = MAX_PORTABLE_BYTES;
/// Default of `gpu.contextMemory`: container memory for CUDA contexts of a sidecar with a GPU, whatever their number. An estimate, not
/// measured on a GPU.
pub const CONTEXT_BYTES: u64 = 512 << 20;
/// The container's request is a multiple of this.
const REQUEST_BYTES: u64 = 1 << 20;

/// Bytes that the sidecar needs besides an arena with pages of this size: processes, slot table, the engine's copy of its rows, index, and
/// kernel memory for the mapping. Assumes that every row and every chunk record is in use.
pub fn beside_arena(geometry: &Geometry, page_bytes: u64) -> u64 {
    PROCESS_BYTES
        + geometry.table_bytes()
        + u64::from(geometry.rows) * size_of::<Row>() as u64
        + u64::from(geometry.chunks) * CHUNK_BYTES
        + geometry.arena_bytes / page_bytes * PAGE_BYTES
}

/// Maximum number of objects in a disk tier of this capacity: one per MiB, so that small objects do not exceed the requested memory.
pub fn disk_objects_max(capacity_bytes: u64) -> u64 {
    (capacity_bytes >> 20).max(1 << 16)
}

impl Config {
    /// Bytes that the lower tiers need besides the arena.
    fn tiers_bytes(&self) -> u64 {
        let disk = self.disk.path.as_ref();
        let disk =
            disk.map(|_| TIER_BYTES + disk_objects_max(self.disk.size.0) * DISK_OBJECT_BYTES);
        let redis = (!self.redis.urls.is_empty()).then_some(TIER_BYTES);
        let folder = self.file_system.path.as_ref().map(|_| TIER_BYTES);
        let s3_requests = u64::from(self.s3.max_concurrency) * S3_REQUEST_BYTES;
        let s3 = (!self.s3.bucket.is_empty()).then_some(TIER_BYTES.max(s3_requests));
        let packing = match self.write.codec {
            Codec::None => 0,
            _ => PACKING_BYTES,
        };
        let tiers = [disk, redis, folder, s3].into_iter().flatten();
        let tiers: Vec<u64> = tiers.map(|bytes| bytes + packing).collect();
        match tiers.as_slice() {
            [] => 0,
            tiers => tiers.iter().sum::<u64>() + 2 * CONVERTING_BYTES,
        }
    }

    /// Bytes besides the arena that do not grow with it: lower tiers, CUDA contexts, a window.
    pub fn extras_bytes(&self) -> u64 {
        self.tiers_bytes() + self.gpu.context_memory.0 + self.window_bytes()
    }

    /// Bytes of a window in host memory. A window in device memory needs none here, but the kind is not known in advance.
    fn window_bytes(&self) -> u64 {
        match self.transfer.mode {
            TransferMode::CudaWindow => self.transfer.window_size.0,
            TransferMode::Auto | TransferMode::Engine => 0,
        }
    }

    /// Memory request and limit of the container: the arena and everything besides it, in whole MiB. An arena of huge pages counts in
    /// [`Config::container_huge_page_bytes`] instead.
    pub fn container_memory_bytes(&self) -> u64 {
        self.footprint().container_bytes(self.memory.size.0)
    }

    /// What the container's memory depends on besides `memory.size`.
    pub fn footprint(&self) -> Footprint {
        Footprint {
            huge_pages: self.memory.huge_pages,
            index_entries: self.limits.index_entries,
            extras_bytes: self.extras_bytes(),
        }
    }

    /// Size of the disk tier's volume: `disk.size`, and what the tier writes besides its objects.
    pub fn disk_volume_bytes(&self) -> u64 {
        self.disk.size.0 + self.disk.size.0 / 128 + DISK_SPARE_BYTES
    }

    /// Request and limit of the container in huge pages of `memory.hugePages`; 0 without huge pages.
    pub fn container_huge_page_bytes(&self) -> u64 {
        match self.memory.huge_pages {
            HugePages::None => 0,
            pages => self
                .geometry()
                .arena_bytes
                .next_multiple_of(pages.page_bytes()),
        }
    }

    /// Sizes of the arena of this config.
    fn geometry(&self) -> Geometry {
        Geometry::new(0, self.memory.size.0, self.limits.index_entries)
    }
}

/// What the memory of the sidecar's container depends on besides the arena's size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    huge_pages: HugePages,
    index_entries: u32,
    extras_bytes: u64,
}

impl Footprint {
    /// Memory request and limit of the container with an arena of this size, which may have had another size at first: the smallest
    /// segments round it down least.
    pub fn container_bytes(&self, arena_bytes: u64) -> u64 {
        let geometry = Geometry::reserving(0, 0, arena_bytes, self.index_entries);
        let arena = match self.huge_pages {
            HugePages::None => geometry.arena_bytes,
            HugePages::Size2Mi | HugePages::Size1Gi => 0,
        };
        let beside = beside_arena(&geometry, self.huge_pages.page_bytes());
        (arena + beside + self.extras_bytes).next_multiple_of(REQUEST_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ByteSize;

    #[test]
    fn more_requests_to_s3_at_once_are_given_more_memory() {
        let mut config = Config::default();
        assert_eq!(config.tiers_bytes(), 0);
        config.s3.bucket = "kv-cache".into();
        assert_eq!(config.tiers_bytes(), TIER_BYTES + 2 * CONVERTING_BYTES);
        config.s3.max_concurrency = 1;
        assert_eq!(config.tiers_bytes(), TIER_BYTES + 2 * CONVERTING_BYTES);
        config.s3.max_concurrency = 1_024;
        assert_eq!(config.tiers_bytes(), (512 << 20) + 2 * CONVERTING_BYTES);
    }

    #[test]
    fn each_tier_has_room_to_pack() {
        let mut config = Config::default();
        config.write.codec = Codec::Int8;
        assert_eq!(config.tiers_bytes(), 0);
        config.s3.bucket = "kv-cache".into();
        assert_eq!(
            config.tiers_bytes(),
            TIER_BYTES + PACKING_BYTES + 2 * CONVERTING_BYTES
        );
        config.redis.urls = vec!["redis://127.0.0.1".into()];
        assert_eq!(
            config.tiers_bytes(),
            2 * (TIER_BYTES + PACKING_BYTES) + 2 * CONVERTING_BYTES
        );
        config.write.codec = Codec::None;
        assert_eq!(config.tiers_bytes(), 2 * TIER_BYTES + 2 * CONVERTING_BYTES);
    }

    #[test]
    fn a_shared_folder_is_a_tier_like_the_others() {
        let mut config = Config::default();
        config.file_system.path = Some("/mnt/kv".into());
        assert_eq!(config.tiers_bytes(), TIER_BYTES + 2 * CONVERTING_BYTES);
        config.write.codec = Codec::Int8;
        assert_eq!(
            config.tiers_bytes(),
            TIER_BYTES + PACKING_BYTES + 2 * CONVERTING_BYTES
        );
    }

    #[test]
    fn room_for_cuda_contexts_stands_beside_all_else() {
        let mut config = Config::default();
        config.s3.bucket = "kv-cache".into();
        let without = config.container_memory_bytes();
        config.gpu.context_memory = ByteSize(CONTEXT_BYTES);
        assert_eq!(
            config.extras_bytes(),
            TIER_BYTES + 2 * CONVERTING_BYTES + CONTEXT_BYTES
        );
        assert_eq!(config.container_memory_bytes(), without + CONTEXT_BYTES);
    }
}
