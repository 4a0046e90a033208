//! [`Target`]: a reader with the inputs that it begins with, and what readers of files need.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::mutate::Corpus;

/// A reader and its first inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Target {
    /// Its name on the command line, and of its folder in `corpus`.
    pub(crate) name: &'static str,
    /// What it reads.
    pub(crate) about: &'static str,
    /// Files and folders of files of the repository that it begins with too.
    pub(crate) also: &'static [&'static str],
    /// What is done once in a folder before inputs are read there.
    pub(crate) prepare: fn(&Path),
    /// Reads an input, in a folder that is its own.
    pub(crate) read: Read,
    /// Of so many inputs that are asked for it reads one, as each takes so much longer than others'.
    pub(crate) one_of: u64,
}

/// Reads an input, in a folder: why it is refused, where it is.
pub(crate) type Read = fn(&Path, &[u8]) -> Result<(), String>;

/// What a reader says, without what it read.
pub(crate) fn said<T, E: ToString>(read: Result<T, E>) -> Result<(), String> {
    read.map(drop).map_err(|error| error.to_string())
}

impl Target {
    /// One that needs nothing but its input.
    pub(crate) const fn new(name: &'static str, about: &'static str, read: Read) -> Self {
        Self {
            name,
            about,
            also: &[],
            prepare: |_| {},
            read,
            one_of: 1,
        }
    }

    pub(crate) const fn one_of(self, one_of: u64) -> Self {
        Self { one_of, ..self }
    }

    pub(crate) const fn also(self, also: &'static [&'static str]) -> Self {
        Self { also, ..self }
    }

    pub(crate) const fn prepare(self, prepare: fn(&Path)) -> Self {
        Self { prepare, ..self }
    }

    /// What its inputs are made of: the files of its folder by name, then what it begins with too.
    pub(crate) fn corpus(&self) -> io::Result<Corpus> {
        let mut paths = Vec::new();
        let own = root().join("tests/hostile/corpus").join(self.name);
        let own = own.is_dir().then_some(own);
        let also = self.also.iter().map(|path| root().join(path));
        for path in own.into_iter().chain(also) {
            if path.is_file() {
                paths.push(path);
                continue;
            }
            let mut files = Vec::new();
            for entry in fs::read_dir(&path)? {
                files.push(entry?.path());
            }
            files.sort();
            paths.extend(files);
        }
        let seeds = paths.iter().map(fs::read).collect::<io::Result<_>>()?;
        Ok(Corpus::new(seeds))
    }
}

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Puts a file where a reader looks for it.
pub(crate) fn put(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).expect("a temporary folder takes files");
    path
}

/// Makes a file so long and no longer, without taking the room, where the file system has files as long.
pub(crate) fn stretch(path: &Path, bytes: u64) {
    let file = fs::File::options().write(true).open(path);
    let _ = file.expect("it is there").set_len(bytes);
}

/// A file of the repository.
pub(crate) fn file(path: &str) -> Vec<u8> {
    fs::read(root().join(path)).expect("a file of the repository")
}
