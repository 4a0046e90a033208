//! Megatron indexed datasets: token ids in `PREFIX.bin`, their structure in `PREFIX.idx`.
//!
//! The format is that of `megatron/core/datasets/indexed_dataset.py` (NVIDIA Megatron-LM, d98e8a64):
//! after a header of 34 bytes, sequence lengths (i32), their byte offsets (i64) and the document
//! boundaries (i64), all little-endian and unaligned. Sequences lie back to back in `.bin`, so the
//! stream of all documents in order is the file from its beginning; the index is checked in full
//! when a dataset is opened, then only the number of tokens and their type are kept. Files are read
//! at positions, never mapped: a file that is cut while it is in use is an error, not a signal.

mod format;
mod index;
#[cfg(test)]
mod megatron;
mod write;

use std::ffi::OsStr;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

pub use format::Element;
use format::with_ending;
use index::{Index, Offsets};
pub use write::write;
pub(super) use write::write_documents;

use crate::error::Error;
use crate::sums;

/// An open dataset.
#[derive(Debug)]
pub struct Indexed {
    bin_path: PathBuf,
    bin: File,
    element: Element,
    num_tokens: u64,
    num_documents: u64,
    offsets: Offsets,
    num_sequences: u64,
}

/// Whether a file of a dataset holds its ids.
fn are_tokens(name: &str) -> bool {
    Path::new(name)
        .extension()
        .is_some_and(|ending| ending == "bin")
}

impl Indexed {
    /// Opens `PREFIX.idx` and `PREFIX.bin` and checks that they agree. The prefix may be given with
    /// either ending.
    pub fn open(prefix: &Path) -> Result<Self, Error> {
        let prefix = match prefix.extension() {
            Some(ending) if ending == "bin" || ending == "idx" => prefix.with_extension(""),
            _ => prefix.to_owned(),
        };
        let bin_path = with_ending(&prefix, "bin");
        let idx_path = with_ending(&prefix, "idx");
        if !idx_path.exists() && !bin_path.exists() {
            return Err(Error::malformed(
                &prefix,
                format!(
                    "is no indexed dataset: expected {} and {} beside each other",
                    bin_path.display(),
                    idx_path.display()
                ),
            ));
        }
        let index = Index::read(&idx_path)?;
        // After what says more of it. Tokens are read only where they are asked about.
        sums::check(&with_ending(&prefix, write::SUMS), &are_tokens)?;
        let bin = File::open(&bin_path).map_err(Error::io(&bin_path, "open"))?;
        let found = bin
            .metadata()
            .map_err(Error::io(&bin_path, "measure"))?
            .len();
        let expected = index.num_tokens * index.element.bytes();
        if found != expected {
            return Err(Error::malformed(
                &bin_path,
                format!(
                    "holds {found} bytes; expected {expected} ({} tokens of {} bytes) by {}",
                    index.num_tokens,
                    index.element.bytes(),
                    idx_path.display()
                ),
            ));
        }
        Ok(Self {
            bin_path,
            bin,
            element: index.element,
            num_tokens: index.num_tokens,
            num_documents: index.num_documents,
            offsets: Offsets::open(idx_path, index.num_sequences)?,
            num_sequences: index.num_sequences,
        })
    }

    /// Refuses tokens that are not those that were written, by the sums beside them, and those of which no sum says. All are
    /// read.
    pub fn verify(&self) -> Result<(), Error> {
        let sums = self.bin_path.with_extension(write::SUMS);
        let own = self.bin_path.file_name();
        if sums::check(&sums, &|name| own != Some(OsStr::new(name)))? > 0 {
            return Ok(());
        }
        let reason = format!(
            "cannot be verified: {} holds no hash of it; leave out --verify-data, or have `moefold data prepare` write both",
            sums.display()
        );
        Err(Error::malformed(&self.bin_path, reason))
    }

    /// The file that holds the ids.
    pub fn path(&self) -> &Path {
        &self.bin_path
    }

    /// Type of an id in the file.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Tokens of all documents.
    pub fn num_tokens(&self) -> u64 {
        self.num_tokens
    }

    /// Documents.
    pub fn num_documents(&self) -> u64 {
        self.num_documents
    }

    /// Sequences; a document of text is one.
    pub fn num_sequences(&self) -> u64 {
        self.num_sequences
    }

    /// The token that a sequence begins with; of one after the last, the tokens there are.
    pub(super) fn start_of(&self, sequence: u64) -> Result<u64, Error> {
        if sequence >= self.num_sequences {
            return Ok(self.num_tokens);
        }
        let offset = self.offsets.read(sequence..sequence + 1)?[0];
        Ok(offset / self.element.bytes())
    }

    /// The tokens of `range` that sequences begin with, in order; of empty ones, that of the next.
    pub(super) fn begins_in(&self, range: Range<u64>) -> Result<Vec<u64>, Error> {
        let size = self.element.bytes();
        let (mut first, mut after) = (0, self.num_sequences);
        while first < after {
            let middle = first + (after - first) / 2;
            if self.offsets.read(middle..middle + 1)?[0] < range.start * size {
                first = middle + 1;
            } else {
                after = middle;
            }
        }
        let mut begins = Vec::new();
        // Blocks of them, as most documents are shorter than a sequence.
        while first < self.num_sequences {
            let block = first..(first + 256).min(self.num_sequences);
            first = block.end;
            for offset in self.offsets.read(block)? {
                let token = offset / size;
                if token >= range.end {
                    return Ok(begins);
                }
                begins.push(token);
            }
        }
        Ok(begins)
    }

