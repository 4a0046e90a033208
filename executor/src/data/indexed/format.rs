//! What both files agree on: the header of an index, and how token ids are spelled.

use std::path::{Path, PathBuf};

pub(super) const MAGIC: [u8; 9] = *b"MMIDIDX\0\0";
pub(super) const VERSION: u64 = 1;
pub(super) const HEADER_BYTES: u64 = 34;

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
    pub(super) fn from_code(code: u8) -> Result<Self, String> {
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

    pub(super) fn code(self) -> u8 {
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

    pub(super) fn decode(self, bytes: &[u8]) -> Vec<i64> {
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

    pub(super) fn encode(self, id: i32) -> Option<Vec<u8>> {
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

/// `PREFIX` with `.bin` or `.idx` appended (a prefix may itself contain dots).
pub(super) fn with_ending(prefix: &Path, ending: &str) -> PathBuf {
    let mut name = prefix.as_os_str().to_owned();
    name.push(".");
    name.push(ending);
    name.into()
}
