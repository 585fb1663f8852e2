//! The binary `kvcachepool-sidecar`.

/// The supervisor configures it through the environment of the engine process that it starts.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    kvcachepool_sidecar::cli::main()
}
