//! What is done to KV bytes on their way between vLLM's pages, the arena and the lower tiers: page transfers, layout changes, RoPE
//! re-positioning and codecs on the CPU. The pages and CacheGen are also GPU kernels (`cuda/*.cu`), of which the functions here are the
//! references; `launch` checks what they are given.
//!
//! No I/O, no threads, no state: bytes in, bytes out.

pub mod codec;
mod lanes;
pub mod launch;
pub mod manifest;
mod number;
pub mod pages;
