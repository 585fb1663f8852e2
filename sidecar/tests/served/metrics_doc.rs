//! `docs/reference/metrics.md` names every metric that the code exports, with type, labels and help, and no other. `UPDATE_DOCS=1` rewrites it.

use kvcachepool_metrics::Metric;
use kvcachepool_sidecar::admin::metrics::{CORE, SHELL};
use kvcachepool_sidecar::remote::REMOTE;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/metrics.md");

fn rows(title: &str, metrics: &[Metric]) -> String {
    let head = format!("\n## {title}\n\n| metric | type | labels | what |\n|---|---|---|---|\n");
    head + &metrics.iter().map(Metric::doc_row).collect::<String>()
}

#[test]
fn the_page_lists_what_the_code_exports() {
    let page = std::fs::read_to_string(FILE).unwrap();
    let marker = "<!-- generated from the code: UPDATE_DOCS=1 cargo test -p kvcachepool-sidecar metrics_doc -->";
    let (head, listed) = page.split_once(marker).unwrap();
    let (tokens, process) = (
        rows("Tokens, chunks and sessions", CORE),
        rows("The process, its socket and its config", SHELL),
    );
    let remote = rows("Remote access (`kvcachepool-sidecar serve`)", REMOTE);
    let wanted = format!("\n{tokens}{process}{remote}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(FILE, format!("{head}{marker}{wanted}")).unwrap();
        return;
    }
    assert_eq!(listed, wanted, "run it with UPDATE_DOCS=1");
}
