//! Bytes of KV per token and chunk of a model, and what a pool holds of it. The input is the text of the model's Hugging Face `config.json`;
//! the module reads no files. `model` turns the config into layers, `report` computes sizes with the rules of the layout table, the section
//! plan and the arena, and `text` formats them. `kvcachepool-sidecar size` and `kubectl kvcachepool size` share [`Flags`] and [`Report`].

mod fields;
mod model;
mod report;
mod state;
mod text;

pub use report::{Group, Prompt, Report, TierSize};

#[cfg(feature = "cli")]
use crate::config::ConfigError;
use crate::config::{ByteSize, Config};
use crate::domain::BadPlan;

/// What to compute sizes for.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "cli", derive(clap::Args))]
pub struct Flags {
    /// Prompt length, to report what one prompt needs.
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000_000)))]
    pub tokens: Option<u64>,
    /// Tensor parallel size of vLLM.
    #[cfg_attr(feature = "cli", arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024)))]
    pub tp: u32,
    /// Type of KV values, as vLLM's --kv-cache-dtype.
    #[cfg_attr(
        feature = "cli",
        arg(long, value_name = "TYPE", value_enum, default_value_t = KvDtype::Auto)
    )]
    pub dtype: KvDtype,
    /// Tokens of a block, as vLLM's --block-size.
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", default_value_t = BLOCK_TOKENS, value_parser = clap::value_parser!(u32).range(1..=65_536)))]
    pub block_size: u32,
    /// Minimum tokens of a chunk. Default: cache.chunkTokens.
    #[cfg_attr(feature = "cli", arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536)))]
    pub chunk_tokens: Option<u32>,
    /// Size of the memory tier, to report what it holds.
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", value_parser = memory_size))]
    pub memory: Option<ByteSize>,
    /// Size of the disk tier, to report what it holds.
    #[cfg_attr(feature = "cli", arg(long, value_name = "SIZE", value_parser = disk_size))]
    pub disk: Option<ByteSize>,
}

/// A value of `memory.size`.
#[cfg(feature = "cli")]
fn memory_size(text: &str) -> Result<ByteSize, ConfigError> {
    let (config, _) = Config::parse(&format!("memory.size: {text:?}"), false)?;
    Ok(config.memory.size)
}

/// A value of `disk.size`.
#[cfg(feature = "cli")]
fn disk_size(text: &str) -> Result<ByteSize, ConfigError> {
    let (config, _) = Config::parse(&format!("disk.size: {text:?}"), false)?;
    Ok(config.disk.size)
}

/// vLLM's default block size on GPUs.
pub const BLOCK_TOKENS: u32 = 16;

impl Flags {
    /// The sizes of a model, from the text of its `config.json`. Tiers and chunk length that no flag sets come from `config`; without one, only
    /// tiers with a flag are reported.
    pub fn report(&self, model: &str, config: Option<&Config>) -> Result<Report, SizeError> {
        let model = model::Model::parse(model)?;
        Report::new(&model, self, config)
    }
}

/// The type of a number in KV or state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum KvDtype {
    /// The model's type, or what its quantization names for KV.
    Auto,
    Float32,
    Float16,
    Bfloat16,
    /// FP8 of either form.
    Fp8,
}

impl KvDtype {
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Fp8 => "fp8",
        }
    }

    /// Bytes of a number. `Auto` is a type of two bytes.
    fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Auto | Self::Float16 | Self::Bfloat16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// Why a model has no sizes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("NotAConfig: {0}; give the config.json of a Hugging Face model")]
    NotAConfig(String),
    #[error(
        "MissingField: the config of {model} lacks {field}. Add it, or write a config with every field: \
         python3 -c \"from transformers import AutoConfig; print(AutoConfig.from_pretrained('MODEL').to_json_string(use_diff=False))\""
    )]
    MissingField { model: String, field: &'static str },
    #[error("BadField: {field} is {found}; expected {expected}")]
    BadField {
        field: String,
        found: String,
        expected: &'static str,
    },
    #[error(
        "UnknownArchitecture: model_type {0} is not known. If every layer has full attention with KV heads, set model_type to llama in a copy \
         of the config"
    )]
    UnknownArchitecture(String),
    /// The cache is off for the model, and its KV has no simple size.
    #[error("Unsupported: {0}; kvcachepool is off for this model")]
    Unsupported(&'static str),
    #[error(
        "BadTensorParallel: vLLM cannot split {what} of this model over {tp} ranks; choose another --tp"
    )]
    BadTensorParallel { what: String, tp: u32 },
    #[error("BadPlan: {0}; choose another --chunk-tokens, --block-size or --tp")]
    BadPlan(#[from] BadPlan),
    #[error("the layout table of this build is broken: {0}")]
    LayoutTable(String),
}
