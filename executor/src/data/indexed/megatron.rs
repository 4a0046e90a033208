//! Megatron-Core's own loader reads what is written here, and what its builder writes is read here.

use std::path::Path;
use std::process::{Command, Stdio};

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Deserialize;

use super::*;
use crate::data::{Preparation, Tokenizer};

/// Documents of sequences of ids.
type Documents = Vec<Vec<Vec<i32>>>;

/// A dataset as Megatron-Core reads it.
#[derive(Deserialize)]
struct Found {
    #[serde(rename = "type")]
    element: String,
    documents: Documents,
}

/// What the oracle answers to `arguments`, told `input`.
fn megatron(arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let python = std::env::var("MOEFOLD_MEGATRON")
        .expect("MOEFOLD_MEGATRON is a python that has megatron-core");
    let oracle = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/oracles/megatron_dataset.py");
    let mut child = Command::new(python)
        .arg(oracle)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python runs");
    let mut pipe = child.stdin.take().expect("a pipe");
    std::io::Write::write_all(&mut pipe, input).expect("writes");
    drop(pipe);
    let ended = child.wait_with_output().expect("python ends");
    let errors = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.success(), "{arguments:?}: {errors}");
    ended.stdout
}

fn read(prefix: &Path) -> Found {
    let answer = megatron(&["read", prefix.to_str().expect("UTF-8")], b"");
    serde_json::from_slice(&answer).expect("an answer")
}

/// Forty documents of at most `sequences` sequences of at most 60 ids below `vocab`, some of them empty.
fn documents(rng: &mut ChaCha8Rng, sequences: usize, vocab: i32) -> Documents {
    let mut sequence = |_| {
        let length = rng.random_range(0..=60);
        (0..length).map(|_| rng.random_range(0..vocab)).collect()
    };
    let mut number = 0;
    let mut document = |_| {
        number = number % sequences + 1;
        (0..number).map(&mut sequence).collect()
    };
    (0..40).map(&mut document).collect()
}

#[test]
#[ignore = "needs Megatron-Core: MOEFOLD_MEGATRON=/path/to/python"]
fn oracle_megatron_core_reads_what_is_written_and_the_reverse() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut rng = ChaCha8Rng::seed_from_u64(7);
    for (element, name, vocab) in [
        (Element::U8, "uint8", 256),
        (Element::I8, "int8", 128),
        (Element::I16, "int16", 1 << 15),
        (Element::U16, "uint16", 1 << 16),
        (Element::I32, "int32", i32::MAX),
        (Element::I64, "int64", i32::MAX),
    ] {
        let ours = folder.path().join(format!("ours.{name}"));
        let of_one: Documents = documents(&mut rng, 1, vocab);
        let flat: Vec<&[i32]> = of_one.iter().map(|document| &document[0][..]).collect();
        write(&ours, element, &flat).expect("writes");
        let found = read(&ours);
        assert_eq!((found.element.as_str(), found.documents), (name, of_one));

        let theirs = folder.path().join(format!("theirs.{name}"));
        let of_many = documents(&mut rng, 4, vocab);
        let said = serde_json::to_vec(&of_many).expect("JSON");
        megatron(&["write", theirs.to_str().expect("UTF-8"), name], &said);
        let data = Indexed::open(&theirs).expect("opens");
        let sequences: Vec<&Vec<i32>> = of_many.iter().flatten().collect();
        assert_eq!((data.element(), data.num_documents()), (element, 40));
        assert_eq!(data.num_sequences(), sequences.len() as u64);
        let all: Vec<i64> = sequences
            .iter()
            .copied()
            .flatten()
            .map(|&id| id.into())
            .collect();
        assert_eq!(data.ids(0..data.num_tokens()).expect("reads"), all);
        let mut begin = 0;
        for (i, sequence) in (0..).zip(sequences) {
            assert_eq!(data.start_of(i).expect("reads"), begin);
            begin += sequence.len() as u64;
        }
    }
}

#[test]
#[ignore = "needs Megatron-Core: MOEFOLD_MEGATRON=/path/to/python"]
fn oracle_megatron_core_reads_prepared_text() {
    let folder = tempfile::tempdir().expect("a folder");
    let texts = [
        "First document.",
        "Zweites, mit Umläuten: äöü.",
        "\u{1f600}",
    ];
    let lines = texts.map(|text| serde_json::json!({ "text": text }).to_string());
    let from = folder.path().join("texts.jsonl");
    std::fs::write(&from, lines.join("\n")).expect("writes");
    let prefix = folder.path().join("set");
    let inputs = &[from];
    let tokenizer = &Tokenizer::Byte;
    let preparation = Preparation {
        inputs,
        key: "text",
        tokenizer,
        eod: Some(256),
    };
    let go_on = |_| std::ops::ControlFlow::Continue(());
    preparation.write(&prefix, &go_on).expect("prepares");
    let found = read(&prefix);
    let bytes = texts.map(|text| {
        let ids = text.bytes().map(i32::from);
        vec![ids.chain([256]).collect::<Vec<i32>>()]
    });
    assert_eq!(found.documents, bytes);
}
