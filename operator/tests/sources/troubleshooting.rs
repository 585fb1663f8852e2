//! docs/guides/troubleshooting.md explains every reason that the operator gives. The tables between its markers come from the enums:
//! `UPDATE_DOCS=1 cargo test -p kvcachepool-operator troubleshooting` writes them.

use kvcachepool_operator::{api, inject, status};
use std::collections::HashSet;
use std::fs;

const PAGE: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../docs/guides/troubleshooting.md"
);

/// The reasons of a table, with their sentences.
fn reasons(table: &str) -> Vec<(&'static str, &'static str)> {
    let accepted = api::Reason::ALL.iter().map(|r| (r.name(), r.sentence()));
    let conditions = status::Reason::ALL.iter().map(|r| (r.name(), r.sentence()));
    let injection = inject::Reason::ALL.iter().map(|r| (r.name(), r.sentence()));
    let shortfalls = inject::Shortfall::ALL
        .iter()
        .map(|r| (r.name(), r.sentence()));
    match table {
        "injection" => injection.collect(),
        "shortfalls" => shortfalls.collect(),
        "conditions" => accepted.chain(conditions).collect(),
        other => panic!("no reasons are called {other}"),
    }
}

fn table(name: &str) -> String {
    let rows = reasons(name).into_iter();
    let rows =
        rows.map(|(name, sentence)| format!("| `{name}` | {} |\n", sentence.replace('|', "\\|")));
    format!(
        "| reason | what it means and what to do |\n|---|---|\n{}",
        rows.collect::<String>()
    )
}

/// The page with every table as the code has it.
fn filled(page: &str) -> String {
    let mut parts = page.split("<!-- reasons: ");
    let mut out = parts.next().unwrap().to_owned();
    for part in parts {
        let (name, rest) = part.split_once(" -->").unwrap();
        let (_, rest) = rest.split_once("<!-- end -->").unwrap();
        out += &format!(
            "<!-- reasons: {name} -->\n{}<!-- end -->{rest}",
            table(name)
        );
    }
    out
}

#[test]
fn the_page_explains_every_reason() {
    let page = fs::read_to_string(PAGE).unwrap();
    let filled = filled(&page);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(PAGE, &filled).unwrap();
    }
    let page = fs::read_to_string(PAGE).unwrap();
    assert!(
        page == filled,
        "docs/guides/troubleshooting.md is outdated; run this test with UPDATE_DOCS=1"
    );
    for table in ["injection", "shortfalls", "conditions"] {
        assert!(
            page.contains(&format!("<!-- reasons: {table} -->")),
            "the table {table} is not in the page"
        );
    }
}

#[test]
fn each_reason_has_one_meaning() {
    for table in ["injection", "shortfalls", "conditions"] {
        let mut names = HashSet::new();
        for (name, sentence) in reasons(table) {
            assert!(names.insert(name), "{name} is twice in {table}");
            assert!(
                sentence.ends_with('.'),
                "{name}: its text must be a sentence"
            );
            assert!(!sentence.contains('\n'));
        }
    }
}
