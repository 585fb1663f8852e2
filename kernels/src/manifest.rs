//! GPU kernels as PTX (`ptx/*.ptx`, built from `cuda/*.cu` by `tools/ptx.sh`) and their launch parameters (`ptx/manifest.json`). Rust and
//! the connector read the same file.
//!
//! Every kernel walks its work in grid strides. Any grid and block shape with the given number of `x` threads is correct; the rules here
//! only choose a fast one.

use serde::Deserialize;
use std::collections::BTreeMap;

pub const MANIFEST_JSON: &str = include_str!("../ptx/manifest.json");

/// Maximum number of thread blocks in a grid dimension.
const GRID_MAX: u64 = 65_535;

/// The content of `ptx/manifest.json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the manifest's format.
    pub version: u32,
    pub compiler: String,
    /// Arguments of nvcc. Fused multiply-add is disabled, so that results equal those of the references, bit for bit.
    pub flags: Vec<String>,
    /// Version of PTX. A driver must support it: 8.0 needs CUDA 12.0.
    pub ptx_version: String,
    pub modules: Vec<Module>,
}

/// One PTX file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// `NAME.ptx`, built from `NAME.cu`.
    pub name: String,
    pub ptx_sha256: String,
    /// SHA-256 of each source file in `cuda`.
    pub sources: BTreeMap<String, String>,
    pub entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Symbol name.
    pub name: String,
    /// In the order of the kernel's signature. The source describes each.
    pub arguments: Vec<Argument>,
    /// Thread blocks in `x` and `y`.
    pub grid: [Axis; 2],
    /// Threads of a block in `x` and `y`.
    pub block: [u32; 2],
    /// Dynamic shared memory per block, in bytes.
    pub shared_bytes: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    /// Name in the source.
    pub name: String,
    #[serde(rename = "type")]
    pub kind: ArgumentType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentType {
    /// Device address, 8 bytes.
    Pointer,
    U32,
    U64,
}

/// The number of thread blocks in one grid dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// The unit of work.
    pub count: Count,
    /// Units of work per thread block.
    pub per_block: u64,
}

/// The unit of work that is divided among thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Count {
    /// Always 1.
    One,
    /// Planes times blocks.
    Pieces,
    /// Bytes of the longest piece.
    PieceBytes,
    /// Runs of a layout change: the product of its loops' extents.
    Runs,
    States,
    /// Tokens of all planes. Each is quantised by its largest magnitude.
    Rows,
    /// Channels of all planes. Each has a table.
    Channels,
    /// Streams of the arithmetic coder.
    Streams,
}

impl Manifest {
    /// Parses the manifest of this build.
    pub fn load() -> Result<Self, serde_json::Error> {
        serde_json::from_str(MANIFEST_JSON)
    }

    /// Finds a kernel and its module by the kernel's name.
    pub fn entry(&self, name: &str) -> Option<(&Module, &Entry)> {
        self.modules
            .iter()
            .flat_map(|module| module.entries.iter().map(move |entry| (module, entry)))
            .find(|(_, entry)| entry.name == name)
    }
}

impl Module {
    /// The PTX of this build.
    pub fn ptx(&self) -> Option<&'static str> {
        match self.name.as_str() {
            "cachegen" => Some(include_str!("../ptx/cachegen.ptx")),
            "layout" => Some(include_str!("../ptx/layout.ptx")),
            "pages" => Some(include_str!("../ptx/pages.ptx")),
            "rope" => Some(include_str!("../ptx/rope.ptx")),
            _ => None,
        }
    }
}

impl Entry {
    /// The grid for an amount of work. Each dimension is at least 1 and at most what a device accepts.
    pub fn grid_of(&self, of: impl Fn(Count) -> u64) -> [u32; 2] {
        self.grid.map(|axis| {
            let blocks = of(axis.count).div_ceil(axis.per_block.max(1));
            blocks.clamp(1, GRID_MAX) as u32
        })
    }
}
