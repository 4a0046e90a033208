//! What the executor reads.

use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use moefold_executor::checkpoint::{self, Checkpoint, Index};
use moefold_executor::convert::Conversion;
use moefold_executor::data::{
    Indexed, Order as DataOrder, Packing, Preparation, Samples, TokenStream, Tokenizer,
};
use moefold_executor::device::DeviceSpec;
use moefold_executor::environment::Environment;
use moefold_executor::model::global_tensors;
use moefold_executor::options::Resumed;
use moefold_executor::run::RunDir;
use moefold_executor::transport;
use moefold_executor::weights::{GlobalTensor, HuggingFace};
use moefold_kernels::ahead;
use moefold_planner::model::{Model, presets};
use moefold_planner::plan::Plan;
use serde_json::Value;

use crate::target::{Target, file, put, said, stretch};

pub(super) const TARGETS: [Target; 18] = [
    Target::new("checkpoint", "index of a checkpoint", |place, input| {
        put(place, "checkpoint.json", input);
        let _ = checkpoint::find(place);
        let _ = Index::load(place).map(|index| index.bytes());
        said(Checkpoint::open(place, &MODEL))?;
        said(Conversion::open(place, None))
    })
    .prepare(|place| {
        for rank in ["rank-0", "rank-1"] {
            let header = file(&format!(
                "tests/hostile/corpus/safetensors-header/{rank}.json"
            ));
            framed(place, &format!("{rank}.safetensors"), &header);
        }
    }),
    Target::new("safetensors", "file of weights", |place, input| {
        put(place, "model.safetensors", input);
        read_all(place)
    }),
    Target::new(
        "safetensors-header",
        "header of a file of weights",
        |place, input| {
            framed(place, "model.safetensors", input);
            read_all(place)
        },
    ),
    Target::new(
        "shard-index",
        "index of files of weights",
        |place, input| {
            put(place, "model.safetensors.index.json", input);
            said(HuggingFace::open(place, &EXPECTED))
        },
    )
    .prepare(|place| {
        for name in ["a.safetensors", "b.safetensors"] {
            put(place, name, &file("tests/hostile/corpus/safetensors/small"));
        }
    }),
    Target::new("idx", "index of a dataset", |place, input| {
        dataset(place, "tokens.idx", input)
    })
    .also(&["tests/fixtures/mixtral/tokens.idx"])
    .prepare(tokens),
    Target::new("bin", "tokens of a dataset", |place, input| {
        dataset(place, "tokens.bin", input)
    })
    .also(&["tests/fixtures/mixtral/tokens.bin"])
    .prepare(tokens),
    Target::new("sums", "checksums of a dataset", |place, input| {
        dataset(place, "tokens.blake3", input)
    })
    .prepare(tokens),
    Target::new(
        "jsonl",
        "lines of text, which are prepared",
        |place, input| prepared(place, "text.jsonl", input),
    ),
    Target::new(
        "gz",
        "compressed text, which is prepared",
        |place, input| prepared(place, "text.jsonl.gz", input),
    ),
    Target::new("tiktoken", "tokens of a tokenizer", |place, input| {
        let path = put(place, "file.tiktoken", input);
        Tokenizer::named(path)
            .map_err(|error| error.to_string())
            .and_then(|tokenizer| encoded(&tokenizer))
    }),
    Target::new("tokenizer", "tokenizer.json", |place, input| {
        let path = put(place, "tokenizer.json", input);
        Tokenizer::named(path)
            .map_err(|error| error.to_string())
            .and_then(|tokenizer| encoded(&tokenizer))
    }),
    Target::new("text", "text for o200k", |_, input| {
        said(O200K.encode(input))
    })
    .prepare(|_| {
        LazyLock::force(&O200K);
    }),
    Target::new("frames", "what a process says to rank 0", |_, input| {
        answered(input)
    }),
    Target::new(
        "greeting",
        "what a process says to rank 0 before it is let in, whole or without its proof",
        |_, input| transport::greeted(input),
    ),
    Target::new(
        "requests",
        "requests of a rank, a line each, which are put into frames",
        |_, input| {
            let (mut sent, mut left) = (Vec::new(), BODIES);
            for line in input.split(|byte| *byte == b'\n') {
                request(line, &mut left, &mut sent);
            }
            answered(&sent)
        },
    ),
    Target::new(
        "events",
        "TensorBoard's events of a run, which goes on",
        |place, input| goes_on(place, "events.tfevents", input),
    )
    .prepare(run),
    Target::new(
        "continue",
        "steps.jsonl of a run, which goes on",
        |place, input| goes_on(place, "steps.jsonl", input),
    )
    .also(&["tests/hostile/corpus/steps"])
    .prepare(run),
    Target::new("pack", "pack of kernels", |place, input| {
        let whole = ahead::whole_in(&put(place, "pack", input));
        match whole.map_err(|error| error.to_string())? {
            0 => Err("no program in it is whole".to_owned()),
            _ => Ok(()),
        }
    }),
];

/// The model of the checkpoint in the corpus.
static MODEL: LazyLock<Model> = LazyLock::new(|| presets::load("tiny-mixtral").expect("a preset"));
/// Tensors of a model so small that a file of it is an input.
static EXPECTED: LazyLock<Vec<GlobalTensor>> = LazyLock::new(|| {
    let text = String::from_utf8(file("tests/hostile/corpus/config/minute.json"));
    let model = moefold_planner::model::hf::parse("minute", &text.expect("UTF-8"));
    global_tensors(&model.expect("a model"))
});
static O200K: LazyLock<Tokenizer> =
    LazyLock::new(|| Tokenizer::named("o200k").expect("compiled in"));

