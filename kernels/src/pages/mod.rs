//! Pages of a KV cache: gathered into sections, scattered back, brought into an order that any number of ranks reads, and keys turned to
//! other positions. Each is the reference of a kernel in `kernels/cuda` and what runs on hosts without a GPU.
//! Not here: what bytes mean beyond their place (codecs), where sections are kept, threads.
//!
//! A *section* is what one rank keeps of a group of KV layers for some blocks: `[block][plane][bytes]`, as in the connector. Its digest is
//! the protocol's xxh3-128 over these bytes; there is none of its own here.

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
