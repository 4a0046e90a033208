//! `moefold convert`: weights between Hugging Face folders and checkpoints, and from dense to sparse.

use std::path::Path;

use anyhow::anyhow;
use moefold_executor::convert::{Conversion, Upcycle};
use moefold_executor::environment::resident_peak;
use moefold_profiles::units::{Bytes, MIB};
use serde::Serialize;

use crate::cli::{ConvertArgs, Form};
use crate::doctor::memory_at_hand;
use crate::failure::{Failure, failure};
use crate::output::Output;

/// What `--json` prints.
#[derive(Serialize)]
struct ConvertJson<'a> {
    /// What was written: a Hugging Face folder, or a checkpoint.
    #[serde(serialize_with = "moefold_executor::files::shown")]
    written: &'a Path,
    form: &'static str,
    model_type: &'a str,
    tensors: usize,
    weight_bytes: Bytes,
    /// Memory of the host that was planned before the first tensor was read.
    planned_bytes: Bytes,
    /// The most that the process had of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    resident_bytes: Option<Bytes>,
}

pub(crate) fn run(args: &ConvertArgs, output: Output) -> Result<(), Failure> {
    let upcycle = args.upcycle.map(|experts| Upcycle {
        experts: u64::from(experts),
        topk: u64::from(args.topk),
        granularity: u64::from(args.granularity),
        seed: args.seed,
    });
    let conversion = Conversion::open(&args.from, upcycle.as_ref()).map_err(failure)?;
    for why in conversion
        .found()
        .iter()
        .flat_map(|found| &found.passed_over)
    {
        output.note(why)?;
    }
    let otherwise = if conversion.found().is_some() || upcycle.is_some() {
        Form::Hf
    } else {
        Form::Checkpoint
    };
    let form = args.to.unwrap_or(otherwise);
    if form == Form::Checkpoint && conversion.found().is_some() {
        return Err(Failure::Request(anyhow!(
            "{}: is a checkpoint already, of any layout; --to hf makes a Hugging Face folder of it",
            args.from.display()
        )));
    }
    let room = match args.memory_mib {
        Some(mib) => Bytes(mib.saturating_mul(MIB)),
        None => memory_at_hand(),
    };
    let host = conversion.host(room).map_err(failure)?;
    let (tensors, weight_bytes) = conversion.size();
    let mib = |bytes: Bytes| bytes.0.div_ceil(MIB);
    if let Some(found) = conversion.found() {
        output.say(&format!("of {}", found.resumed.checkpoint.display()))?;
    }
    output.say(&format!(
        "{tensors} tensors, {} MiB in f32; at most {} MiB of the host's memory",
        mib(weight_bytes),
        mib(host.peak)
    ))?;
    let (name, written) = match form {
        Form::Hf => {
            conversion
                .to_hugging_face(&args.out, host)
                .map_err(failure)?;
            ("hf", args.out.clone())
        }
        Form::Checkpoint => {
            let written = conversion.to_checkpoint(&args.out, host).map_err(failure)?;
            ("checkpoint", written.dir)
        }
    };
    let answer = ConvertJson {
        written: &written,
        form: name,
        model_type: &conversion.model().model_type,
        tensors,
        weight_bytes,
        planned_bytes: host.peak,
        resident_bytes: resident_peak(),
    };
    output.answer(&answer, || {
        let next = match form {
            Form::Hf => format!("execute --init {}", args.out.display()),
            Form::Checkpoint => format!("execute --resume {}", args.out.display()),
        };
        let peak = answer.resident_bytes.map_or(String::new(), |peak| {
            format!(", with {} MiB of the host's memory at the most", mib(peak))
        });
        format!("{}{peak}; go on with {next}\n", written.display())
    })
}
