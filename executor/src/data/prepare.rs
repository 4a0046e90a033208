//! [`Preparation`]: text, tokenized into an indexed dataset that training reads from disk.
//!
//! A line of a `.jsonl` or `.json` file is a document, whose text is the value of one key; any other file
//! is one document. Either may be compressed (`.gz`). Documents keep their order. They are tokenized on
//! all cores, a batch at a time, so that memory does not grow with the corpus.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek as _};
use std::num::NonZero;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use flate2::read::MultiGzDecoder;
use serde_json::Value;

use super::Tokenizer;
use super::indexed::{Element, write_documents};
use crate::error::Error;

/// Bytes of text that are tokenized together.
const BATCH: usize = 16 << 20;
/// Buffer of a file that is read.
const BUFFER: usize = 1 << 20;

/// What is to become a dataset.
#[derive(Debug)]
pub struct Preparation<'a> {
    /// Files of text.
    pub inputs: &'a [PathBuf],
    /// The key of a JSON line whose value is the text.
    pub key: &'a str,
    /// From text to ids.
    pub tokenizer: &'a Tokenizer,
    /// The id that ends every document, if any does.
    pub eod: Option<u32>,
}

/// What became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prepared {
    /// Documents written.
    pub documents: u64,
    /// Documents left out, as they have no text.
    pub empty: u64,
    /// Tokens written, ends of documents among them.
    pub tokens: u64,
    /// Bytes of text read.
    pub text_bytes: u64,
    /// Type of an id.
    pub element: Element,
}

/// The text of a document, and the line of its file where it is one.
struct Document {
    line: Option<u64>,
    text: Vec<u8>,
}

impl Preparation<'_> {
    /// Bytes of all inputs on disk; what `read` of [`Preparation::write`] counts up to.
    pub fn bytes(&self) -> Result<u64, Error> {
        let size = |path: &PathBuf| {
            Ok(std::fs::metadata(path)
                .map_err(Error::io(path, "open"))?
                .len())
        };
        self.inputs.iter().map(size).sum()
    }

    /// Smallest vocabulary that holds every id it can write.
    pub fn vocab_size(&self) -> u64 {
        let end = self.eod.map_or(0, |eod| u64::from(eod) + 1);
        self.tokenizer.vocab_size().max(end)
    }

    /// Writes `PREFIX.bin` and `PREFIX.idx`. `read` is told how many bytes of the inputs have been read, and may stop it:
    /// then nothing is written, and there is nothing to return.
    pub fn write(
        &self,
        prefix: &Path,
        read: &dyn Fn(u64) -> ControlFlow<()>,
    ) -> Result<Option<Prepared>, Error> {
        let element = Element::for_vocab(self.vocab_size());
        let mut prepared = Prepared {
            documents: 0,
            empty: 0,
            tokens: 0,
            text_bytes: 0,
            element,
        };
        let mut before = 0;
        let written = write_documents(prefix, element, |out| {
            for path in self.inputs {
                let mut input = Input::open(path)?;
                while let Some(batch) = input.batch(self.key)? {
                    for encoded in self.encode_all(path, &batch) {
                        let (text_bytes, ids) = encoded?;
                        prepared.text_bytes += text_bytes;
                        if text_bytes == 0 {
                            prepared.empty += 1;
                            continue;
                        }
                        prepared.documents += 1;
                        prepared.tokens += ids.len() as u64;
                        out.push(&ids)?;
                    }
                    if read(before + input.position()?).is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                before += input.position()?;
            }
            if prepared.documents == 0 {
                return Err(Error::malformed(
                    self.inputs.first().map_or(Path::new(""), PathBuf::as_path),
                    "no document has any text".to_owned(),
                ));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(written.is_continue().then_some(prepared))
    }

    /// [`Preparation::encode`] of some documents, in order, on all cores.
    fn encode_all(&self, path: &Path, batch: &[Document]) -> Vec<Result<(u64, Vec<u32>), Error>> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut encoded = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(document) = batch.get(at) else {
                    return encoded;
                };
                encoded.push((at, self.encode(path, document)));
            }
        };
        let mut encoded: Vec<_> = thread::scope(|scope| {
            let threads = 0..threads.min(batch.len());
            let workers: Vec<_> = threads.map(|_| scope.spawn(work)).collect();
            let ended = workers.into_iter().map(thread::ScopedJoinHandle::join);
            ended
                .flat_map(|ended| ended.expect("tokenizers do not panic"))
                .collect()
        });
        encoded.sort_by_key(|(at, _)| *at);
        encoded.into_iter().map(|(_, ids)| ids).collect()
    }

    /// Bytes of a document's text, and its ids with its end.
    fn encode(&self, path: &Path, document: &Document) -> Result<(u64, Vec<u32>), Error> {
        let ids = self.tokenizer.encode(&document.text);
        let mut ids = ids.map_err(|reason| match document.line {
            Some(line) => Error::malformed(path, format!("line {line}: {reason}")),
            None => Error::malformed(path, reason),
        })?;
        ids.extend(self.eod);
        Ok((document.text.len() as u64, ids))
    }
}

