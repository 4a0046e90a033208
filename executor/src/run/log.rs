//! [`Log`]: a file that grows while a run trains, whole records at a time.
//!
//! A record that cannot be written waits, and is written with the next one that can. What was written of it is cut off
//! again, so that a reader finds whole records whenever it looks.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use crate::error::Error;

/// A file being written; nobody else may have made it.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    /// Absent until the first record.
    file: Option<File>,
    /// Bytes of whole records in the file.
    written: u64,
    waiting: Vec<u8>,
    /// Whether it may be there already, with as many bytes that stay as `written` says.
    goes_on: bool,
    /// What the file that is there is called from the first flush on, where it stays as it is.
    apart: Option<PathBuf>,
}

impl Log {
    pub(super) fn new(path: PathBuf) -> Self {
        Self {
            path,
            file: None,
            written: 0,
            waiting: Vec::new(),
            goes_on: false,
            apart: None,
        }
    }

    /// One that goes on after its first `kept` bytes; the first flush cuts off the others.
    pub(super) fn after(path: PathBuf, kept: u64) -> Self {
        Self {
            written: kept,
            goes_on: true,
            ..Self::new(path)
        }
    }

    /// One in whose place there is another, which the first flush renames to `apart`.
    pub(super) fn beside(path: PathBuf, apart: PathBuf) -> Self {
        Self {
            apart: Some(apart),
            ..Self::new(path)
        }
    }

    /// Whether no record was added yet.
    pub(super) fn is_empty(&self) -> bool {
        self.written == 0 && self.waiting.is_empty()
    }

    /// Adds a record, for [`Log::flush`] to write.
    pub(super) fn add(&mut self, record: &[u8]) {
        self.waiting.extend(record);
    }

    /// Writes what was added.
    pub(super) fn flush(&mut self) -> Result<(), Error> {
        if let Some(apart) = &self.apart {
            fs::rename(&self.path, apart).map_err(Error::io(&self.path, "rename"))?;
            self.apart = None;
        }
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(self.create()?),
        };
        if let Err(error) = file.write_all_at(&self.waiting, self.written) {
            // What is cut off by nobody is written over by the next.
            let _ = file.set_len(self.written);
            return Err(Error::io(&self.path, "write")(error));
        }
        self.written += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }

    fn create(&self) -> Result<File, Error> {
        if self.goes_on {
            let mut open = OpenOptions::new();
            let file = open
                .write(true)
                .create(true)
                .truncate(false)
                .open(&self.path);
            let file = file.map_err(Error::io(&self.path, "create"))?;
            file.set_len(self.written)
                .map_err(Error::io(&self.path, "write"))?;
            return Ok(file);
        }
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&self.path);
        created.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Error::Lost {
                dir: self.path.clone(),
                why: "was made by another run, which writes to the same directory",
            },
            _ => Error::io(&self.path, "create")(error),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_written_is_written_later_and_whole() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("log");
        let mut log = Log::new(path.clone());
        log.add(b"one\n");
        log.flush().expect("writes");
        // What is full does not say so when it is opened.
        let full = OpenOptions::new().write(true).open("/dev/full");
        let file = log.file.replace(full.expect("Linux")).expect("was opened");
        for record in [b"two\n", b"six\n"] {
            log.add(record);
            let failed = log.flush().expect_err("no room").to_string();
            assert!(failed.contains("log: could not write"), "{failed}");
            assert_eq!(fs::read(&path).expect("there"), b"one\n");
        }
        // A part was written, as of a disk that is full.
        file.write_all_at(b"tw", 4).expect("writes");
        log.file = Some(file);
        log.flush().expect("writes");
        assert_eq!(fs::read(&path).expect("there"), b"one\ntwo\nsix\n");
    }

    #[test]
    fn a_log_that_goes_on_is_cut_with_its_first_record() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("log");
        fs::write(&path, "one\ntwo\nth").expect("writes");
        let mut log = Log::after(path.clone(), 4);
        assert_eq!(fs::read(&path).expect("there"), b"one\ntwo\nth");
        log.add(b"six\n");
        log.flush().expect("writes");
        assert_eq!(fs::read(&path).expect("there"), b"one\nsix\n");
        fs::remove_file(&path).expect("removes");
        let mut log = Log::after(path.clone(), 0);
        assert!(log.is_empty());
        log.add(b"new\n");
        log.flush().expect("writes");
        assert_eq!(fs::read(&path).expect("there"), b"new\n");
    }

    #[test]
    fn a_log_that_stays_apart_is_renamed_with_the_first_record() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (path, apart) = (folder.path().join("log"), folder.path().join("log.before"));
        fs::write(&path, "one\ntwo\n").expect("writes");
        let mut log = Log::beside(path.clone(), apart.clone());
        assert!(!apart.exists());
        for record in [b"six\n", b"ten\n"] {
            log.add(record);
            log.flush().expect("writes");
        }
        assert_eq!(fs::read(&apart).expect("there"), b"one\ntwo\n");
        assert_eq!(fs::read(&path).expect("there"), b"six\nten\n");
    }

    #[test]
    fn a_log_that_another_has_begun_is_not_written_over() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("log");
        fs::write(&path, "theirs").expect("writes");
        let mut log = Log::new(path.clone());
        log.add(b"ours");
        let lost = log.flush().expect_err("is theirs");
        assert!(matches!(lost, Error::Lost { .. }), "{lost}");
        assert_eq!(fs::read(&path).expect("there"), b"theirs");
    }
}
