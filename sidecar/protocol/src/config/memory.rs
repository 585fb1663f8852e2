//! The config sections `memory`, `gpu` and `transfer`.

use super::choice::choice;
use super::section::{HOUR_MS, MI, TI, field, section};
use super::{ByteSize, Duration};

section! {
    /// The memory tier.
    #[derive(Debug)]
    Memory {
        /// Size of the memory tier. The container's memory limit must be larger.
        "memory.size" size: ByteSize = ByteSize(4 << 30), Size(64 * MI..=16 * TI), Arena, field("spec.local.memory.perPod").required();
        /// Page size of the memory tier. The node must have reserved the pages.
        "memory.hugePages" huge_pages: HugePages, Choice, Restart, field("spec.local.memory.hugePages");
        /// Order of eviction. S3FIFO uses three FIFO queues and resists scans.
        "memory.evictionPolicy" eviction_policy: EvictionPolicy, Choice, Restart, field("spec.local.memory.evictionPolicy");
        /// When the bytes of a hit are compared with their digest. Always: before the answer, by a check that began after the request arrived.
        /// Background: beside the answer, if the last check is older than verifyAge; changed bytes may be served until then.
        "memory.verify" verify: Verify, Choice, Live;
        /// With Background: age of the last check after which a hit is checked again.
        "memory.verifyAge" verify_age: Duration = Duration::from_ms(60_000), Time(0..=720 * HOUR_MS), Live;
        /// Threads that compute and check digests.
        "memory.verifyThreads" verify_threads: u32 = 2, Count(1..=64), Restart;
        /// Limit for background checks, all together.
        "memory.verifyBytesPerSecond" verify_bytes_per_second: ByteSize = ByteSize(1 << 30), Size(MI..=TI), Restart;
        /// Threads that populate the memory tier's pages before use.
        "memory.populateThreads" populate_threads: u32 = 2, Count(1..=64), Restart;
    }
}

section! {
    /// Memory that GPUs cost the sidecar; 0 without a GPU.
    #[derive(Debug)]
    Gpu {
        /// Container memory that is reserved for CUDA contexts of the sidecar. 0 if it has no GPU.
        "gpu.contextMemory" context_memory: ByteSize, Size(0..=TI), Restart;
    }
}

section! {
    /// Which process copies between vLLM and the memory tier.
    #[derive(Debug)]
    Transfer {
        /// Who copies between vLLM's KV blocks and the memory tier: Engine (vLLM's worker) or CudaWindow (the sidecar, through a window). Auto
        /// is Engine. Read when a worker registers.
        "transfer.mode" mode: TransferMode, Choice, Live, field("spec.sidecar.transfer");
        /// Size of each worker's window.
        "transfer.windowSize" window_size: ByteSize = ByteSize(128 << 20), Size(16 * MI..=16 * 1024 * MI), Live;
    }
}

choice!(
    /// Page size of the arena.
    HugePages {
        #[default]
        None = "None",
        /// 2 MiB pages, which the node must have reserved.
        Size2Mi = "2Mi",
        /// 1 GiB pages, which the node must have reserved.
        Size1Gi = "1Gi",
    }
);

impl HugePages {
    /// Bytes per page. The arena is a multiple of it.
    pub fn page_bytes(self) -> u64 {
        match self {
            Self::None => 4 << 10,
            Self::Size2Mi => 2 << 20,
            Self::Size1Gi => 1 << 30,
        }
    }
}

choice!(
    /// Order of eviction.
    EvictionPolicy {
        /// S3-FIFO: three FIFO queues. Resists scans.
        #[default]
        S3Fifo = "S3FIFO",
        Lru = "LRU",
        Lfu = "LFU",
        Fifo = "FIFO",
    }
);
choice!(
    /// When the bytes of a hit are compared with their digest.
    Verify {
        /// Before the answer, by a check that began after the request arrived.
        #[default]
        Always = "Always",
        /// Concurrently with the answer, if the last check is older than `verifyAge`.
        Background = "Background",
    }
);
choice!(
    /// Which process copies between vLLM's KV blocks and the memory tier.
    TransferMode {
        /// The better mode for the machine. No measurement exists yet, so it is `Engine`.
        #[default]
        Auto = "Auto",
        /// vLLM's worker.
        Engine = "Engine",
        /// The sidecar, through a window that the worker fills and empties.
        CudaWindow = "CudaWindow",
    }
);