/// A file that is being read.
struct Input<'a> {
    path: &'a Path,
    /// The same open file as `text` reads, to see how far that is.
    file: File,
    text: Box<dyn BufRead>,
    /// Whether lines are documents, and how many were read.
    lines: Option<u64>,
    ended: bool,
}

impl<'a> Input<'a> {
    fn open(path: &'a Path) -> Result<Self, Error> {
        let file = File::open(path).map_err(Error::io(path, "open"))?;
        let same = file.try_clone().map_err(Error::io(path, "open"))?;
        let name = path
            .file_name()
            .map_or_else(String::new, |name| name.to_string_lossy().to_lowercase());
        let (name, text): (&str, Box<dyn BufRead>) = match name.strip_suffix(".gz") {
            Some(name) => {
                let compressed = BufReader::with_capacity(BUFFER, file);
                (
                    name,
                    Box::new(BufReader::with_capacity(
                        BUFFER,
                        MultiGzDecoder::new(compressed),
                    )),
                )
            }
            None => (&name, Box::new(BufReader::with_capacity(BUFFER, file))),
        };
        let is_lines = [".jsonl", ".json"]
            .iter()
            .any(|ending| name.ends_with(ending));
        Ok(Self {
            path,
            file: same,
            text,
            lines: is_lines.then_some(0),
            ended: false,
        })
    }

    fn position(&mut self) -> Result<u64, Error> {
        self.file
            .stream_position()
            .map_err(Error::io(self.path, "read"))
    }

    /// The next documents, about [`BATCH`] bytes of them; none at the end of the file.
    fn batch(&mut self, key: &str) -> Result<Option<Vec<Document>>, Error> {
        if self.ended {
            return Ok(None);
        }
        let Some(mut line) = self.lines else {
            let mut text = Vec::new();
            self.text
                .read_to_end(&mut text)
                .map_err(Error::io(self.path, "read"))?;
            self.ended = true;
            return Ok(Some(vec![Document { line: None, text }]));
        };
        let mut batch = Vec::new();
        let mut bytes = 0;
        let mut json = Vec::new();
        while bytes < BATCH {
            json.clear();
            let read = self.text.read_until(b'\n', &mut json);
            bytes += read.map_err(Error::io(self.path, "read"))?;
            if json.is_empty() {
                self.ended = true;
                break;
            }
            line += 1;
            if json.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let text = text_of(&json, key)
                .map_err(|reason| Error::malformed(self.path, format!("line {line}: {reason}")))?;
            batch.push(Document {
                line: Some(line),
                text: text.into_bytes(),
            });
        }
        self.lines = Some(line);
        Ok(Some(batch))
    }
}

