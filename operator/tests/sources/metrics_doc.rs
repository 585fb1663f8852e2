//! `docs/reference/operator-metrics.md` names every metric that the operator exports, with type, labels and help, and no other.
//! `UPDATE_DOCS=1` rewrites it.

use kvcachepool_metrics::Metric;
use kvcachepool_operator::metrics::ALL;

const FILE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/reference/operator-metrics.md"
);
const MARKER: &str = "<!-- generated from the code: UPDATE_DOCS=1 cargo test -p kvcachepool-operator metrics_doc -->";

#[test]
fn the_page_lists_what_the_code_exports() {
    let page = std::fs::read_to_string(FILE).unwrap();
    let (head, listed) = page.split_once(MARKER).unwrap();
    let rows: String = ALL.iter().map(Metric::doc_row).collect();
    let wanted = format!("\n\n| metric | type | labels | what |\n|---|---|---|---|\n{rows}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(FILE, format!("{head}{MARKER}{wanted}")).unwrap();
        return;
    }
    assert_eq!(listed, wanted, "run it with UPDATE_DOCS=1");
}
