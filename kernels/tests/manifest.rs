//! The manifest says of every kernel what its PTX and its source say, and that they belong together.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use kvcachepool_kernels::manifest::{Argument, ArgumentType, Count, Entry, Manifest, Module};
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::path::PathBuf;

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn modules() -> Vec<Module> {
    Manifest::load().unwrap().modules
}

fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn source(module: &Module) -> String {
    let file = format!("{}.cu", module.name);
    std::fs::read_to_string(folder("cuda").join(file)).unwrap()
}

/// What stands between `begin` and `end` for every `begin`: what is before the first parenthesis, and the list inside.
fn signatures<'a>(text: &'a str, begin: &str, end: char) -> Vec<(&'a str, Vec<&'a str>)> {
    text.split(begin)
        .skip(1)
        .map(|rest| {
            let signature = rest.split(end).next().unwrap();
            let (name, list) = signature.split_once('(').unwrap();
            let list = list.trim().trim_end_matches(')').split(',');
            (name.trim(), list.map(str::trim).collect())
        })
        .collect()
}

#[test]
fn ptx_has_the_entries_of_the_manifest_with_arguments_of_its_types() {
    for module in modules() {
        let mut found = signatures(module.ptx().unwrap(), ".visible .entry ", '{');
        let mut wanted: Vec<(&str, &[Argument])> = module
            .entries
            .iter()
            .map(|e| (e.name.as_str(), e.arguments.as_slice()))
            .collect();
        found.sort();
        wanted.sort_by_key(|(name, _)| *name);
        assert_eq!(found.len(), wanted.len(), "{}", module.name);
        for ((name, parameters), (entry, arguments)) in found.iter().zip(wanted) {
            assert_eq!(*name, entry);
            let wanted: Vec<String> = arguments
                .iter()
                .enumerate()
                .map(|(i, argument)| {
                    let bits = if argument.kind == ArgumentType::U32 {
                        "u32"
                    } else {
                        "u64"
                    };
                    format!(".param .{bits} {entry}_param_{i}")
                })
                .collect();
            assert_eq!(*parameters, wanted);
        }
    }
}

#[test]
fn sources_have_the_arguments_of_the_manifest_by_name_and_type() {
    for module in modules() {
        let text = source(&module);
        let found = signatures(&text, "extern \"C\" __global__ void ", '{');
        assert_eq!(found.len(), module.entries.len(), "{}", module.name);
        for ((name, parameters), entry) in found.iter().zip(&module.entries) {
            assert_eq!(*name, entry.name);
            let read: Vec<(&str, ArgumentType)> = parameters
                .iter()
                .map(|parameter| {
                    let (kind, name) = parameter.rsplit_once(' ').unwrap();
                    let kind = match kind {
                        "u32" => ArgumentType::U32,
                        "u64" => ArgumentType::U64,
                        pointer if pointer.ends_with('*') => ArgumentType::Pointer,
                        other => panic!("{other} is not an argument's type"),
                    };
                    (name, kind)
                })
                .collect();
            let wanted = entry.arguments.iter().map(|a| (a.name.as_str(), a.kind));
            assert_eq!(read, wanted.collect::<Vec<_>>(), "{name}");
        }
    }
}

#[test]
fn hashes_are_those_of_the_files_and_every_included_file_is_hashed() {
    for module in modules() {
        assert_eq!(
            module.ptx_sha256,
            sha256(module.ptx().unwrap().as_bytes()),
            "{}",
            module.name
        );
        let mut included = BTreeSet::from([format!("{}.cu", module.name)]);
        for (file, hash) in &module.sources {
            let bytes = std::fs::read(folder("cuda").join(file)).unwrap();
            assert_eq!(*hash, sha256(&bytes), "{file}: run tools/ptx.sh build");
            let text = String::from_utf8(bytes).unwrap();
            let names = text
                .lines()
                .filter_map(|line| line.strip_prefix("#include \""));
            included.extend(names.map(|name| name.trim_end_matches('"').to_owned()));
        }
        assert_eq!(
            included,
            module.sources.into_keys().collect(),
            "{}",
            module.name
        );
    }
}

#[test]
fn every_file_of_both_folders_is_in_the_manifest() {
    let files = |name: &str| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder(name)).unwrap();
        entries
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    let sources = modules().into_iter().flat_map(|m| m.sources.into_keys());
    assert_eq!(files("cuda"), sources.collect());
    let mut ptx: BTreeSet<String> = modules()
        .iter()
        .map(|m| format!("{}.ptx", m.name))
        .collect();
    ptx.insert("manifest.json".into());
    assert_eq!(files("ptx"), ptx);
}

#[test]
fn ptx_is_for_the_target_and_version_that_the_manifest_names() {
    let manifest = Manifest::load().unwrap();
    assert_eq!(manifest.version, 1);
    let target = manifest
        .flags
        .iter()
        .find_map(|f| f.strip_prefix("-arch=compute_"))
        .unwrap();
    for module in &manifest.modules {
        let text = module.ptx().unwrap();
        assert!(text.contains(&format!("\n.version {}\n", manifest.ptx_version)));
        assert!(text.contains(&format!("\n.target sm_{target}\n")));
        assert!(
            text.lines()
                .all(|line| !line.contains(".extern") && !line.contains(".local")),
            "{}",
            module.name
        );
    }
}

#[test]
fn grids_cover_the_work_and_stay_within_what_a_device_takes() {
    let manifest = Manifest::load().unwrap();
    let (module, gather): (&Module, &Entry) = manifest.entry("kv_gather").unwrap();
    assert_eq!(module.name, "pages");
    let work = |pieces, bytes| {
        gather.grid_of(|count| match count {
            Count::Pieces => pieces,
            Count::PieceBytes => bytes,
            _ => 1,
        })
    };
    assert_eq!(work(64, 65_536), [64, 4]);
    assert_eq!(work(64, 65_537), [64, 5]);
    assert_eq!(work(0, 0), [1, 1]);
    assert_eq!(work(1 << 40, 1 << 60), [65_535, 65_535]);
    assert!(manifest.entry("kv_nothing").is_none());
    for (_, entry) in manifest
        .modules
        .iter()
        .flat_map(|m| m.entries.iter().map(move |e| (m, e)))
    {
        assert!(entry.block.iter().product::<u32>() <= 1024);
        assert!(
            entry.block[0].is_multiple_of(32),
            "{}: whole warps",
            entry.name
        );
    }
}
