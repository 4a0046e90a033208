//! Tokenizers for plain text: bytes, the byte-pair encodings of tiktoken, or any Hugging Face `tokenizer.json`.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tiktoken_rs::{CoreBPE, O200K_BASE_PAT_STR};

use crate::error::Error;

thread_local! {
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is in a library that panics at what it does not expect, and is answered for.
pub fn in_library() -> bool {
    WITHIN.get()
}

/// From text to token ids.
pub enum Tokenizer {
    /// Every byte is a token; a vocabulary of 256.
    Byte,
    /// A byte-pair encoding with the size of its vocabulary: OpenAI's `o200k_base` or `cl100k_base`, compiled in
    /// (crate `tiktoken-rs`), or a `.tiktoken` file.
    Tiktoken(Box<CoreBPE>, u64),
    /// A `tokenizer.json`.
    HuggingFace(Box<tokenizers::Tokenizer>),
}

impl Tokenizer {
    /// The tokenizer of a name on the command line: `byte`, `o200k`, `cl100k`, or a file.
    pub fn named(name: impl AsRef<Path>) -> Result<Self, Error> {
        let path = name.as_ref();
        match path.to_str() {
            Some("byte") => return Ok(Self::Byte),
            // Ranks 0 to 199997 and two special tokens, the larger of which is 200018.
            Some(name @ "o200k") => {
                return compiled_in(name, tiktoken_rs::o200k_base().ok(), 200_019);
            }
            // Ranks 0 to 100255 and five special tokens, the largest of which is 100276.
            Some(name @ "cl100k") => {
                return compiled_in(name, tiktoken_rs::cl100k_base().ok(), 100_277);
            }
            _ => {}
        }
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("json") => hugging_face(path),
            Some("tiktoken") => tiktoken(path),
            _ => Err(Error::Request(format!(
                "unknown tokenizer {}; expected byte, o200k, cl100k, a tokenizer.json or a \
                 .tiktoken file",
                path.display()
            ))),
        }
    }

    /// The id of one token by its text, special ones included; none where it is no token.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match self {
            Self::Byte => match token.as_bytes() {
                [byte] => Some(u32::from(*byte)),
                _ => None,
            },
            Self::Tiktoken(encoding, _) => match encoding.encode_with_special_tokens(token)[..] {
                [id] => Some(id),
                _ => None,
            },
            Self::HuggingFace(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// Smallest vocabulary that holds every id it can produce, special tokens included.
    pub fn vocab_size(&self) -> u64 {
        match self {
            Self::Byte => 256,
            Self::Tiktoken(_, vocab_size) => *vocab_size,
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
            Self::Tiktoken(encoding, _) => {
                let text = utf8(text)?;
                check_blanks(text)?;
                Ok(encoding.encode_ordinary(text))
            }
            Self::HuggingFace(tokenizer) => {
                let text = utf8(text)?;
                check_blanks(text)?;
                let encode = || {
                    let encoding = tokenizer.encode_fast(text, false);
                    encoding.map_err(|error| error.to_string())
                };
                let encoding = of_library(encode);
                let encoding = encoding.map_err(|error| format!("cannot be tokenized: {error}"))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }
}

/// Blanks that may follow one another. What splits text looks ahead at the end of every run of them, and the
/// library that does it gives up after a million places to go back to (`fancy-regex`, `MAX_STACK`).
const MOST_BLANKS: usize = 500_000;

/// Refuses text with too many blanks in a row.
fn check_blanks(text: &str) -> Result<(), String> {
    if text.len() <= MOST_BLANKS {
        return Ok(());
    }
    let mut run = 0;
    for (at, character) in text.char_indices() {
        run = if character.is_whitespace() {
            run + 1
        } else {
            0
        };
        if run > MOST_BLANKS {
            return Err(format!(
                "holds more than {MOST_BLANKS} blanks in a row, up to byte {at}; expected fewer (`byte` reads \
                 anything)"
            ));
        }
    }
    Ok(())
}

fn compiled_in(name: &str, encoding: Option<CoreBPE>, vocab_size: u64) -> Result<Tokenizer, Error> {
    let encoding = encoding
        .ok_or_else(|| Error::Request(format!("tokenizer {name}: this build does not have it")))?;
    Ok(Tokenizer::Tiktoken(Box::new(encoding), vocab_size))
}

fn hugging_face(path: &Path) -> Result<Tokenizer, Error> {
    let text = std::fs::read(path).map_err(Error::io(path, "open"))?;
    let refuse =
        |why: String| Error::malformed(path, format!("is not a Hugging Face tokenizer: {why}"));
    let read = || tokenizers::Tokenizer::from_bytes(&text).map_err(|error| error.to_string());
    let tokenizer = of_library(read).map_err(refuse)?;
    let normalizer = serde_json::to_value(tokenizer.get_normalizer());
    let growth = normalizer.map_or(1.0, |normalizer| growth(&normalizer));
    if growth > MOST_GROWTH {
        return Err(Error::malformed(
            path,
            format!(
                "normalizer: may make a text more than {MOST_GROWTH} times as long, as its parts do one after the \
                 other; expected less"
            ),
        ));
    }
    Ok(Tokenizer::HuggingFace(Box::new(tokenizer)))
}

/// How many times as long a text may become before tokens are looked for in it. That of Llama 2, which writes three
/// bytes for a blank, makes it three times as long.
const MOST_GROWTH: f64 = 1024.0;

/// How many times as long a normalizer may make a text, as `tokenizers` writes it. Each of a sequence works on what
/// the one before it left, so that thirty that double a text never end.
fn growth(normalizer: &Value) -> f64 {
    let length = |value: &Value| value.as_str().map_or(0, str::len) as f64;
    match normalizer["type"].as_str() {
        Some("Sequence") => {
            let parts = normalizer["normalizers"].as_array();
            parts.into_iter().flatten().map(growth).product()
        }
        Some("Replace") => {
            let (pattern, content) = (&normalizer["pattern"], length(&normalizer["content"]));
            match length(&pattern["String"]) {
                // An expression may match nothing, beside every byte.
                0.0 => 1.0 + content,
                replaced => (content / replaced).max(1.0),
            }
        }
        // The longest that its table has in place of anything: after a trie, texts that end with a zero.
        Some("Precompiled") => {
            let table = normalizer["precompiled_charsmap"].as_str().unwrap_or("");
            let table = STANDARD.decode(table).unwrap_or_default();
            let texts = table.split(|&byte| byte == 0).map(<[u8]>::len);
            texts.max().unwrap_or(0).max(1) as f64
        }
        // Eighteen letters of two bytes for one of three; blanks around a letter, its marks apart, another case.
        Some("NFKC" | "NFKD" | "BertNormalizer") => 12.0,
        Some("NFC" | "NFD") => 3.0,
        Some("ByteLevel" | "Lowercase") => 2.0,
        _ => 1.0,
    }
}

/// What a library answers that panics at some of what it does not expect: such a panic is an answer, not a defect to
/// report ([`in_library`]).
fn of_library<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    WITHIN.set(true);
    let ended = panic::catch_unwind(AssertUnwindSafe(work));
    WITHIN.set(false);
    ended.unwrap_or_else(|payload| {
        let said = payload.downcast_ref::<String>().cloned();
        let said = said.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
        Err(said.unwrap_or_else(|| "the library that reads it fails".to_owned()))
    })
}

/// Reads a `.tiktoken` file: a line for each token, its bytes in base 64 and its rank. The file does not say
/// how text is split before pairs are merged: it is as `o200k_base` does it.
fn tiktoken(path: &Path) -> Result<Tokenizer, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io(path, "read"))?;
    let mut encoder: BTreeMap<Vec<u8>, u32> = BTreeMap::new();
    let mut ranks = HashMap::new();
    for (number, line) in (1..).zip(text.lines()) {
        let refuse = || {
            Error::malformed(
                path,
                format!("line {number}: found {line:?}, expected a token in base 64 and its rank"),
            )
        };
        let (token, rank) = line.split_once(' ').ok_or_else(refuse)?;
        let token = STANDARD.decode(token);
        let token = token.map_err(|_| refuse())?;
        let rank: u32 = rank.trim().parse().map_err(|_| refuse())?;
        if let Some(other) = ranks.insert(rank, number) {
            return Err(Error::malformed(
                path,
                format!(
                    "line {number}: found rank {rank}, which line {other} has; expected one of its own"
                ),
            ));
        }
        if encoder.insert(token, rank).is_some() {
            let reason = format!("line {number}: found {line:?}, whose token an earlier line has");
            return Err(Error::malformed(path, reason));
        }
    }
    // A byte that no pair begins with must still be a token.
    if let Some(byte) = (0..=u8::MAX).find(|&byte| !encoder.contains_key(&[byte][..])) {
        return Err(Error::malformed(
            path,
            format!("has no token of the byte {byte}; expected all 256"),
        ));
    }
    let vocab_size = encoder
        .values()
        .max()
        .map_or(0, |&rank| u64::from(rank) + 1);
    let encoder = encoder.into_iter().collect();
    let encoding = CoreBPE::new(encoder, HashMap::default(), O200K_BASE_PAT_STR);
    let encoding = encoding.map_err(|error| Error::malformed(path, error.to_string()))?;
    Ok(Tokenizer::Tiktoken(Box::new(encoding), vocab_size))
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Byte => "byte",
            Self::Tiktoken(..) => "tiktoken",
            Self::HuggingFace(_) => "tokenizer.json",
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
        assert_eq!(tokenizer.id_of("<|endoftext|>"), Some(199_999));
        assert_eq!(tokenizer.id_of("hello world"), None);
        let refused = tokenizer.encode(b"ab\xff").expect_err("not UTF-8");
        assert!(refused.starts_with("byte 2 is not UTF-8"), "{refused}");
    }

    #[test]
    fn blanks_without_end_are_refused_before_the_library_gives_up() {
        let tokenizer = Tokenizer::named("o200k").expect("compiled in");
        let run = |count: usize| tokenizer.encode(format!("a{}b", " ".repeat(count)).as_bytes());
        assert!(run(MOST_BLANKS).is_ok());
        for count in [MOST_BLANKS + 1, 1_100_000] {
            let refused = run(count).expect_err("too many");
            assert!(
                refused.contains("more than 500000 blanks in a row, up to byte 500001"),
                "{refused}"
            );
        }
        // Words may be as long as they like.
        assert!(tokenizer.encode("A".repeat(1_100_000).as_bytes()).is_ok());
    }

    #[test]
    fn a_tiktoken_file_is_read() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("small.tiktoken");
        let encode = |token: &[u8]| STANDARD.encode(token);
        let mut lines: Vec<String> = (0..=u8::MAX)
            .map(|byte| format!("{} {byte}", encode(&[byte])))
            .collect();
        lines.push(format!("{} 256", encode(b"to")));
        lines.push(format!("{} 300", encode(b" be")));
        let load = |lines: &[String]| {
            std::fs::write(&path, lines.join("\n")).expect("writes");
            Tokenizer::named(&path)
        };
        let tokenizer = load(&lines).expect("loads");
        assert_eq!(tokenizer.vocab_size(), 301);
        // " be" is no merge of two tokens but a token itself, and so found whole.
        assert_eq!(tokenizer.encode(b"to be"), Ok(vec![256, 300]));
        let refused = load(&lines[1..])
            .expect_err("a byte is missing")
            .to_string();
        assert!(refused.contains("no token of the byte 0"), "{refused}");
        for (at, line, expected) in [
            (
                256,
                format!("{} 255", encode(b"to")),
                "line 257: found rank 255, which line 256 has",
            ),
            (
                257,
                format!("{} 301", encode(b"to")),
                "whose token an earlier line has",
            ),
        ] {
            let mut twice = lines.clone();
            twice[at] = line;
            let refused = load(&twice).expect_err("twice").to_string();
            assert!(refused.contains(expected), "{refused}");
        }
        lines[3] = "!! 3".to_owned();
        let refused = load(&lines).expect_err("no base 64").to_string();
        assert!(refused.contains("line 4: found \"!! 3\""), "{refused}");
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
        let tokenizer = Tokenizer::named(&path).expect("loads");
        assert_eq!(tokenizer.vocab_size(), 5);
        assert_eq!(
            tokenizer.encode(b"to be or not to bee"),
            Ok(vec![1, 2, 3, 4, 1, 0])
        );
        // The others make the library panic: the end inside a decoder, a merge shorter than its prefix.
        let short = r#"{"added_tokens": [], "model": {"type": "BPE", "continuing_subword_prefix": "xx",
            "vocab": {"t": 0, "e": 1}, "merges": [["t", "e"]]}}"#;
        for text in ["{}", "{\"added_tokens\":[],\"decoder\":", short] {
            std::fs::write(&path, text).expect("writes");
            let refused = Tokenizer::named(&path);
            let text = refused.expect_err("refused").to_string();
            assert!(text.contains("is not a Hugging Face tokenizer"), "{text}");
        }
    }

    #[test]
    fn a_normalizer_that_makes_texts_longer_without_end_is_refused() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("tokenizer.json");
        let load = |normalizers: &[Value]| {
            let normalizer = json!({ "type": "Sequence", "normalizers": normalizers });
            let model = json!({ "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" });
            let description =
                json!({ "added_tokens": [], "normalizer": normalizer, "model": model });
            std::fs::write(&path, description.to_string()).expect("writes");
            Tokenizer::named(&path)
        };
        let replace = |kind: &str, pattern: &str, content: &str| json!({ "type": "Replace", "pattern": { kind: pattern }, "content": content });
        // Of Llama 2.
        let llama = replace("String", " ", "\u{2581}");
        for doubled in [replace("Regex", "", " "), replace("String", "a", "aa")] {
            let all = |count: usize| {
                let mut all = vec![doubled.clone(); count];
                all.insert(0, llama.clone());
                all
            };
            load(&all(8)).expect("three times 256 is below the bound");
            let refused = load(&all(9)).expect_err("refused").to_string();
            let expected = "normalizer: may make a text more than 1024 times as long";
            assert!(refused.contains(expected), "{refused}");
            load(&all(60)).expect_err("not tried");
        }
        let decomposed = [
            replace("String", "\u{644}", "\u{fdfa}"),
            json!({ "type": "NFKD" }),
        ];
        load(&vec![decomposed; 10].concat())
            .expect_err("ten times eighteen letters, and one for each of them");
        // What takes bytes away gives none to others.
        load(&vec![replace("String", "aaa", "a"); 60]).expect("shorter");
    }

    #[test]
    fn unknown_names_and_missing_files_are_refused() {
        let unknown = Tokenizer::named("gpt2").expect_err("refused").to_string();
        assert!(
            unknown.contains("expected byte, o200k, cl100k"),
            "{unknown}"
        );
        let missing = Tokenizer::named("no/such.json").expect_err("refused");
        assert!(
            missing
                .to_string()
                .starts_with("no/such.json: could not open"),
            "{missing}"
        );
    }
}
