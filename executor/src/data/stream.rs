//! [`TokenStream`]: all token ids of some documents, and where each begins.

use std::ops::Range;
use std::path::{Path, PathBuf};

use super::indexed::Indexed;
use super::tokenizer::Tokenizer;
use crate::error::Error;

/// All token ids of some documents, one after the other.
#[derive(Debug)]
pub enum TokenStream {
    /// A Megatron indexed dataset on disk.
    Indexed(Indexed),
    /// Tokenized text in memory.
    Text {
        /// The files it was read from, with the token each begins at.
        files: Vec<(PathBuf, u64)>,
        /// The ids.
        ids: Vec<u32>,
    },
}

impl TokenStream {
    /// Opens a Megatron dataset by its prefix.
    pub fn indexed(prefix: &Path) -> Result<Self, Error> {
        Indexed::open(prefix).map(Self::Indexed)
    }

    /// Reads and tokenizes text files; each is a document, and nothing is put between them.
    pub fn text(paths: &[PathBuf], tokenizer: &Tokenizer) -> Result<Self, Error> {
        let mut files = Vec::with_capacity(paths.len());
        let mut ids = Vec::new();
        for path in paths {
            let text = std::fs::read(path).map_err(Error::io(path, "read"))?;
            files.push((path.clone(), ids.len() as u64));
            let encoded = tokenizer.encode(&text);
            ids.extend(encoded.map_err(|reason| Error::malformed(path, reason))?);
        }
        Ok(Self::Text { files, ids })
    }

    /// Ids that are already in memory.
    pub fn of_ids(name: &str, ids: Vec<u32>) -> Self {
        Self::Text {
            files: vec![(PathBuf::from(name), 0)],
            ids,
        }
    }

    /// Refuses tokens that are not those that were written, where that can be told. All are read.
    pub fn verify(&self) -> Result<(), Error> {
        match self {
            Self::Indexed(data) => data.verify(),
            Self::Text { .. } => Ok(()),
        }
    }

    /// Tokens there are.
    pub fn num_tokens(&self) -> u64 {
        match self {
            Self::Indexed(data) => data.num_tokens(),
            Self::Text { ids, .. } => ids.len() as u64,
        }
    }

    /// Documents there are: sequences of an indexed dataset, files of text.
    pub fn num_documents(&self) -> u64 {
        match self {
            Self::Indexed(data) => data.num_sequences(),
            Self::Text { files, .. } => files.len() as u64,
        }
    }

    /// The token that document number `document` begins with; of one after the last, the tokens there are.
    pub(super) fn start_of(&self, document: u64) -> Result<u64, Error> {
        match self {
            Self::Indexed(data) => data.start_of(document),
            Self::Text { files, ids } => Ok(files
                .get(document as usize)
                .map_or(ids.len() as u64, |(_, first)| *first)),
        }
    }

    /// The tokens of `range` that documents begin with, in order; of empty documents, that of the next.
    pub(super) fn begins_in(&self, range: Range<u64>) -> Result<Vec<u64>, Error> {
        match self {
            Self::Indexed(data) => data.begins_in(range),
            Self::Text { files, .. } => Ok(files
                .iter()
                .map(|(_, first)| *first)
                .filter(|first| range.contains(first))
                .collect()),
        }
    }

    /// Tokens `range`, each proven below `vocab_size`.
    pub(super) fn tokens(&self, range: Range<u64>, vocab_size: u64) -> Result<Vec<i32>, Error> {
        let ids: Vec<i64> = match self {
            Self::Indexed(data) => data.ids(range.clone())?,
            Self::Text { ids, .. } => ids[range.start as usize..range.end as usize]
                .iter()
                .map(|&id| i64::from(id))
                .collect(),
        };
        let legal = 0..vocab_size as i64;
        match ids.iter().position(|id| !legal.contains(id)) {
            None => Ok(ids.into_iter().map(|id| id as i32).collect()),
            Some(i) => {
                let (path, first) = self.file_of(range.start + i as u64);
                Err(Error::malformed(
                    path,
                    format!(
                        "token id {} at position {}; expected ids below {vocab_size}, the model's \
                         vocabulary: was the data tokenized for another model?",
                        ids[i],
                        range.start + i as u64 - first
                    ),
                ))
            }
        }
    }

    /// The file a token is in, and the token that file begins with.
    fn file_of(&self, token: u64) -> (&Path, u64) {
        match self {
            Self::Indexed(data) => (data.path(), 0),
            Self::Text { files, .. } => {
                let after = files.partition_point(|(_, first)| *first <= token);
                let (path, first) = &files[after.max(1) - 1];
                (path, *first)
            }
        }
    }

    /// A name for what some tokens are: BLAKE3 of how many there are and of up to 64 stretches of 1024, spaced
    /// evenly, with where documents begin in them if `begins`. The same whether they are text or of a dataset.
    pub(super) fn fingerprint(
        &self,
        tokens: &Range<u64>,
        vocab_size: u64,
        begins: bool,
    ) -> Result<blake3::Hash, Error> {
        const STRETCHES: u64 = 64;
        const TOKENS: u64 = 1024;
        let all = tokens.end - tokens.start;
        let mut hash = blake3::Hasher::new();
        hash.update(&all.to_le_bytes());
        let last = all.saturating_sub(TOKENS);
        let mut after = 0;
        for stretch in 0..STRETCHES {
            let start = (last * stretch / (STRETCHES - 1)).max(after);
            after = (start + TOKENS).min(all);
            let stretch = tokens.start + start..tokens.start + after;
            for token in self.tokens(stretch.clone(), vocab_size)? {
                hash.update(&token.to_le_bytes());
            }
            if begins {
                for token in self.begins_in(stretch)? {
                    hash.update(&(token - tokens.start).to_le_bytes());
                }
            }
        }
        Ok(hash.finalize())
    }

    /// The first file, for errors about the whole.
    pub(super) fn name(&self) -> &Path {
        self.file_of(0).0
    }
}
