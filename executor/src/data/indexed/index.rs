//! `PREFIX.idx`, checked in full.
//!
//! Lengths, byte offsets and document boundaries must agree with each other; an error names the entry,
//! its position in the file, what was found and what was expected. Entries are read a block at a
//! time, so an index larger than memory is no matter.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::format::{Element, HEADER_BYTES, MAGIC, VERSION};
use crate::error::Error;

/// What an index says, once it is proven consistent.
pub(super) struct Index {
    pub(super) element: Element,
    pub(super) num_tokens: u64,
    pub(super) num_documents: u64,
    pub(super) num_sequences: u64,
}

impl Index {
    /// Reads `PREFIX.idx` and checks all of it.
    pub(super) fn read(path: &Path) -> Result<Self, Error> {
        let mut file = File::open(path).map_err(Error::io(path, "open"))?;
        let found_bytes = file.metadata().map_err(Error::io(path, "measure"))?.len();
        let bad = |reason: String| Error::malformed(path, reason);
        if found_bytes < HEADER_BYTES {
            return Err(bad(format!(
                "holds {found_bytes} bytes; the header of an index alone has {HEADER_BYTES}"
            )));
        }
        let mut header = [0; HEADER_BYTES as usize];
        file.read_exact(&mut header)
            .map_err(Error::io(path, "read"))?;
        if header[..9] != MAGIC {
            return Err(bad(format!(
                "starts with {:?}; expected the magic bytes \"MMIDIDX\" of a Megatron index",
                header[..9].escape_ascii().to_string()
            )));
        }
        let word = |at: usize| {
            u64::from_le_bytes(header[at..at + 8].try_into().expect("eight header bytes"))
        };
        if word(9) != VERSION {
            return Err(bad(format!(
                "version {} at byte 9; expected {VERSION}",
                word(9)
            )));
        }
        let element = Element::from_code(header[17]).map_err(bad)?;
        let (sequences, boundaries) = (word(18), word(26));
        if boundaries == 0 {
            return Err(bad(
                "document array of length 0 at byte 26; expected at least 1".to_owned(),
            ));
        }
        let expected = sequences
            .checked_mul(12)
            .and_then(|n| n.checked_add(boundaries.checked_mul(8)?))
            .and_then(|n| n.checked_add(HEADER_BYTES));
        let modes = expected.and_then(|n| n.checked_add(sequences));
        if expected != Some(found_bytes) && modes != Some(found_bytes) {
            return Err(bad(format!(
                "holds {found_bytes} bytes; expected {} for {sequences} sequences and \
                 {boundaries} document boundaries (bytes 18 and 26)",
                expected.map_or_else(|| "more than any file".to_owned(), |n| n.to_string())
            )));
        }
        let num_tokens = check_sequences(path, &file, element, sequences)?;
        check_documents(path, &file, sequences, boundaries)?;
        Ok(Self {
            element,
            num_tokens,
            num_documents: boundaries - 1,
            num_sequences: sequences,
        })
    }
}

/// Where byte offsets of sequences begin.
fn offsets_at(sequences: u64) -> u64 {
    HEADER_BYTES + 4 * sequences
}

/// The bytes of `.bin` that sequences begin with, from an index that was checked.
#[derive(Debug)]
pub(super) struct Offsets {
    path: PathBuf,
    file: File,
    sequences: u64,
}

impl Offsets {
    /// Those of so many sequences.
    pub(super) fn open(path: PathBuf, sequences: u64) -> Result<Self, Error> {
        Ok(Self {
            file: File::open(&path).map_err(Error::io(&path, "open"))?,
            path,
            sequences,
        })
    }

    /// Those of some of them.
    pub(super) fn read(&self, range: Range<u64>) -> Result<Vec<u64>, Error> {
        let mut entries = vec![[0; 8]; (range.end - range.start) as usize];
        let at = offsets_at(self.sequences) + 8 * range.start;
        self.file
            .read_exact_at(entries.as_flattened_mut(), at)
            .map_err(Error::io(&self.path, "read"))?;
        Ok(entries.into_iter().map(u64::from_le_bytes).collect())
    }
}

/// Checks lengths and offsets against each other; returns the number of tokens.
fn check_sequences(
    path: &Path,
    file: &File,
    element: Element,
    sequences: u64,
) -> Result<u64, Error> {
    let lengths_at = HEADER_BYTES;
    let offsets_at = offsets_at(sequences);
    let mut lengths = Entries::<4>::new(path, file, lengths_at, sequences);
    let mut offsets = Entries::<8>::new(path, file, offsets_at, sequences);
    let mut tokens: u64 = 0;
    for i in 0..sequences {
        let length = i32::from_le_bytes(lengths.next()?);
        let offset = i64::from_le_bytes(offsets.next()?);
        let expected = tokens * element.bytes();
        if u64::try_from(offset) != Ok(expected) {
            return Err(Error::malformed(
                path,
                format!(
                    "offset {offset} of sequence {i} at byte {}; expected {expected}, \
                     the bytes of all sequences before it",
                    offsets_at + 8 * i
                ),
            ));
        }
        tokens += u64::try_from(length).map_err(|_| {
            Error::malformed(
                path,
                format!(
                    "length {length} of sequence {i} at byte {}; expected 0 or more",
                    lengths_at + 4 * i
                ),
            )
        })?;
    }
    Ok(tokens)
}

/// Checks that the documents divide the sequences, in order.
fn check_documents(path: &Path, file: &File, sequences: u64, boundaries: u64) -> Result<(), Error> {
    let at = HEADER_BYTES + 12 * sequences;
    let mut entries = Entries::<8>::new(path, file, at, boundaries);
    let mut previous = 0;
    for i in 0..boundaries {
        let found = i64::from_le_bytes(entries.next()?);
        let expected = if i == 0 {
            0..=0
        } else if i + 1 == boundaries {
            sequences as i64..=sequences as i64
        } else {
            previous..=sequences as i64
        };
        if !expected.contains(&found) {
            return Err(Error::malformed(
                path,
                format!(
                    "document boundary {i} is {found} at byte {}; expected {}",
                    at + 8 * i,
                    if expected.start() == expected.end() {
                        expected.start().to_string()
                    } else {
                        format!("{} to {}", expected.start(), expected.end())
                    }
                ),
            ));
        }
        previous = found;
    }
    Ok(())
}

/// Entries of `N` bytes from a position of a file on, read a block at a time.
struct Entries<'a, const N: usize> {
    path: &'a Path,
    file: &'a File,
    at: u64,
    left: u64,
    block: Vec<[u8; N]>,
    next: usize,
}

impl<'a, const N: usize> Entries<'a, N> {
    const BLOCK: u64 = 1 << 14;

    fn new(path: &'a Path, file: &'a File, at: u64, count: u64) -> Self {
        Self {
            path,
            file,
            at,
            left: count,
            block: Vec::new(),
            next: 0,
        }
    }

    fn next(&mut self) -> Result<[u8; N], Error> {
        if self.next == self.block.len() {
            assert!(self.left > 0, "entries are counted before they are read");
            let count = self.left.min(Self::BLOCK);
            self.block = vec![[0; N]; count as usize];
            self.file
                .read_exact_at(self.block.as_flattened_mut(), self.at)
                .map_err(Error::io(self.path, "read"))?;
            self.at += count * N as u64;
            self.left -= count;
            self.next = 0;
        }
        self.next += 1;
        Ok(self.block[self.next - 1])
    }
}
