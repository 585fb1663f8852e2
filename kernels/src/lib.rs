//! What is done to KV bytes on their way between vLLM's pages, the arena and the lower tiers. Every function here is the reference of a
//! GPU kernel, and what runs where there is no GPU. That of digests is `object::digest` of the protocol.
//!
//! No I/O, no threads, no state: bytes in, bytes out.

pub mod codec;
mod lanes;
pub mod manifest;
mod number;
pub mod pages;
