//! The binary `kvcachepool-sidecar`.

/// How it works in the engine says the supervisor, which starts it.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> std::process::ExitCode {
    kvcachepool_sidecar::cli::main()
}
