//! `docs/metrics.md` names every metric that the code exports, with type, labels and help, and no other. `UPDATE_DOCS=1` rewrites it.
#![allow(clippy::unwrap_used, reason = "a test")]

use kvcachepool_sidecar::admin::metrics_table::{CORE, Metric, PREFIX, SHELL};
use std::fmt::Write;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");

fn rows(out: &mut String, title: &str, metrics: &[Metric]) {
    writeln!(
        out,
        "\n## {title}\n\n| metric | type | labels | what |\n|---|---|---|---|"
    )
    .unwrap();
    for m in metrics {
        let kind = format!("{:?}", m.kind).to_lowercase();
        let labels: Vec<String> = m.labels.iter().map(|l| format!("`{l}`")).collect();
        writeln!(
            out,
            "| `{PREFIX}{}` | {kind} | {} | {} |",
            m.name,
            labels.join(", "),
            m.help
        )
        .unwrap();
    }
}

#[test]
fn the_page_lists_what_the_code_exports() {
    let page = std::fs::read_to_string(FILE).unwrap();
    let marker = "<!-- generated from the code: UPDATE_DOCS=1 cargo test -p kvcachepool-sidecar --test metrics_doc -->";
    let (head, listed) = page.split_once(marker).unwrap();
    let mut wanted = String::from("\n");
    rows(&mut wanted, "Tokens, chunks and sessions", CORE);
    rows(&mut wanted, "The process, its socket and its config", SHELL);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(FILE, format!("{head}{marker}{wanted}")).unwrap();
        return;
    }
    assert_eq!(listed, wanted, "run it with UPDATE_DOCS=1");
}
