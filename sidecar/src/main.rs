//! The binary `kvcachepool-sidecar`.

fn main() -> std::process::ExitCode {
    kvcachepool_sidecar::cli::main()
}
