//! The files of `reconcile/` import each other in one direction, and its pure files have no clock and no cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Product code by file: `plan/pods`; a folder's `mod.rs` has the folder's name.
fn files() -> BTreeMap<String, String> {
    let mut files = BTreeMap::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/reconcile");
    read(&root, "reconcile", &mut files);
    files
}

fn read(folder: &Path, name: &str, files: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_str().unwrap();
        if path.is_dir() {
            read(&path, &format!("{name}/{stem}"), files);
        } else if stem != "tests" {
            let text = fs::read_to_string(&path).unwrap();
            let product = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            let file = match stem {
                "mod" => name.to_owned(),
                stem => format!("{name}/{stem}"),
            };
            files.insert(file, product.to_owned());
        }
    }
}

/// The files that each file imports. A name that is no file is one of its folder's `mod.rs`.
fn imports(files: &BTreeMap<String, String>) -> BTreeMap<&str, BTreeSet<&str>> {
    let find = |folder: &str, name: &str| {
        let file = files.get_key_value(&format!("{folder}/{name}"));
        file.or_else(|| files.get_key_value(folder))
            .map(|(file, _)| &**file)
    };
    let of = |(file, text): (&'_ String, &String)| {
        let parent = file.rsplit_once('/').map_or("", |(parent, _)| parent);
        let paths = [
            ("\nmod ", &**file),
            ("super::", parent),
            ("crate::reconcile::", "reconcile"),
        ];
        let found = paths.iter().flat_map(|(prefix, folder)| {
            let names = text.split(prefix).skip(1).flat_map(first_names);
            names.filter_map(move |name| find(folder, name))
        });
        found.filter(|found| found != file).collect()
    };
    files.iter().map(|entry| (&**entry.0, of(entry))).collect()
}

/// `a::b` and `{a, b::c}` begin with these names.
fn first_names(path: &str) -> impl Iterator<Item = &str> {
    let group = path.strip_prefix('{').and_then(|p| p.split('}').next());
    let names = group.unwrap_or_else(|| path.split([',', ';']).next().unwrap());
    names.split(',').filter_map(|name| {
        let letter = |c: char| c.is_alphanumeric() || c == '_';
        name.trim().split(|c| !letter(c)).next()
    })
}

#[test]
fn no_import_cycles() {
    let files = files();
    let mut left = imports(&files);
    assert!(left["reconcile/session"].contains("reconcile/plan"));
    assert!(left["reconcile/plan"].contains("reconcile/plan/pods"));
    loop {
        let before = left.len();
        let there: BTreeSet<&str> = left.keys().copied().collect();
        left.retain(|_, imports| !imports.is_disjoint(&there));
        let imported: BTreeSet<&str> = left.values().flatten().copied().collect();
        left.retain(|file, _| imported.contains(file));
        if left.len() == before {
            break;
        }
    }
    let circle: Vec<&str> = left.into_keys().collect();
    assert!(circle.is_empty(), "in a circle: {circle:?}");
}

#[test]
fn the_parts_of_a_pass_import_only_earlier_parts() {
    let files = files();
    let imports = imports(&files);
    for (file, imports) in &imports {
        let folder = |name: &str| {
            imports
                .iter()
                .any(|i| i.starts_with(&format!("reconcile/{name}")))
        };
        let part = file.trim_start_matches("reconcile/");
        let forbidden: &[&str] = match part.split('/').next().unwrap() {
            "reconcile" | "session" => &[],
            "act" => &["plan", "session"],
            "plan" => &["act", "session"],
            _ => &["act", "plan", "session"],
        };
        for name in forbidden {
            assert!(!folder(name), "{file} imports {name}");
        }
    }
}

#[test]
fn planning_is_pure() {
    for (file, text) in files() {
        let pure = ["applied", "plan", "report", "step"];
        let part = file.trim_start_matches("reconcile/").split('/').next();
        if part.is_some_and(|part| pure.contains(&part)) {
            for word in ["async ", ".await", "Client", "::now()"] {
                assert!(!text.contains(word), "{file}: {word}");
            }
        }
    }
}