/// The text of a JSON line.
fn text_of(json: &[u8], key: &str) -> Result<String, String> {
    let value: Value =
        serde_json::from_slice(json).map_err(|error| format!("is no JSON: {error}"))?;
    let Value::Object(mut object) = value else {
        return Err(format!("is no JSON object with the key `{key}`"));
    };
    match object.remove(key) {
        Some(Value::String(text)) => Ok(text),
        Some(other) => Err(format!("`{key}` is {other}; expected a string")),
        None => {
            let keys: Vec<String> = object.keys().map(|key| format!("`{key}`")).collect();
            let found = if keys.is_empty() {
                "none".to_owned()
            } else {
                keys.join(", ")
            };
            Err(format!("has no key `{key}`; it has {found}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::super::{Indexed, TokenStream};
    use super::*;

    fn written(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("writes");
        path
    }

    fn prepare(inputs: &[PathBuf], eod: Option<u32>, prefix: &Path) -> Result<Prepared, Error> {
        let preparation = Preparation {
            inputs,
            key: "text",
            tokenizer: &Tokenizer::Byte,
            eod,
        };
        preparation
            .write(prefix, &|read| {
                assert!(read <= preparation.bytes().expect("they are there"));
                ControlFlow::Continue(())
            })
            .map(|prepared| prepared.expect("nobody stops it"))
    }

    #[test]
    fn golden_lines_and_files_are_documents_in_order() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let folder = folder.path();
        let lines = b"{\"text\": \"ab\", \"id\": 7}\n\n{\"text\": \"\"}\n{\"text\": \"\\u00e9\"}";
        let mut compressed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        compressed.write_all(lines).expect("memory");
        let inputs = [
            written(folder, "a.jsonl", lines),
            written(folder, "b.txt", b"cd\n"),
            written(folder, "c.JSONL.gz", &compressed.finish().expect("memory")),
        ];
        let prefix = folder.join("set");
        let prepared = prepare(&inputs, Some(0), &prefix).expect("prepares");
        let expected = Prepared {
            documents: 5,
            empty: 2,
            tokens: 16,
            text_bytes: 11,
            element: Element::U16,
        };
        assert_eq!(prepared, expected);
        let data = Indexed::open(&prefix).expect("opens");
        assert_eq!(data.num_documents(), 5);
        let ids: Vec<i64> = "ab\0é\0cd\n\0ab\0é\0".bytes().map(i64::from).collect();
        assert_eq!(data.ids(0..16).expect("reads"), ids);
    }

    #[test]
    fn what_is_stopped_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let inputs = [written(folder.path(), "a.txt", b"ab")];
        let preparation = Preparation {
            inputs: &inputs,
            key: "text",
            tokenizer: &Tokenizer::Byte,
            eod: None,
        };
        let stopped = preparation.write(&folder.path().join("set"), &|_| ControlFlow::Break(()));
        assert_eq!(stopped.expect("no error"), None);
        let left = std::fs::read_dir(folder.path()).expect("readable").count();
        assert_eq!(left, 1, "the text alone");
    }

    #[test]
    fn law_batches_do_not_show() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let folder = folder.path();
        let words = "word ".repeat(1000);
        // More than one batch.
        let count = BATCH / words.len() + 100;
        let documents: Vec<String> = (0..count).map(|i| format!("{i} {words}")).collect();
        let lines: Vec<String> = documents
            .iter()
            .map(|text| format!("{{\"text\": \"{text}\"}}"))
            .collect();
        let input = written(folder, "many.jsonl", lines.join("\n").as_bytes());
        let prefix = folder.join("set");
        let prepared = prepare(&[input], None, &prefix).expect("prepares");
        assert_eq!((prepared.documents, prepared.empty), (count as u64, 0));
        let all = documents.concat();
        let ids = TokenStream::indexed(&prefix).expect("opens");
        assert_eq!(ids.num_tokens(), all.len() as u64);
        let ids = ids.tokens(0..all.len() as u64, 256).expect("reads");
        assert!(ids.into_iter().eq(all.bytes().map(i32::from)));
    }

    #[test]
    fn what_is_no_document_is_named_with_file_and_line_and_nothing_is_written() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let folder = folder.path();
        for (name, bytes, expected) in [
            (
                "a.jsonl",
                &b"{\"text\": \"a\"}\n{"[..],
                "a.jsonl: line 2: is no JSON: ",
            ),
            (
                "b.jsonl",
                b"[1]",
                "b.jsonl: line 1: is no JSON object with the key `text`",
            ),
            (
                "c.jsonl",
                b"{\"body\": 1, \"url\": 2}",
                "line 1: has no key `text`; it has `body`, `url`",
            ),
            (
                "d.jsonl",
                b"{\"text\": null}",
                "line 1: `text` is null; expected a string",
            ),
            ("e.jsonl", b"\n\n", "e.jsonl: no document has any text"),
            ("f.txt.gz", b"plain", "f.txt.gz: could not read"),
        ] {
            let input = written(folder, name, bytes);
            let prefix = folder.join("set");
            let refused = prepare(&[input], None, &prefix)
                .expect_err(name)
                .to_string();
            assert!(refused.contains(expected), "{refused} lacks {expected}");
            let left = Indexed::open(&prefix)
                .expect_err("nothing is there")
                .to_string();
            assert!(left.contains("is no indexed dataset"), "{left}");
        }
        let missing = prepare(&[folder.join("none")], None, &folder.join("set"));
        assert!(
            missing
                .expect_err("missing")
                .to_string()
                .contains("none: could not open")
        );
    }
}
