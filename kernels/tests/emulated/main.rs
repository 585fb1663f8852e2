//! The CUDA sources against their references, without a GPU: compiled as C++ and run thread by thread (`host.cpp`). Says that a kernel
//! computes what it should for any grid; nothing about races between threads, or speed.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test"
)]

mod cachegen;
mod host;
mod pages;
mod rope;

#[test]
fn every_kernel_of_the_manifest_is_run_here() {
    let program = include_str!("host.cpp");
    let manifest = kvcachepool_kernels::manifest::Manifest::load().unwrap();
    for entry in manifest.modules.iter().flat_map(|module| &module.entries) {
        assert!(
            program.contains(&format!("{{\"{0}\", {0}}}", entry.name)),
            "{}",
            entry.name
        );
    }
}
