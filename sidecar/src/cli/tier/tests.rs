//! The commands over a real folder of the disk tier.

mod redis;
mod s3;

use super::target::{Output, Target};
use super::{Failed, gc, inspect, verify};
use crate::cli::{Cli, Command};
use crate::testing::suite::{Memory, Sample};
use clap::Parser;
use kvcachepool_tiers::Tier;
use kvcachepool_tiers::disk::{Disk, Options};
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// A folder with two domains: objects of seeds 1 (three of them) and 2 (two).
struct Rig {
    folder: TempDir,
    samples: Vec<Sample>,
}

impl Rig {
    fn new() -> Self {
        let samples = [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1)];
        let sample = |(seed, n): (u64, u64)| Sample::new(seed, n, &[5_000 + n, 70_000]);
        let mut rig = Self {
            folder: tempfile::tempdir().unwrap(),
            samples: Vec::new(),
        };
        rig.put(samples.into_iter().map(sample).collect());
        rig
    }

    fn put(&mut self, samples: Vec<Sample>) {
        let memory = Memory::new(16 << 20);
        self.with_disk(async |disk| {
            for sample in &samples {
                disk.put(sample.put(&memory)).await.unwrap();
            }
        });
        self.samples.extend(samples);
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn url(&self) -> String {
        format!("file://{}", self.path().display())
    }

    fn target(&self, output: Output) -> Target {
        Target::new(self.url(), output)
    }

    fn open(&self) -> Disk {
        let began = Instant::now();
        loop {
            match Disk::open(self.path(), 64 << 20, Options::default()) {
                Ok(disk) => return disk,
                Err(e) => assert!(began.elapsed() < Duration::from_secs(30), "{e}"),
            }
        }
    }

    fn with_disk<T>(&self, work: impl AsyncFnOnce(&Disk) -> T) -> T {
        let disk = self.open();
        let runtime = tokio::runtime::Builder::new_current_thread();
        let done = { runtime }.build().unwrap().block_on(work(&disk));
        disk.close();
        done
    }

    fn there(&self) -> Vec<bool> {
        let names: Vec<_> = self.samples.iter().map(Sample::name).collect();
        self.with_disk(async |disk| disk.lookup(&names).await.unwrap())
    }

    /// `model/layout` of sample number `index`.
    fn domain(&self, index: usize) -> String {
        let name = self.samples[index].name();
        format!("{}/{}", name.model, name.layout)
    }

    /// Changes one byte of a section of a sample in its container file.
    fn spoil(&self, index: usize) {
        let wanted = &self.samples[index].bytes[1][..64];
        let entries = std::fs::read_dir(self.path()).unwrap();
        for path in entries.map(|entry| entry.unwrap().path()) {
            let bytes = std::fs::read(&path).unwrap();
            if let Some(at) = bytes.windows(64).position(|window| window == wanted) {
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                file.write_all_at(&[!wanted[7]], at as u64 + 7).unwrap();
                return;
            }
        }
        panic!("the bytes lie in no file");
    }

    fn verify(&self, remove_corrupt: bool, memory: &str) -> (verify::Report, String) {
        let args = verify::Args {
            target: self.target(Output::Text),
            remove_corrupt,
            memory: memory.parse().unwrap(),
        };
        unless_in_use(|| {
            let mut out = Vec::new();
            let report = verify::print(&args, &mut out).map_err(|e| e.to_string())?;
            Ok((report, String::from_utf8(out).unwrap()))
        })
        .unwrap()
    }

    fn gc(&self, which: &[&str]) -> Result<(gc::Report, String), String> {
        unless_in_use(|| self.gc_once(which))
    }

    fn gc_once(&self, which: &[&str]) -> Result<(gc::Report, String), String> {
        let mut line = vec!["kvcachepool-sidecar", "gc"];
        let url = self.url();
        line.push(&url);
        line.extend(which);
        let parsed = Cli::try_parse_from(line).map_err(|e| e.to_string())?;
        let crate::cli::Command::Gc(args) = parsed.command else {
            panic!("it is gc");
        };
        let mut out = Vec::new();
        let report = gc::print(&args, &mut out).map_err(|e| e.to_string())?;
        Ok((report, String::from_utf8(out).unwrap()))
    }

    fn inspect(&self, objects: bool, output: Output) -> String {
        unless_in_use(|| {
            let (target, mut out) = (self.target(output), Vec::new());
            let args = inspect::Args { target, objects };
            inspect::print(&args, &mut out).map_err(|e| e.to_string())?;
            Ok(String::from_utf8(out).unwrap())
        })
        .unwrap()
    }
}

