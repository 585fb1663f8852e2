//! Writes what is generated from the types of the API: the definition in `crds/` and the page `docs/reference/api.md`. With
//! `--check` it only compares, and names what differs.

use kvcachepool_operator::api;
use std::error::Error;
use std::path::Path;
use std::{env, fs};

const ABOUT: &str = "# Generated: cargo run -p kvcachepool-operator --example generate\n";

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let files = [
        (
            "crds/kvcachepool.io_kvcachepools.yaml",
            format!("{ABOUT}{}", serde_yaml::to_string(&api::crd())?),
        ),
        ("docs/reference/api.md", api::reference()),
    ];
    let only_compare = env::args().any(|argument| argument == "--check");
    let mut stale = Vec::new();
    for (name, text) in files {
        let path = root.join(name);
        if !only_compare {
            fs::write(path, text)?;
        } else if fs::read_to_string(path).ok() != Some(text) {
            stale.push(name);
        }
    }
    match stale.as_slice() {
        [] => Ok(()),
        stale => Err(format!(
            "{} differs from the types of the API: run `cargo run -p kvcachepool-operator --example generate`",
            stale.join(", ")
        )
        .into()),
    }
}
