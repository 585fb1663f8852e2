//! `export-connector`: writes the Python package, its metadata (by which vLLM finds the plugin) and its settings into one folder.

use include_dir::{Dir, File, include_dir};
use rustix::fs::{CWD, RenameFlags, renameat_with};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

static PACKAGE: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/connector/kvcachepool");
const NAME: &str = "kvcachepool";
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What the connector does when the user configured another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExistingConnector {
    /// Keep the other connector; the cache is off and reports why.
    Refuse,
    /// Add kvcachepool beside it (only prefill/decode transports; other caches are always refused).
    Compose,
}

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Folder to add to PYTHONPATH; created if missing. The connector expects the sidecar's socket in it.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// What the connector does if vLLM has another KV connector; written to settings.json.
    #[arg(long, value_enum, default_value = "refuse")]
    existing_connector: ExistingConnector,
}

pub fn main(args: &Args) -> Result<ExitCode, String> {
    write(&args.folder, args.existing_connector).map_err(|e| e.to_string())?;
    println!("{}", args.folder.join(NAME).display());
    println!("start vLLM with PYTHONPATH={}", args.folder.display());
    Ok(ExitCode::SUCCESS)
}

#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}", path.display())]
pub struct ExportError {
    path: PathBuf,
    /// The kernel's error.
    pub source: std::io::Error,
}

/// Writes package, metadata and settings. Files with the right content are not touched.
pub fn write(folder: &Path, existing: ExistingConnector) -> Result<(), ExportError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ExportError { path, source }
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let package = folder.join(NAME);
    place(&package, &python_files()).map_err(failed(&package))?;
    let info = folder.join(format!("{NAME}-{VERSION}.dist-info"));
    place(&info, &metadata()).map_err(failed(&info))?;
    for (_, other) in versions(folder).into_iter().filter(|(v, _)| v != VERSION) {
        // Metadata of another version would register the plugin twice.
        remove(&other).map_err(failed(&other))?;
    }
    let settings = folder.join("settings.json");
    let value = match existing {
        ExistingConnector::Refuse => "Refuse",
        ExistingConnector::Compose => "Compose",
    };
    let text = serde_json::json!({ "existingConnector": value }).to_string() + "\n";
    place_file(&settings, text.as_bytes()).map_err(failed(&settings))
}

/// Versions of the connector whose metadata is in a folder, with their paths.
pub fn versions(folder: &Path) -> Vec<(String, PathBuf)> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let rest = name.strip_prefix(NAME)?.strip_prefix('-')?;
            Some((rest.strip_suffix(".dist-info")?.to_owned(), entry.path()))
        })
        .collect()
}

/// The package's files by relative path: sources and data, without caches and tests.
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
            matches!(kind, Some("py" | "json" | "ptx" | "typed")) && !file.path().iter().any(cached)
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

/// Makes `folder` hold exactly these files, in one step: an importing process sees the old set or the new one. Byte code of a running
/// Python is ignored, and a folder with the right content is not touched.
fn place(folder: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    if holds(folder, files) {
        return Ok(());
    }
    let fresh = beside(folder);
    let placed = write_files(&fresh, files).and_then(|()| swap(&fresh, folder));
    // Removes the old files, or a partial set of new ones: a full disk must not stay fuller.
    remove(&fresh).and(placed)
}

fn write_files(folder: &Path, files: &BTreeMap<PathBuf, Vec<u8>>) -> std::io::Result<()> {
    remove(folder)?;
    for (path, bytes) in files {
        let path = folder.join(path);
        std::fs::create_dir_all(path.parent().unwrap_or(folder))?;
        std::fs::write(path, bytes)?;
    }
    Ok(())
}

/// Exchanges `fresh` and `folder`.
fn swap(fresh: &Path, folder: &Path) -> std::io::Result<()> {
    if !folder.exists() {
        return std::fs::rename(fresh, folder);
    }
    match renameat_with(CWD, fresh, CWD, folder, RenameFlags::EXCHANGE) {
        Ok(()) => Ok(()),
        // A file system without exchange: the folder is missing for a moment.
        Err(_) => {
            remove(folder)?;
            std::fs::rename(fresh, folder)
        }
    }
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
    let placed = std::fs::write(&fresh, bytes).and_then(|()| std::fs::rename(&fresh, path));
    remove(&fresh).and(placed)
}

/// A name in the same folder that no other process uses.
fn beside(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}.{}.new", std::process::id()))
}

/// Removes a file or a folder with its content, if it exists.
fn remove(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(path).or_else(|e| match e.kind() {
        std::io::ErrorKind::NotADirectory => std::fs::remove_file(path),
        _ => Err(e),
    }) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sources_and_data_are_exported() {
        let files = python_files();
        for file in ["__init__.py", "layouts.json", "kernels.json", "pages.ptx"] {
            assert!(files.contains_key(Path::new(file)), "{file}");
        }
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
