//! Tokenizers for plain text: bytes, o200k, or any Hugging Face `tokenizer.json`.

use std::path::{Path, PathBuf};

use crate::error::Error;

/// From text to token ids.
pub enum Tokenizer {
    /// Every byte is a token; a vocabulary of 256.
    Byte,
    /// The byte-pair encoding of OpenAI's `o200k_base`, compiled in (crate `tiktoken-rs`).
    O200k(Box<tiktoken_rs::CoreBPE>),
    /// A `tokenizer.json`.
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// The tokenizer of a name on the command line: `byte`, `o200k`, or a file.
    pub fn named(name: &str) -> Result<Self, Error> {
        match name {
            "byte" => Ok(Self::Byte),
            "o200k" => match tiktoken_rs::o200k_base() {
                Ok(encoding) => Ok(Self::O200k(Box::new(encoding))),
                Err(error) => Err(Error::Request(format!("tokenizer o200k: {error}"))),
            },
            file if Path::new(file)
                .extension()
                .is_some_and(|ending| ending == "json") =>
            {
                let path = PathBuf::from(file);
                std::fs::metadata(&path).map_err(Error::io(&path, "open"))?;
                match tokenizers::Tokenizer::from_file(&path) {
                    Ok(tokenizer) => Ok(Self::HuggingFace(Box::new(tokenizer))),
                    Err(error) => Err(Error::malformed(
                        &path,
                        format!("is not a Hugging Face tokenizer: {error}"),
                    )),
                }
            }
            other => Err(Error::Request(format!(
                "unknown tokenizer {other:?}; expected byte, o200k or a tokenizer.json"
            ))),
        }
    }

    /// Smallest vocabulary that holds every id it can produce, special tokens included.
    pub fn vocab_size(&self) -> u64 {
        match self {
            Self::Byte => 256,
            // Ranks 0 to 199997 and two special tokens, the larger of which is 200018.
            Self::O200k(_) => 200_019,
            Self::HuggingFace(tokenizer) => {
                let ids = tokenizer.get_vocab(true);
                ids.values().max().map_or(0, |&id| u64::from(id) + 1)
            }
        }
    }

    /// The ids of a text, without special tokens around it. The error says what is wrong with the
    /// text.
    pub fn encode(&self, text: &[u8]) -> Result<Vec<u32>, String> {
        let utf8 = |text| {
            std::str::from_utf8(text).map_err(|error| {
                format!(
                    "byte {} is not UTF-8; this tokenizer reads UTF-8 text (`byte` reads anything)",
                    error.valid_up_to()
                )
            })
        };
        match self {
            Self::Byte => Ok(text.iter().map(|&byte| u32::from(byte)).collect()),
            Self::O200k(encoding) => Ok(encoding.encode_ordinary(utf8(text)?)),
            Self::HuggingFace(tokenizer) => {
                let encoding = tokenizer.encode_fast(utf8(text)?, false);
                let encoding = encoding.map_err(|error| format!("cannot be tokenized: {error}"))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Byte => "byte",
            Self::O200k(_) => "o200k",
            Self::HuggingFace(_) => "tokenizer.json",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_themselves() {
        let tokenizer = Tokenizer::named("byte").expect("known");
        assert_eq!(tokenizer.encode(&[0, 255, b'a']), Ok(vec![0, 255, 97]));
        assert_eq!(tokenizer.vocab_size(), 256);
    }

    #[test]
    fn golden_o200k_ids() {
        let tokenizer = Tokenizer::named("o200k").expect("compiled in");
        // Published by OpenAI's tiktoken for o200k_base: "hello world" is 24912, 2375.
        assert_eq!(tokenizer.encode(b"hello world"), Ok(vec![24912, 2375]));
        let refused = tokenizer.encode(b"ab\xff").expect_err("not UTF-8");
        assert!(refused.starts_with("byte 2 is not UTF-8"), "{refused}");
    }

    #[test]
    fn a_tokenizer_json_is_read() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("tokenizer.json");
        let description = r#"{"version": "1.0", "truncation": null, "padding": null,
            "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": null, "decoder": null, "model": {"type": "WordLevel",
            "vocab": {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, "unk_token": "[UNK]"}}"#;
        std::fs::write(&path, description).expect("writes");
        let tokenizer = Tokenizer::named(path.to_str().expect("UTF-8 path")).expect("loads");
        assert_eq!(tokenizer.vocab_size(), 5);
        assert_eq!(
            tokenizer.encode(b"to be or not to bee"),
            Ok(vec![1, 2, 3, 4, 1, 0])
        );
        std::fs::write(&path, "{}").expect("writes");
        let refused = Tokenizer::named(path.to_str().expect("UTF-8 path")).expect_err("refused");
        let text = refused.to_string();
        assert!(text.contains("is not a Hugging Face tokenizer"), "{text}");
    }

    #[test]
    fn unknown_names_and_missing_files_are_refused() {
        let unknown = Tokenizer::named("gpt2").expect_err("refused").to_string();
        assert!(unknown.contains("expected byte, o200k or a"), "{unknown}");
        let missing = Tokenizer::named("no/such.json").expect_err("refused");
        assert!(
            missing
                .to_string()
                .starts_with("no/such.json: could not open"),
            "{missing}"
        );
    }
}