    /// Ids `range` of the stream of all documents in order, as they are in the file.
    pub fn ids(&self, range: Range<u64>) -> Result<Vec<i64>, Error> {
        assert!(
            range.end <= self.num_tokens,
            "tokens {range:?} of {}",
            self.num_tokens
        );
        let size = self.element.bytes();
        let mut bytes = vec![0; ((range.end - range.start) * size) as usize];
        self.bin
            .read_exact_at(&mut bytes, range.start * size)
            .map_err(Error::io(&self.bin_path, "read"))?;
        Ok(self.element.decode(&bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a temporary folder")
    }

    #[test]
    fn golden_bytes_of_a_small_index() {
        let folder = folder();
        let prefix = folder.path().join("text.v1");
        write(&prefix, Element::U16, &[&[1, 2, 515], &[], &[7]]).expect("writes");
        let bin = std::fs::read(folder.path().join("text.v1.bin")).expect("there");
        assert_eq!(bin, [1, 0, 2, 0, 3, 2, 7, 0]);
        let idx = std::fs::read(folder.path().join("text.v1.idx")).expect("there");
        let mut expected = b"MMIDIDX\0\0".to_vec();
        expected.extend(1_u64.to_le_bytes());
        expected.push(8);
        expected.extend(3_u64.to_le_bytes());
        expected.extend(4_u64.to_le_bytes());
        expected.extend([3_i32, 0, 1].iter().flat_map(|n| n.to_le_bytes()));
        expected.extend([0_i64, 6, 6].iter().flat_map(|n| n.to_le_bytes()));
        expected.extend([0_i64, 1, 2, 3].iter().flat_map(|n| n.to_le_bytes()));
        assert_eq!(idx, expected);
    }

    #[test]
    fn law_every_element_type_round_trips() {
        let folder = folder();
        let elements = [
            Element::U8,
            Element::I8,
            Element::I16,
            Element::I32,
            Element::I64,
            Element::U16,
        ];
        for element in elements {
            let prefix = folder.path().join(format!("{element:?}"));
            write(&prefix, element, &[&[0, 5], &[127], &[], &[3, 2, 1]]).expect("writes");
            let data = Indexed::open(&prefix).expect("opens");
            assert_eq!(data.element(), element);
            assert_eq!((data.num_tokens(), data.num_documents()), (6, 4));
            assert_eq!(data.ids(0..6).expect("reads"), [0, 5, 127, 3, 2, 1]);
            assert_eq!(data.ids(2..4).expect("reads"), [127, 3]);
        }
        let prefix = folder.path().join("U8");
        for ending in ["U8.bin", "U8.idx"] {
            Indexed::open(&folder.path().join(ending)).expect("the ending may be given");
        }
        let refused = write(&prefix, Element::U8, &[&[1], &[2, 256]]).expect_err("too large");
        let text = refused.to_string();
        assert!(
            text.contains("token id 256 at position 1 of document 1"),
            "{text}"
        );
    }

    /// Damages a good index with `damage` and expects the error to say `expected`.
    fn check(damage: impl FnOnce(&mut Vec<u8>), expected: &str) {
        let folder = folder();
        let prefix = folder.path().join("data");
        write(&prefix, Element::I32, &[&[1, 2, 3], &[4, 5]]).expect("writes");
        let path = folder.path().join("data.idx");
        let mut bytes = std::fs::read(&path).expect("there");
        damage(&mut bytes);
        std::fs::write(&path, bytes).expect("writes");
        let error = Indexed::open(&prefix).expect_err("refused");
        let text = error.to_string();
        assert!(
            text.contains("data.idx: ") && text.contains(expected),
            "{text}"
        );
        assert!(error.is_bad_request());
    }

    #[test]
    fn damaged_indices_are_refused_with_place_found_and_expected() {
        check(|b| b.truncate(20), "holds 20 bytes; the header");
        check(|b| b[0] = b'X', "expected the magic bytes");
        check(|b| b[9] = 2, "version 2 at byte 9; expected 1");
        check(|b| b[17] = 9, "element type 9 at byte 17 is unknown");
        check(|b| b[17] = 7, "is a float");
        check(|b| b.truncate(b.len() - 1), "holds 81 bytes; expected 82");
        check(|b| b[18] = 200, "for 200 sequences");
        check(|b| b[25] = 255, "more than any file");
        check(|b| b[26..34].fill(0), "document array of length 0");
        check(
            |b| b[37] = 0x80,
            "length -2147483645 of sequence 0 at byte 34",
        );
        check(
            |b| b[34] = 4,
            "offset 12 of sequence 1 at byte 50; expected 16",
        );
        check(
            |b| b[58] = 1,
            "document boundary 0 is 1 at byte 58; expected 0",
        );
        check(
            |b| b[66] = 3,
            "document boundary 1 is 3 at byte 66; expected 0 to 2",
        );
        check(
            |b| b[74] = 1,
            "document boundary 2 is 1 at byte 74; expected 2",
        );
    }

    #[test]
    fn a_missing_or_short_bin_is_refused() {
        let folder = folder();
        let prefix = folder.path().join("data");
        write(&prefix, Element::I32, &[&[1, 2, 3]]).expect("writes");
        let bin = folder.path().join("data.bin");
        std::fs::write(&bin, [0; 11]).expect("writes");
        let text = Indexed::open(&prefix).expect_err("refused").to_string();
        assert!(
            text.contains("data.bin: holds 11 bytes; expected 12"),
            "{text}"
        );
        std::fs::remove_file(&bin).expect("removes");
        let error = Indexed::open(&prefix).expect_err("refused");
        assert!(error.to_string().contains("data.bin"), "{error}");
        assert!(error.is_bad_request());
        let neither = Indexed::open(&folder.path().join("dota")).expect_err("refused");
        let text = neither.to_string();
        assert!(
            text.contains("dota: is no indexed dataset: expected"),
            "{text}"
        );
    }
}
