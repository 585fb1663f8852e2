//! The archive: files in a gzipped tar, and the list of what could not be read.

use super::redact;
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Timestamp;
use std::fmt::Display;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tar::{Builder, Header};

/// An archive that is being written.
pub struct Bundle {
    tar: Builder<GzEncoder<File>>,
    root: String,
    mtime: u64,
    files: usize,
    errors: Vec<String>,
}

impl Bundle {
    /// Creates the file, readable only by the user. All files of the archive are below the folder `root`. Fails if the file exists.
    pub fn create(path: &Path, root: &str, now: Timestamp) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        Ok(Self {
            tar: Builder::new(GzEncoder::new(file, Compression::default())),
            root: root.to_owned(),
            mtime: now.as_second().unsigned_abs(),
            files: 0,
            errors: Vec::new(),
        })
    }

    /// Adds a file, without credentials in URLs.
    pub fn add(&mut self, path: &str, text: &str) -> io::Result<()> {
        let text = redact::text(text);
        let mut header = Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(self.mtime);
        let path = format!("{}/{path}", self.root);
        self.tar.append_data(&mut header, path, text.as_bytes())?;
        self.files += 1;
        Ok(())
    }

    /// Adds a file, or notes why it cannot be read.
    pub fn add_read<E: Display>(&mut self, path: &str, read: Result<String, E>) -> io::Result<()> {
        match read {
            Ok(text) => self.add(path, &text),
            Err(why) => {
                self.note(path, why);
                Ok(())
            }
        }
    }

    /// Notes what is missing.
    pub fn note(&mut self, path: &str, why: impl Display) {
        self.errors.push(format!("{path}: {why}"));
    }

    /// Adds `errors.txt` and ends the archive. Returns the number of files and what could not be read.
    pub fn finish(mut self) -> io::Result<(usize, Vec<String>)> {
        let mut text = self.errors.join("\n");
        if text.is_empty() {
            text = "everything could be read".to_owned();
        }
        self.add("errors.txt", &format!("{text}\n"))?;
        self.tar.into_inner()?.finish()?.sync_all()?;
        Ok((self.files, self.errors))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;
    use std::io::Read;

    #[test]
    fn the_archive_has_its_files_and_what_is_missing_and_overwrites_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.tar.gz");
        let mut bundle = Bundle::create(&path, "report", Timestamp::UNIX_EPOCH).unwrap();
        let long = format!("pods/{}/pod.yaml", "x".repeat(253));
        bundle.add(&long, "redis://u:p@h\n").unwrap();
        bundle.add_read("b", Err::<String, _>("forbidden")).unwrap();
        assert_eq!(
            bundle.finish().unwrap(),
            (2, vec!["b: forbidden".to_owned()])
        );
        let mut archive = tar::Archive::new(GzDecoder::new(File::open(&path).unwrap()));
        let files: Vec<_> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let mut entry = entry.unwrap();
                let mut text = String::new();
                entry.read_to_string(&mut text).unwrap();
                (entry.path().unwrap().display().to_string(), text)
            })
            .collect();
        let expected = [
            (
                format!("report/{long}"),
                "redis://<redacted>@h\n".to_owned(),
            ),
            ("report/errors.txt".to_owned(), "b: forbidden\n".to_owned()),
        ];
        assert_eq!(files, expected);
        let again = Bundle::create(&path, "report", Timestamp::UNIX_EPOCH);
        assert_eq!(again.err().unwrap().kind(), io::ErrorKind::AlreadyExists);
    }
}
