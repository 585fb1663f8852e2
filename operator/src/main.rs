//! The operator's binary.

fn main() -> std::process::ExitCode {
    kvcachepool_operator::cli::main()
}
