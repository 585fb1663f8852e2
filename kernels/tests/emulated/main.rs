//! The CUDA sources against their references, without a GPU: compiled as C++ and run thread by thread (`host.cpp`). Says that a kernel
//! computes what it should for any grid; nothing about races between threads, or speed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

mod host;
mod pages;
mod quant;
mod rope;
