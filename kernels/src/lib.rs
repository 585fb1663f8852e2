//! Transformations of KV bytes between vLLM's pages, the arena and the lower tiers: page transfers, layout changes, RoPE re-positioning and
//! codecs, on the CPU. Pages and CacheGen also exist as GPU kernels (`cuda/*.cu`), with the functions here as references; `launch` checks
//! the kernels' arguments.
//!
//! The crate has no I/O, no threads and no state.

pub mod codec;
mod lanes;
pub mod launch;
pub mod manifest;
mod number;
pub mod pages;
