//! Reports what a test cannot check on this machine.

/// Prints the missing requirement. With `KVCACHEPOOL_REQUIRE=all` that is a failure, as in `tests/conftest.py`.
pub fn skipped(why: &str) {
    let all = std::env::var_os("KVCACHEPOOL_REQUIRE").is_some_and(|what| what == "all");
    assert!(!all, "skipped, and KVCACHEPOOL_REQUIRE is `all`: {why}");
    eprintln!("skipped: {why}");
}
