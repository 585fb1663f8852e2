//! Operations on pages of a KV cache: gather into sections, scatter back, reorder for any number of ranks, and rotate keys to other
//! positions. Each function is the reference of a kernel in `kernels/cuda`, and the implementation on hosts without a GPU. Codecs, storage
//! of sections and threads belong elsewhere.
//!
//! A *section* is one rank's part of a group of KV layers for some blocks: `[block][plane][bytes]`, as in the connector. Its digest is the
//! protocol's xxh3-128 over these bytes; this module computes none.

mod error;
mod map;
mod order;
mod rope;
mod shape;
mod transfer;

pub use error::PagesError;
pub use map::{PageMap, Plane};
pub use order::HeadMajor;
pub use rope::{Dtype, Keys, Style, Turn};
pub use shape::BlockShape;

#[cfg(test)]
mod tests;