/// The plan of a run and where it runs, going on after two steps.
static RUN: LazyLock<(Plan, Environment)> = LazyLock::new(|| {
    let text = String::from_utf8(file("tests/hostile/corpus/plan/tiny.json"));
    let plan = Plan::parse(&text.expect("UTF-8"), Path::new("tiny.json"));
    let device = DeviceSpec::Cpu {
        threads_per_rank: Some(1),
    };
    let environment = Environment {
        resumed: Some(Resumed {
            checkpoint: "step-2".into(),
            step: 2,
        }),
        ..Environment::detect(1, &device)
    };
    (plan.expect("a plan"), environment)
});

const TEXT: &str =
    "To be, or not to be:  that is the question\n\n1234567 \u{e9}\u{301} \u{4f60}\u{597d}\t\r\n x";

/// A file of weights with this header; its values take no room.
fn framed(place: &Path, name: &str, header: &[u8]) {
    let parsed: Option<Value> = serde_json::from_slice(header).ok();
    let ends = parsed.iter().flat_map(|header| {
        let tensors = header.as_object().into_iter().flat_map(|all| all.values());
        tensors.filter_map(|tensor| tensor["data_offsets"][1].as_u64())
    });
    let end = ends.max().unwrap_or(0);
    // As its writer does.
    let mut header = header.to_vec();
    header.resize(header.len().next_multiple_of(8), b' ');
    let path = put(
        place,
        name,
        &[&(header.len() as u64).to_le_bytes()[..], &header].concat(),
    );
    let length = end.checked_add(8 + header.len() as u64);
    if let Some(length) = length.filter(|length| *length < 1 << 42) {
        stretch(&path, length);
    }
}

fn read_all(place: &Path) -> Result<(), String> {
    let folder = HuggingFace::open(place, &EXPECTED).map_err(|error| error.to_string())?;
    let mut tensors = EXPECTED.iter();
    tensors.try_for_each(|tensor| said(folder.read(&tensor.whole())))
}

fn encoded(tokenizer: &Tokenizer) -> Result<(), String> {
    tokenizer.vocab_size();
    said(tokenizer.encode(TEXT.as_bytes()))
}

/// Bytes of the bodies of an input that come, whatever they are announced to be.
const BODIES: usize = 1 << 20;

/// Sends a frame of a request, with a body as long as it says; of a line with a number and a request, it announces a body
/// as long as the number. Of all bodies so much comes as is `left`.
fn request(line: &[u8], left: &mut usize, sent: &mut Vec<u8>) {
    let parsed: Option<Value> = serde_json::from_slice(line).ok();
    let claimed = parsed.as_ref().and_then(|parsed| {
        let bytes = parsed.get(0)?.as_u64()?;
        Some((bytes, serde_json::to_vec(parsed.get(1)?).ok()?))
    });
    let (bytes, request) = claimed.unwrap_or_else(|| {
        let bytes = parsed.and_then(|request| request["Post"]["post"]["bytes"].as_u64());
        (bytes.unwrap_or(0), line.to_vec())
    });
    for word in [request.len() as u64, bytes] {
        sent.extend(word.to_le_bytes());
    }
    sent.extend(request);
    let comes = bytes.min(*left as u64) as usize;
    sent.resize(sent.len() + comes, 0);
    *left -= comes;
}

fn answered(sent: &[u8]) -> Result<(), String> {
    match transport::answered(sent) {
        0 => Err("no request is answered".to_owned()),
        _ => Ok(()),
    }
}

/// A dataset, for one of its files to be another.
fn tokens(place: &Path) {
    for name in ["tokens.idx", "tokens.bin"] {
        let bytes = file(&format!("tests/fixtures/mixtral/{name}"));
        put(place, name, &bytes);
    }
}

/// Reads the dataset with an input in the place of a file.
fn dataset(place: &Path, name: &str, input: &[u8]) -> Result<(), String> {
    put(place, name, input);
    let prefix = place.join("tokens");
    let data = Indexed::open(&prefix).map_err(|error| error.to_string())?;
    let _ = data.verify();
    let all = data.num_tokens();
    let _ = data.ids(0..all.min(1000));
    let stream = TokenStream::indexed(&prefix).expect("it was opened before");
    let samples = Samples::new(stream, 8, 128, DataOrder::Shuffled { seed: 1 });
    let samples = samples.map_err(|error| error.to_string())?.packed(Packing {
        reset_position_ids: true,
        ..Packing::default()
    });
    let _ = samples.fingerprint();
    said(samples.get(samples.len() - 1))
}

/// What `execute --continue` reads before its first step and writes with it.
fn goes_on(place: &Path, name: &str, input: &[u8]) -> Result<(), String> {
    let run = place.join("run");
    put(&run, name, input);
    let claim = RunDir::claim_again(&run).map_err(|error| error.to_string())?;
    let run = RunDir::create(claim, &RUN.0, &RUN.1).map_err(|error| error.to_string())?;
    run.check().map_err(|error| error.to_string())
}

/// A run that took steps.
fn run(place: &Path) {
    let run = place.join("run");
    fs::create_dir_all(&run).expect("a temporary folder");
    put(
        &run,
        "steps.jsonl",
        &file("tests/hostile/corpus/steps/steps.jsonl"),
    );
    LazyLock::force(&RUN);
}

fn prepared(place: &Path, name: &str, input: &[u8]) -> Result<(), String> {
    let inputs = [put(place, name, input)];
    let preparation = Preparation {
        inputs: &inputs,
        key: "text",
        tokenizer: &Tokenizer::Byte,
        eod: Some(0),
    };
    said(preparation.write(&place.join("set"), &|_| std::ops::ControlFlow::Continue(())))
}
