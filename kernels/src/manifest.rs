//! GPU kernels as PTX (`ptx/*.ptx`, built from `cuda/*.cu` by `tools/ptx.sh`) and how each is launched (`ptx/manifest.json`). Whoever
//! launches them, Rust or the connector, reads the same file.
//!
//! Every kernel walks all of its work in strides of the grid: any grid and block shape with as many `x` threads as given here is right, and
//! the rules only say which is fast.

use serde::Deserialize;
use std::collections::BTreeMap;

/// The file.
pub const MANIFEST_JSON: &str = include_str!("../ptx/manifest.json");

/// Thread blocks that a grid may have in any dimension.
const GRID_MAX: u64 = 65_535;

/// All modules.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Version of the file's format.
    pub version: u32,
    /// Version of nvcc.
    pub compiler: String,
    /// What nvcc was called with. No fused multiply-add: results are those of the references, bit for bit.
    pub flags: Vec<String>,
    /// Version of PTX, which a driver must know: 8.0 is that of CUDA 12.0.
    pub ptx_version: String,
    /// One per file of PTX.
    pub modules: Vec<Module>,
}

/// One file of PTX.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// `NAME.ptx`, from `NAME.cu`.
    pub name: String,
    /// SHA-256 of the PTX.
    pub ptx_sha256: String,
    /// SHA-256 of each file in `cuda` that it is built from.
    pub sources: BTreeMap<String, String>,
    /// Its kernels.
    pub entries: Vec<Entry>,
}

/// One kernel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Name of the symbol.
    pub name: String,
    /// In order; the source says what each means.
    pub arguments: Vec<Argument>,
    /// Thread blocks in `x` and `y`.
    pub grid: [Axis; 2],
    /// Threads of a block in `x` and `y`.
    pub block: [u32; 2],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

/// One argument of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Argument {
    /// As in the source.
    pub name: String,
    /// How it is passed.
    #[serde(rename = "type")]
    pub kind: ArgumentType,
}

/// How an argument is passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArgumentType {
    /// Address that the device reaches, 8 bytes.
    Pointer,
    /// 4 bytes.
    U32,
    /// 8 bytes.
    U64,
}

/// How many thread blocks a dimension of the grid has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Axis {
    /// What is shared out.
    pub count: Count,
    /// How many of them one thread block takes.
    pub per_block: u64,
}

/// What thread blocks share among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Count {
    /// Nothing: 1.
    One,
    /// Planes times blocks.
    Pieces,
    /// Bytes of the longest piece.
    PieceBytes,
    /// Runs of a layout change: the product of its loops' extents.
    Runs,
    /// States of keys.
    States,
    /// Tokens of all planes, each of which is quantised by its largest number.
    Rows,
    /// Channels of all planes, each of which has a table.
    Channels,
    /// Streams of an arithmetic coder.
    Streams,
}

impl Manifest {
    /// The manifest of this build.
    pub fn load() -> Result<Self, serde_json::Error> {
        serde_json::from_str(MANIFEST_JSON)
    }

    /// A kernel and its module, by the kernel's name.
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
    /// The grid for work of which `of` says how much there is: at least 1, at most what a device takes.
    pub fn grid_of(&self, of: impl Fn(Count) -> u64) -> [u32; 2] {
        self.grid.map(|axis| {
            let blocks = of(axis.count).div_ceil(axis.per_block.max(1));
            blocks.clamp(1, GRID_MAX) as u32
        })
    }
}
