//! Megatron indexed datasets: token ids in `PREFIX.bin`, their structure in `PREFIX.idx`.
//!
//! The format is that of `megatron/core/datasets/indexed_dataset.py` (NVIDIA Megatron-LM, d98e8a64):
//! after a header of 34 bytes, sequence lengths (i32), their byte offsets (i64) and the document
//! boundaries (i64), all little-endian and unaligned. Sequences lie back to back in `.bin`, so the
//! stream of all documents in order is the file from its beginning; the index is checked in full
//! when a dataset is opened, then only the number of tokens and their type are kept. Files are read
//! at positions, never mapped: a file that is cut while it is in use is an error, not a signal.

use std::fs::File;
use std::io::{BufWriter, Read, Write as _};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::files::write_atomically;

const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
const VERSION: u64 = 1;
const HEADER_BYTES: u64 = 34;

/// Type of a token id in `.bin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the primitive types")]
pub enum Element {
    U8,
    I8,
    I16,
    I32,
    I64,
    U16,
}

impl Element {
    fn from_code(code: u8) -> Result<Self, String> {
        match code {
            1 => Ok(Self::U8),
            2 => Ok(Self::I8),
            3 => Ok(Self::I16),
            4 => Ok(Self::I32),
            5 => Ok(Self::I64),
            6 | 7 => Err(format!(
                "element type {code} at byte 17 is a float, which no token id is; \
                 expected an integer type (1 u8, 2 i8, 3 i16, 4 i32, 5 i64, 8 u16)"
            )),
            8 => Ok(Self::U16),
            _ => Err(format!(
                "element type {code} at byte 17 is unknown; \
                 expected 1 u8, 2 i8, 3 i16, 4 i32, 5 i64 or 8 u16"
            )),
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::U8 => 1,
            Self::I8 => 2,
            Self::I16 => 3,
            Self::I32 => 4,
            Self::I64 => 5,
            Self::U16 => 8,
        }
    }

    /// Bytes of one id.
    pub fn bytes(self) -> u64 {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::I16 | Self::U16 => 2,
            Self::I32 => 4,
            Self::I64 => 8,
        }
    }

    /// The type Megatron's tools choose for a vocabulary.
    pub fn for_vocab(vocab_size: u64) -> Self {
        if vocab_size < 65_500 {
            Self::U16
        } else {
            Self::I32
        }
    }

    fn decode(self, bytes: &[u8]) -> Vec<i64> {
        fn each<const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> i64) -> Vec<i64> {
            let (chunks, rest) = bytes.as_chunks::<N>();
            assert!(rest.is_empty(), "whole elements are read");
            chunks.iter().map(|&chunk| of(chunk)).collect()
        }
        match self {
            Self::U8 => each(bytes, |b| u8::from_le_bytes(b).into()),
            Self::I8 => each(bytes, |b| i8::from_le_bytes(b).into()),
            Self::I16 => each(bytes, |b| i16::from_le_bytes(b).into()),
            Self::I32 => each(bytes, |b| i32::from_le_bytes(b).into()),
            Self::I64 => each(bytes, i64::from_le_bytes),
            Self::U16 => each(bytes, |b| u16::from_le_bytes(b).into()),
        }
    }

    fn encode(self, id: i32) -> Option<Vec<u8>> {
        Some(match self {
            Self::U8 => u8::try_from(id).ok()?.to_le_bytes().to_vec(),
            Self::I8 => i8::try_from(id).ok()?.to_le_bytes().to_vec(),
            Self::I16 => i16::try_from(id).ok()?.to_le_bytes().to_vec(),
            Self::I32 => id.to_le_bytes().to_vec(),
            Self::I64 => i64::from(id).to_le_bytes().to_vec(),
            Self::U16 => u16::try_from(id).ok()?.to_le_bytes().to_vec(),
        })
    }
}

/// An open dataset.
#[derive(Debug)]
pub struct Indexed {
    bin_path: PathBuf,
    bin: File,
    element: Element,
    num_tokens: u64,
    num_documents: u64,
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
        })
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

/// What an index says, once it is proven consistent.
struct Index {
    element: Element,
    num_tokens: u64,
    num_documents: u64,
}

impl Index {
    fn read(path: &Path) -> Result<Self, Error> {
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
        })
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
    let offsets_at = lengths_at + 4 * sequences;
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

/// Writes a dataset of one sequence a document.
pub fn write(prefix: &Path, element: Element, documents: &[&[i32]]) -> Result<(), Error> {
    let bin_path = with_ending(prefix, "bin");
    for (document, ids) in documents.iter().enumerate() {
        if let Some(position) = ids.iter().position(|&id| element.encode(id).is_none()) {
            return Err(Error::malformed(
                &bin_path,
                format!(
                    "token id {} at position {position} of document {document} does not fit {element:?}",
                    ids[position]
                ),
            ));
        }
    }
    write_atomically(&bin_path, |out| {
        let mut out = BufWriter::new(out);
        for &id in documents.iter().copied().flatten() {
            out.write_all(&element.encode(id).expect("checked above"))?;
        }
        out.flush()
    })?;
    write_atomically(&with_ending(prefix, "idx"), |out| {
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&[element.code()])?;
        out.write_all(&(documents.len() as u64).to_le_bytes())?;
        out.write_all(&(documents.len() as u64 + 1).to_le_bytes())?;
        for ids in documents {
            out.write_all(&(ids.len() as i32).to_le_bytes())?;
        }
        let mut offset = 0_i64;
        for ids in documents {
            out.write_all(&offset.to_le_bytes())?;
            offset += (ids.len() as u64 * element.bytes()) as i64;
        }
        for boundary in 0..=documents.len() as i64 {
            out.write_all(&boundary.to_le_bytes())?;
        }
        Ok(())
    })
}

/// `PREFIX` with `.bin` or `.idx` appended (a prefix may itself contain dots).
fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
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
