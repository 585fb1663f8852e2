//! Rebuilds the binary when a file of the embedded connector appears, changes or goes.

fn main() {
    println!("cargo:rerun-if-changed=connector/kvcachepool");
}
