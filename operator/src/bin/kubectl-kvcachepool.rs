//! `kubectl kvcachepool`: what a pool does, and why a pod is not cached.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvcachepool_operator::plugin::main()
}
