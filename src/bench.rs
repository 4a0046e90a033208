//! `moefold bench`: tokens a second of a model on this machine, and where the time goes.

use anyhow::anyhow;
use moefold_executor::bench::{BenchOptions, BenchResult, measure};
use moefold_planner::choice::StackName;
use moefold_planner::layout::Batch;
use moefold_planner::model::Model;
use moefold_planner::options::SearchOptions;
use moefold_profiles::units::Bytes;
use moefold_profiles::{Category, Dtype, presets as clusters};
use moefold_reports::format;
use moefold_reports::tables::Table;

use crate::cli::BenchArgs;
use crate::device;
use crate::failure::{Failure, failure};
use crate::output::Output;
use crate::plan::Question;

/// More threads of a rank than any machine has cores for.
const MOST_THREADS: usize = 1024;

pub(crate) fn run(args: &BenchArgs, output: Output) -> Result<(), Failure> {
    for (flag, value) in [
        ("steps", u64::from(args.steps)),
        ("seq-len", args.seq_len),
        ("global-batch", args.global_batch),
        ("ranks", u64::from(args.ranks)),
    ] {
        if value == 0 {
            return Err(Failure::Request(anyhow!(
                "--{flag}: found 0, expected at least 1"
            )));
        }
    }
    if let Some(threads) = args
        .threads
        .filter(|threads| !(1..=MOST_THREADS).contains(threads))
    {
        return Err(Failure::Request(anyhow!(
            "--threads: found {threads}, expected 1 to {MOST_THREADS}; without it the {} cores of this machine are \
             shared out",
            std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
        )));
    }
    let model = Model::resolve(&args.model).map_err(Failure::request)?;
    let batch = Batch {
        seq_len: args.seq_len,
        global_batch: args.global_batch,
    };
    let asked = SearchOptions {
        pins: args.layout.unwrap_or_default(),
        top: 1,
        ..SearchOptions::new(batch, StackName::Moefold)
    };
    let cluster = clusters::local(args.ranks);
    let found = Question::new(&model, &cluster, args.ranks, &[]).ask(&asked)?;
    let options = BenchOptions {
        batch,
        device: device::choose(args.device, output)?.spec(Dtype::F32, args.threads),
        steps: u64::from(args.steps),
    };
    let result = measure(&model, &found.answer.plans[0], &options).map_err(failure)?;
    output.answer(&result, || text(&result))
}

fn text(result: &BenchResult) -> String {
    let [slow, fast] = result.tokens_per_s_quartiles;
    let mut text = format!(
        "{}, {:.1} million parameters, f32;\n\
         {} sequences of {} tokens a step, {} steps on {} rank(s), {}, {}\n\n\
         tokens/s     {:.0} at the median step ({slow:.0} to {fast:.0} at the quartiles)\n\
         GFLOP/s      {:.1} of model work\n\
         step         {:.1} ms\n\
         peak memory  {}\n\
         last loss    {}\n\n",
        result.model,
        result.params as f64 / 1e6,
        result.global_batch,
        result.seq_len,
        result.steps,
        result.ranks,
        result.device,
        result.layout,
        result.tokens_per_s,
        result.model_gflops,
        result.step_s * 1e3,
        Bytes(result.peak_bytes),
        result.final_loss,
    );
    let share = |seconds: f64| format::percent(seconds / result.step_s);
    let mut categories = Table::new(["where", ">ms", ">share"]);
    for category in Category::ALL {
        let seconds = result.time_s.get(category).0;
        if seconds > 0.0 {
            let milliseconds = format!("{:.1}", seconds * 1e3);
            categories.row([category.name().to_owned(), milliseconds, share(seconds)]);
        }
    }
    let mut ops = Table::new(["op", ">ms", ">share"]);
    let mut busy: Vec<(&String, &f64)> = result.busy_s.iter().collect();
    busy.sort_by(|a, b| b.1.total_cmp(a.1));
    for (name, seconds) in busy {
        ops.row([
            name.clone(),
            format!("{:.1}", seconds * 1e3),
            share(*seconds),
        ]);
    }
    text.push_str(&categories.text());
    text.push('\n');
    text.push_str(&ops.text());
    text
}
