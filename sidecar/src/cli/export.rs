//! `export-connector`: the Python package, its metadata (by which vLLM finds the plugin) and its settings, into one folder.

use include_dir::{Dir, File, include_dir};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

static PACKAGE: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/connector/kvcachepool");
const NAME: &str = "kvcachepool";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What the connector does where the user configured another one.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum ExistingConnector {
    /// Leave it alone; the cache is off, by name.
    Refuse,
    /// Put ours beside it (prefill/decode transports only; other caches are always refused).
    Compose,
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder that goes onto PYTHONPATH; made where it is missing. The sidecar's socket is looked for in it.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// Written to settings.json.
    #[arg(long, value_enum, default_value = "refuse")]
    existing_connector: ExistingConnector,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    let folder = &args.folder;
    let failed = |what: &Path| {
        let what = what.display().to_string();
        move |e: std::io::Error| format!("{what}: {e}")
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let package = folder.join(NAME);
    place(&package, &python_files()).map_err(failed(&package))?;
    let info = folder.join(format!("{NAME}-{VERSION}.dist-info"));
    place(&info, &metadata()).map_err(failed(&info))?;
    remove_other_versions(folder, &info).map_err(failed(folder))?;
    let settings = folder.join("settings.json");
    let value = match args.existing_connector {
        ExistingConnector::Refuse => "Refuse",
        ExistingConnector::Compose => "Compose",
    };
    let text = serde_json::json!({ "existingConnector": value }).to_string() + "\n";
    place_file(&settings, text.as_bytes()).map_err(failed(&settings))?;
    println!("{}", package.display());
    println!("start vLLM with PYTHONPATH={}", folder.display());
    Ok(ExitCode::SUCCESS)
}

/// Files by path below the package: sources and data, no caches and no tests.
fn python_files() -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk<'a>(dir: &'a Dir<'a>, files: &mut Vec<&'a File<'a>>) {
        files.extend(dir.files());
        dir.dirs().for_each(|dir| walk(dir, files));
    }
    let mut files = Vec::new();
    walk(&PACKAGE, &mut files);
    files
        .into_iter()
        .filter(|file| {
            let cached = |part: &std::ffi::OsStr| part == "__pycache__" || part == "tests";
            let kind = file.path().extension().and_then(|e| e.to_str());
            matches!(kind, Some("py" | "json" | "typed")) && !file.path().iter().any(cached)
        })
        .map(|file| (file.path().to_owned(), file.contents().to_vec()))
        .collect()
}

fn metadata() -> BTreeMap<PathBuf, Vec<u8>> {
    let info = format!("{NAME}-{VERSION}.dist-info");
    let mut files = BTreeMap::from([
        (
            "METADATA".into(),
            format!(
                "Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n\
                 Summary: vLLM connector of the kvcachepool sidecar\nLicense: Apache-2.0\nRequires-Python: >=3.10\n"
            ),
        ),
        (
            "entry_points.txt".into(),
            format!("[vllm.general_plugins]\n{NAME} = {NAME}.plugin:register\n"),
        ),
        ("INSTALLER".into(), "kvcachepool-sidecar\n".to_owned()),
    ]);
    let mut record: Vec<String> = python_files()
        .keys()
        .map(|path| format!("{NAME}/{},,", path.display()))
        .collect();
    record.extend(
        files
            .keys()
            .map(|path: &PathBuf| format!("{info}/{},,", path.display())),
    );
    record.push(format!("{info}/RECORD,,\n"));
    files.insert("RECORD".into(), record.join("\n"));
    files
        .into_iter()
        .map(|(path, text)| (path, text.into_bytes()))
        .collect()
}

/// Makes `folder` hold exactly these files, in one step: whoever imports from it sees the old set or the new one. Byte code of a
/// running Python counts as nothing, and a folder that is right already is not touched.
fn place(folder: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    if holds(folder, files) {
        return Ok(());
    }
    let fresh = beside(folder);
    remove(&fresh)?;
    for (path, bytes) in files {
        let path = fresh.join(path);
        std::fs::create_dir_all(path.parent().unwrap_or(&fresh))?;
        std::fs::write(path, bytes)?;
    }
    if !folder.exists() {
        return std::fs::rename(&fresh, folder);
    }
    match renameat_with(CWD, &fresh, CWD, folder, RenameFlags::EXCHANGE) {
        Ok(()) => {}
        // A file system that cannot exchange: a moment without the folder.
        Err(_) => {
            remove(folder)?;
            std::fs::rename(&fresh, folder)?;
        }
    }
    remove(&fresh)
}

fn holds(folder: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) -> bool {
    let same = files
        .iter()
        .all(|(path, bytes)| std::fs::read(folder.join(path)).is_ok_and(|found| found == *bytes));
    let extra = std::fs::read_dir(folder).is_ok_and(|entries| {
        entries.flatten().any(|entry| {
            let name = PathBuf::from(entry.file_name());
            name != Path::new("__pycache__") && !files.keys().any(|path| path.starts_with(&name))
        })
    });
    same && !extra
}

fn place_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(());
    }
    let fresh = beside(path);
    std::fs::write(&fresh, bytes)?;
    std::fs::rename(fresh, path)
}

/// A name in the same folder that no other process uses.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.new", std::process::id()))
}

fn remove(folder: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

/// Metadata of another version would register the plugin twice.
fn remove_other_versions(folder: &Path, keep: &Path) -> std::io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let ours = name.starts_with(&format!("{NAME}-")) && name.ends_with(".dist-info");
        if ours && path != keep {
            remove(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_and_data_are_exported() {
        let files = python_files();
        assert!(files.contains_key(Path::new("__init__.py")));
        assert!(
            files
                .keys()
                .all(|p| !p.to_string_lossy().contains("__pycache__"))
        );
    }

    #[test]
    fn a_folder_that_is_right_is_not_touched_and_a_wrong_one_is_replaced_whole() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("p");
        let files = BTreeMap::from([(PathBuf::from("a.py"), b"1".to_vec())]);
        place(&folder, &files).unwrap();
        std::fs::create_dir(folder.join("__pycache__")).unwrap();
        place(&folder, &files).unwrap();
        assert!(folder.join("__pycache__").exists(), "not touched");
        std::fs::write(folder.join("gone.py"), "old").unwrap();
        place(&folder, &files).unwrap();
        assert!(!folder.join("gone.py").exists());
        assert_eq!(
            std::fs::read_dir(root.path()).unwrap().count(),
            1,
            "no leftovers"
        );
    }
}
