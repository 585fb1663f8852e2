//! `kubectl kvcachepool`: shows the state of pools, and explains why a pod is not cached.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvcachepool_operator::plugin::main()
}