/// Once more while the folder is in use: a process that another test is starting holds its lock until it has become another program.
fn unless_in_use<T>(work: impl Fn() -> Result<T, String>) -> Result<T, String> {
    let began = Instant::now();
    loop {
        match work() {
            Err(e) if e.contains("InUse") && began.elapsed() < Duration::from_secs(30) => {}
            done => return done,
        }
    }
}

/// What a command line prints.
fn printed(line: &[&str]) -> Result<String, String> {
    let line = ["kvcachepool-sidecar"]
        .into_iter()
        .chain(line.iter().copied());
    let parsed = Cli::try_parse_from(line).map_err(|e| e.to_string())?;
    let mut out = Vec::new();
    let done = match parsed.command {
        Command::Inspect(args) => inspect::print(&args, &mut out),
        Command::Verify(args) => verify::print(&args, &mut out).map(drop),
        Command::Gc(args) => gc::print(&args, &mut out).map(drop),
        _ => panic!("it looks into a tier"),
    };
    done.map_err(|e| e.to_string())?;
    Ok(String::from_utf8(out).unwrap())
}

fn documents(text: &str) -> Vec<Value> {
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn inspect_sums_objects_by_domain() {
    let rig = Rig::new();
    let text = rig.inspect(false, Output::Text);
    assert!(text.starts_with("disk: 5 objects, "), "{text}");
    assert!(!text.contains("foreign name"), "{text}");
    for (index, objects) in [(0, "3"), (3, "2")] {
        let line = text
            .lines()
            .find(|line| line.starts_with(&rig.domain(index)));
        assert_eq!(
            line.unwrap().split_whitespace().nth(1),
            Some(objects),
            "{text}"
        );
    }
    let documents = documents(&rig.inspect(false, Output::Json));
    assert_eq!(documents.len(), 1);
    let report = &documents[0];
    assert_eq!(
        (&report["tier"], &report["objects"]),
        (&"disk".into(), &5.into())
    );
    assert!(report["used_bytes"].as_u64() >= report["bytes"].as_u64());
    let domains = report["domains"].as_array().unwrap();
    let objects: BTreeMap<_, _> = domains
        .iter()
        .map(|d| {
            (
                d["domain"].as_str().unwrap(),
                d["objects"].as_u64().unwrap(),
            )
        })
        .collect();
    let expected = [(rig.domain(0), 3), (rig.domain(3), 2)];
    let expected: BTreeMap<_, _> = expected.iter().map(|(d, n)| (d.as_str(), *n)).collect();
    assert_eq!(objects, expected);
}

#[test]
fn inspect_prints_what_heads_say() {
    let rig = Rig::new();
    let text = rig.inspect(true, Output::Text);
    let documents = documents(&rig.inspect(true, Output::Json));
    assert_eq!(documents.len(), 6, "five objects and the summary");
    for sample in &rig.samples {
        let name = sample.name().s3("");
        assert!(text.contains(&name), "{text}");
        let row = documents.iter().find(|d| d["object"] == name.as_str());
        let head = &row.unwrap()["head"];
        assert_eq!(head["tokens"], sample.object.tokens);
        assert_eq!(head["engine"], "vllm");
        assert_eq!(head["sections"][1]["bytes"], 70_000);
    }
}

#[test]
fn inspect_counts_what_is_none_of_ours_and_leaves_it() {
    let rig = Rig::new();
    let foreign = rig.path().join("thesis.docx");
    std::fs::write(&foreign, "mine").unwrap();
    let text = rig.inspect(false, Output::Text);
    assert!(text.contains("1 foreign name, left alone"), "{text}");
    let (report, text) = rig.verify(true, "1Mi");
    assert_eq!((report.ok, report.foreign_names), (5, 1), "{text}");
    assert_eq!(std::fs::read(&foreign).unwrap(), b"mine");
}

#[test]
fn verify_reads_everything_in_as_much_memory_as_it_may_have() {
    let mut rig = Rig::new();
    // What fits beside a part of a larger one.
    rig.put((0..8).map(|n| Sample::new(3, n, &[100])).collect());
    // From one section at a time, by one and a part of the next, to all of them at once; then too little for the larger ones.
    let sizes = (72..=1024).step_by(20).map(|kib| format!("{kib}Ki"));
    for memory in sizes {
        let (report, text) = rig.verify(false, &memory);
        assert_eq!((report.objects, report.ok), (13, 13), "{memory}: {text}");
        let lengths = rig.samples.iter().flat_map(|s| &s.bytes).map(Vec::len);
        assert_eq!(report.bytes, lengths.sum::<usize>() as u64);
    }
    let (report, text) = rig.verify(false, "16Ki");
    assert_eq!((report.ok, report.failed), (8, 5), "{text}");
    assert!(text.contains("--memory 72Ki"), "{text}");
}

#[test]
fn verify_names_what_is_corrupt_and_removes_it_only_when_told() {
    let rig = Rig::new();
    rig.spoil(1);
    let name = rig.samples[1].name().s3("");
    let (report, text) = rig.verify(false, "1Mi");
    assert_eq!((report.ok, report.corrupt, report.removed), (4, 1, 0));
    assert!(
        text.contains(&format!("{name}: Corrupt: section 0/1")),
        "{text}"
    );
    assert!(text.contains("--remove-corrupt"), "{text}");
    assert_eq!(rig.there(), [true; 5]);
    let (report, text) = rig.verify(true, "1Mi");
    assert_eq!((report.corrupt, report.removed), (1, 1));
    assert!(text.contains("(removed)"), "{text}");
    assert_eq!(rig.there(), [true, false, true, true, true]);
    let (report, _) = rig.verify(false, "1Mi");
    assert_eq!((report.ok, report.corrupt), (4, 0));
}

#[test]
fn gc_removes_by_domain_and_dry_runs_remove_nothing() {
    let rig = Rig::new();
    let (first, second) = (rig.domain(0), rig.domain(3));
    let (report, text) = rig.gc(&["--domain", &first, "--dry-run"]).unwrap();
    assert_eq!((report.objects, report.removed, report.kept), (3, 0, 2));
    assert!(text.starts_with("3 objects would be removed"), "{text}");
    assert_eq!(rig.there(), [true; 5]);
    let (report, text) = rig.gc(&["--all-but-domain", &first, "--objects"]).unwrap();
    assert_eq!((report.objects, report.removed, report.kept), (2, 2, 3));
    assert!(text.contains(&rig.samples[4].name().s3("")), "{text}");
    assert!(text.contains(&second), "{text}");
    assert_eq!(rig.there(), [true, true, true, false, false]);
    let (report, _) = rig.gc(&["--domain", &first, "--domain", &second]).unwrap();
    assert_eq!((report.removed, report.kept), (3, 0));
    assert_eq!(rig.there(), [false; 5]);
}

#[test]
fn gc_removes_what_is_older_and_of_the_domain() {
    let rig = Rig::new();
    let (report, text) = rig.gc(&["--older-than", "30d"]).unwrap();
    assert_eq!((report.removed, report.kept), (0, 5), "{text}");
    let began = Instant::now();
    // Objects are as old as whole seconds say.
    while rig
        .gc(&["--older-than", "1s", "--dry-run"])
        .unwrap()
        .0
        .objects
        < 5
    {
        assert!(began.elapsed() < Duration::from_secs(30));
        std::thread::sleep(Duration::from_millis(100));
    }
    let domain = rig.domain(3);
    let (report, _) = rig
        .gc(&["--older-than", "1s", "--domain", &domain])
        .unwrap();
    assert_eq!((report.removed, report.kept), (2, 3));
}

#[test]
fn gc_wants_to_know_what_and_in_one_way() {
    let rig = Rig::new();
    let domain = rig.domain(0);
    for (wrong, says) in [
        (vec![], "--older-than"),
        (vec!["--dry-run"], "--older-than"),
        (vec!["--older-than", "soon"], "10m or 24h"),
        (vec!["--domain", "0123/4567"], "16 lower-case hex digits"),
        (
            vec!["--domain", &domain, "--all-but-domain", &domain],
            "cannot be used with",
        ),
    ] {
        let error = rig.gc(&wrong).err().unwrap();
        assert!(error.contains(says), "{wrong:?}: {error}");
    }
    assert_eq!(rig.there(), [true; 5]);
}

#[test]
fn a_folder_that_a_sidecar_uses_is_refused_by_name() {
    let rig = Rig::new();
    let disk = rig.open();
    let error = rig.gc_once(&["--older-than", "0s"]).err().unwrap();
    assert!(error.contains("InUse"), "{error}");
    assert!(error.contains("stop that sidecar first"), "{error}");
    disk.close();
    assert_eq!(rig.there(), [true; 5]);
}

#[test]
fn what_is_no_folder_of_ours_is_refused_and_left_as_it_is() {
    let rig = Rig::new();
    let inspect = |path: PathBuf| {
        let target = Target::new(format!("file://{}", path.display()), Output::Text);
        let args = inspect::Args {
            target,
            objects: false,
        };
        inspect::print(&args, &mut Vec::new())
            .unwrap_err()
            .to_string()
    };
    let missing = rig.path().join("missing");
    let error = inspect(missing.clone());
    assert!(
        error.contains("No such file") && error.contains("name the folder"),
        "{error}"
    );
    assert!(!missing.exists());
    let other = tempfile::tempdir().unwrap();
    let error = inspect(other.path().into());
    assert!(
        error.contains("is not the folder of a disk or file system tier"),
        "{error}"
    );
    assert_eq!(std::fs::read_dir(other.path()).unwrap().count(), 0);
    let error = inspect(rig.path().join("format"));
    assert!(error.contains("Not a directory"), "{error}");
    std::fs::write(other.path().join("format"), "something else").unwrap();
    let error = inspect(other.path().into());
    assert!(error.contains("name another folder"), "{error}");
}

/// A pipe whose reader is gone.
struct Closed;

impl std::io::Write for Closed {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_command_that_nobody_reads_any_more_ends_without_a_word() {
    let rig = Rig::new();
    for output in [Output::Text, Output::Json] {
        let target = rig.target(output);
        let args = inspect::Args {
            target,
            objects: true,
        };
        let ended = unless_in_use(|| match inspect::print(&args, &mut Closed) {
            Err(Failed::Said(e)) => Err(e),
            ended => Ok(ended),
        });
        assert_eq!(ended, Ok(Err(Failed::Unread)));
    }
    assert!(super::ended(Err(Failed::Unread)).is_ok());
    assert_eq!(rig.there(), [true; 5]);
}

const PAGE: &str = concat!(
    include_str!("../../../../docs/guides/tiers.md"),
    include_str!("../../../../docs/reference/tier-errors.md")
);

#[test]
fn every_command_of_the_page_is_one() {
    let lines = PAGE
        .lines()
        .filter(|line| line.starts_with("kvcachepool-sidecar "));
    let mut commands = 0;
    for line in lines {
        let command = line.split('#').next().unwrap();
        let parsed = Cli::try_parse_from(command.split_whitespace());
        assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        commands += 1;
    }
    assert!(commands >= 7);
}

#[test]
fn the_page_says_what_every_event_of_the_disk_means() {
    let events = Rig::new().with_disk(async |disk| disk.info().counters.now());
    assert!(events.len() >= 7);
    for (event, _) in events {
        let event = kvcachepool_metrics::snake_case(event);
        assert!(PAGE.contains(&format!("\n| `{event}` | ")), "{event}");
    }
}

#[test]
fn the_page_says_what_every_error_means() {
    for cause in kvcachepool_tiers::Cause::ALL {
        let row = format!("\n| `{}` | ", cause.name());
        assert!(PAGE.contains(&row), "{}", cause.name());
    }
}
