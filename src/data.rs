//! `moefold data prepare`: text into a dataset that training reads from disk.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::Ordering;

use anyhow::anyhow;
use moefold_executor::data::{Preparation, Tokenizer};
use moefold_reports::format;
use serde::Serialize;

use crate::cli::PrepareArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::signals;

/// What `--json` prints.
#[derive(Serialize)]
struct PrepareJson<'a> {
    #[serde(serialize_with = "moefold_executor::files::shown")]
    prefix: &'a Path,
    documents: u64,
    /// Documents left out, as they have no text.
    empty: u64,
    tokens: u64,
    text_bytes: u64,
    /// Smallest vocabulary that a model needs for it.
    vocab_size: u64,
    bytes_per_id: u64,
}

pub(crate) fn prepare(args: &PrepareArgs, output: Output) -> Result<(), Failure> {
    for ending in ["bin", "idx"] {
        let mut path = args.out.clone().into_os_string();
        path.push(".");
        path.push(ending);
        if Path::new(&path).exists() {
            return Err(Failure::Request(anyhow!(
                "--out {}: {} is there already; name another prefix or remove it",
                args.out.display(),
                Path::new(&path).display()
            )));
        }
    }
    let tokenizer = Tokenizer::named(&args.tokenizer).map_err(failure)?;
    let eod = args
        .eod
        .as_deref()
        .map(|token| eod(token, &tokenizer, &args.tokenizer))
        .transpose()?;
    let preparation = Preparation {
        inputs: &args.files,
        key: &args.key,
        tokenizer: &tokenizer,
        eod,
    };
    let bytes = preparation.bytes().map_err(failure)?;
    signals::catch()?;
    let told = || signals::told().load(Ordering::Relaxed);
    let bar = output.progress(bytes, "tokenizing");
    let go_on = |read| {
        bar.set_position(read);
        if told() == 0 {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    let prepared = preparation.write(&args.out, &go_on);
    bar.finish_and_clear();
    let Some(prepared) = prepared.map_err(failure)? else {
        let (signal, name) = (told(), signals::name(told()));
        let stopped = anyhow!("{name}: stopped, and nothing is written");
        return Err(Failure::Signalled(signal, stopped));
    };
    let answer = PrepareJson {
        prefix: &args.out,
        documents: prepared.documents,
        empty: prepared.empty,
        tokens: prepared.tokens,
        text_bytes: prepared.text_bytes,
        vocab_size: preparation.vocab_size(),
        bytes_per_id: prepared.element.bytes(),
    };
    output.answer(&answer, || {
        let left_out = match answer.empty {
            0 => String::new(),
            empty => format!(", {empty} without text left out"),
        };
        format!(
            "{} tokens of {} documents{left_out} ({:.2} bytes of text a token) for a vocabulary of {}; train with \
             --data {}\n",
            format::grouped(answer.tokens),
            format::grouped(answer.documents),
            answer.text_bytes as f64 / answer.tokens as f64,
            answer.vocab_size,
            args.out.display()
        )
    })
}

/// The id of a token that is given by its number or its text.
fn eod(token: &str, tokenizer: &Tokenizer, name: &Path) -> Result<u32, Failure> {
    let id = token.parse().ok().or_else(|| tokenizer.id_of(token));
    id.ok_or_else(|| {
        Failure::Request(anyhow!(
            "--eod {token}: is no one token of the tokenizer {}, and no id",
            name.display()
        ))
    })
}
