//! Builds the program once and runs kernels with it.

use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// One argument of a kernel.
pub enum Argument<'a> {
    Number(u64),
    /// Bytes at an address this far beyond a multiple of 64.
    Buffer(&'a [u8], u64),
}

/// Shape of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    pub grid: [u32; 2],
    pub block: [u32; 2],
}

/// The program.
pub fn host() -> &'static Path {
    static HOST: OnceLock<PathBuf> = OnceLock::new();
    HOST.get_or_init(|| built(&std::env::var_os("CXX").unwrap_or("g++".into())))
}

/// The program of these very sources: its name has their hash, so that it is built once.
fn built(compiler: &OsStr) -> PathBuf {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources: Vec<PathBuf> = ["cuda", "tests/emulated"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(crate_folder.join(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension != "rs"))
        .collect();
    sources.sort();
    let digest = sources.iter().fold(Sha256::new(), |digest, path| {
        digest.chain_update(std::fs::read(path).unwrap())
    });
    let hash: String = digest.finalize()[..8]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("kernels-{hash}"));
    if !program.exists() {
        // Under a name of its own until it is whole: other test processes may look for it.
        let unfinished = program.with_extension(std::process::id().to_string());
        let built = Command::new(compiler)
            // As in the flags of nvcc: no fused multiply-add. CUDA sources are C++ to this compiler.
            .args([
                "-std=c++17",
                "-O1",
                "-ffp-contract=off",
                "-fno-strict-aliasing",
            ])
            // A device reads only aligned words, so the emulation traps on others.
            .args(["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"])
            .args(["-Wno-unknown-pragmas", "-o"])
            .args([&unfinished, &crate_folder.join("tests/emulated/host.cpp")])
            .output()
            .expect("install it: apt-get install g++");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
        std::fs::rename(&unfinished, &program).unwrap();
    }
    program
}

/// Runs a kernel; the bytes of all buffers afterwards, in order.
pub fn run(host: &Path, kernel: &str, launch: Launch, arguments: &[Argument<'_>]) -> Vec<Vec<u8>> {
    let shape = launch
        .grid
        .into_iter()
        .chain(launch.block)
        .map(|n| n.to_string());
    let mut child = Command::new(host)
        .arg(kernel)
        .args(shape)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = Vec::new();
    for argument in arguments {
        let (head, bytes): ([u64; 3], &[u8]) = match argument {
            Argument::Number(number) => ([0, *number, 0], &[]),
            Argument::Buffer(bytes, beyond) => ([1, bytes.len() as u64, *beyond], bytes),
        };
        input.extend(head.iter().flat_map(|word| word.to_ne_bytes()));
        input.extend_from_slice(bytes);
    }
    child.stdin.take().unwrap().write_all(&input).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(
        done.status.success(),
        "{kernel}: {}: {}",
        done.status,
        String::from_utf8_lossy(&done.stderr)
    );
    let mut rest = done.stdout.as_slice();
    let mut buffers = Vec::new();
    for argument in arguments {
        if let Argument::Buffer(bytes, _) = argument {
            let (buffer, behind) = rest.split_at(bytes.len());
            buffers.push(buffer.to_vec());
            rest = behind;
        }
    }
    buffers
}
