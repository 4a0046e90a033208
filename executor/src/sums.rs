//! Checksums of files: BLAKE3, on all cores.
//!
//! Beside weights and tokens lies a file of them, as the program `b3sum` writes and checks it: a line of the hash in
//! hexadecimal, two blanks and the name.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read as _, Write};
use std::path::Path;

use crate::error::Error;
use crate::files::write_atomically;

/// From so many bytes on a hash is worth several cores (the documentation of `blake3::Hasher::update_rayon`).
const SEVERAL_CORES: usize = 1 << 17;

/// Bytes that are read at a time: enough for every core.
const BLOCK: usize = 16 << 20;

/// Hashes and counts what passes through it.
pub(crate) struct Hashed<W> {
    /// Where it goes.
    pub(crate) out: W,
    hash: blake3::Hasher,
    bytes: u64,
}

impl<W: Write> Hashed<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            hash: blake3::Hasher::new(),
            bytes: 0,
        }
    }

    /// Bytes that passed.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Their hash, in hexadecimal.
    pub(crate) fn hex(&self) -> String {
        self.hash.finalize().to_hex().to_string()
    }
}

impl<W: Write> Write for Hashed<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let count = self.out.write(buffer)?;
        update(&mut self.hash, &buffer[..count]);
        self.bytes += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn update(hash: &mut blake3::Hasher, bytes: &[u8]) {
    if bytes.len() >= SEVERAL_CORES {
        hash.update_rayon(bytes);
    } else {
        hash.update(bytes);
    }
}

/// The hash of a file, in hexadecimal.
pub(crate) fn hash_of(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(Error::io(path, "open"))?;
    let mut hash = blake3::Hasher::new();
    let mut block = Vec::with_capacity(BLOCK);
    loop {
        block.clear();
        let read = (&mut file).take(BLOCK as u64).read_to_end(&mut block);
        if read.map_err(Error::io(path, "read"))? == 0 {
            return Ok(hash.finalize().to_hex().to_string());
        }
        update(&mut hash, &block);
    }
}

/// Writes the hashes of files that lie beside `path`, by name.
pub(crate) fn write(path: &Path, files: &[(String, String)]) -> Result<(), Error> {
    let mut text = String::new();
    for (name, hash) in files {
        writeln!(text, "{hash}  {name}").expect("a string takes any text");
    }
    write_atomically(path, |out| out.write_all(text.as_bytes()))
}

/// Refuses files that do not hold what the sums at `path` say; those of which it says nothing, and all where there are
/// no sums, are trusted. `skips` names files that are not read. Says how many were.
pub(crate) fn check(path: &Path, skips: &dyn Fn(&str) -> bool) -> Result<usize, Error> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(Error::io(path, "read")(error)),
    };
    let mut held = 0;
    for line in text.lines() {
        let is_name = |name: &str| !name.is_empty() && !name.contains('/');
        let Some((hash, name)) = line.split_once("  ").filter(|(_, name)| is_name(name)) else {
            let reason =
                format!("holds {line:?}; expected a hash, two blanks and a file beside it");
            return Err(Error::malformed(path, reason));
        };
        if skips(name) {
            continue;
        }
        let file = path.with_file_name(name);
        if hash_of(&file)? != hash {
            let reason = format!(
                "does not hold what was written, by {}: get it again, or remove that file if this one was changed on \
                 purpose",
                path.display()
            );
            return Err(Error::malformed(file, reason));
        }
        held += 1;
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_a_hash_is_blake3s_on_one_core_and_on_several() {
        // Of no bytes: the first of the official vectors (`test_vectors.json` of the BLAKE3 repository).
        let empty = Hashed::new(io::sink());
        assert!(
            empty.hex().starts_with("af1349b9f5f9a1a6"),
            "{}",
            empty.hex()
        );
        let bytes: Vec<u8> = (0..40 << 20_u32).map(|i: u32| (i % 251) as u8).collect();
        let plain = blake3::hash(&bytes).to_hex().to_string();
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("file");
        for parts in [1000, SEVERAL_CORES, bytes.len()] {
            let mut out = Hashed::new(File::create(&path).expect("creates"));
            for part in bytes.chunks(parts) {
                out.write_all(part).expect("writes");
            }
            assert_eq!(
                (out.hex(), out.bytes()),
                (plain.clone(), bytes.len() as u64)
            );
        }
        assert_eq!(hash_of(&path).expect("reads"), plain);
    }

    #[test]
    fn a_changed_file_is_refused_by_its_name() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (sums, file) = (folder.path().join("sums"), folder.path().join("file"));
        check(&sums, &|_| false).expect("there are none");
        fs::write(&file, "abc").expect("writes");
        let hash = hash_of(&file).expect("reads");
        write(&sums, &[("file".to_owned(), hash)]).expect("writes");
        check(&sums, &|_| false).expect("it is as it was");
        fs::write(&file, "abd").expect("writes");
        let text = check(&sums, &|_| false).expect_err("changed").to_string();
        assert!(
            text.contains("file: does not hold what was written"),
            "{text}"
        );
        check(&sums, &|name| name == "file").expect("it is not read");
        fs::write(&sums, "abc  ../file\n").expect("writes");
        let text = check(&sums, &|_| false).expect_err("elsewhere").to_string();
        assert!(text.contains("expected a hash, two blanks"), "{text}");
    }
}
