//! Seeds of the fuzzers, `fuzz/seeds`. After an intended change `UPDATE_VECTORS=1 cargo test -p kvcachepool-tiers --lib seed_of_the_fuzzer`
//! rewrites them.

use std::path::Path;

/// Asserts that the stored seed equals the code's output.
pub fn must_be(name: &str, wanted: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fuzz/seeds")
        .join(name);
    if std::env::var_os("UPDATE_VECTORS").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, wanted).unwrap();
    }
    let found = std::fs::read(&path).unwrap_or_default();
    assert!(found == wanted, "{name} is not what the code writes");
}
