//! `moefold execute --dry-run`: one rank's step of a plan, without devices, data or weights.

use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::anyhow;
use moefold_executor::files::check_no_run;
use moefold_executor::trace::{self, Traced};
use moefold_planner::choice::StackName;
use moefold_planner::plan::Plan;
use moefold_planner::search;
use moefold_planner::stack::megatron::Declared;
use moefold_planner::walk::Walk;
use moefold_profiles::pricing::Costs;
use moefold_profiles::{TensorClass, files};

use crate::cli::ExecuteArgs;
use crate::failure::{Failure, failure};
use crate::output::Output;

pub(crate) fn run(args: &ExecuteArgs, output: Output) -> Result<(), Failure> {
    let plan = Plan::load(&args.plan).map_err(Failure::request)?;
    let (rank, ranks) = (args.rank.unwrap_or(0), plan.request.gpus);
    if rank >= ranks {
        return Err(Failure::Request(anyhow!(
            "--rank {rank}: the plan has {ranks} ranks, 0 to {}",
            ranks - 1
        )));
    }
    if !plan.profiles.is_empty() {
        output.note(
            "the plan was priced with profiles; times of the dry run are of the shipped tables",
        )?;
    }
    let costs = Costs::for_cluster(&plan.cluster, &[]);
    let balancing = args.train.balancing();
    let layout = plan.layout().map_err(|broken| {
        let broken: Vec<String> = broken.iter().map(ToString::to_string).collect();
        Failure::Request(anyhow!("{}: {}", args.plan.display(), broken.join("; ")))
    })?;
    let packing = args.packing.packing(&plan)?;
    if packing.is_any() && plan.planned.stack == StackName::Megatron {
        return Err(Failure::Request(anyhow!(
            "--reset-position-ids, --reset-attention-mask, --eod-mask-loss: a plan of the stack megatron is walked with \
             whole sequences only; leave them out, or plan with --stack moefold"
        )));
    }
    let walked = match plan.planned.stack {
        StackName::Moefold => {
            let starts = if layout.pp() > 1 {
                let runtime = Traced::new(&plan.model, &plan.cluster);
                search::starts(&plan, &layout, rank, &costs, &runtime).map_err(Failure::request)?
            } else {
                Vec::new()
            };
            trace::dry_run(&plan, rank, balancing, packing, &costs, &starts).map_err(failure)?
        }
        StackName::Megatron => {
            search::walk(&plan, &layout, rank, &costs, &Declared).map_err(Failure::request)?
        }
    };
    let dir = args
        .out
        .clone()
        .unwrap_or_else(|| PathBuf::from("runs").join(format!("dry-run-rank-{rank}")));
    let path = dir.join("trace.json");
    check_no_run(&dir, "a trace is written").map_err(failure)?;
    let trace = walked.trace.chrome_with(&walked.memory);
    std::fs::create_dir_all(&dir)
        .map_err(|error| Failure::Runtime(anyhow!("{}: {error}", dir.display())))?;
    files::write_atomically(&path, |file| Ok(serde_json::to_writer(file, &trace)?))
        .map_err(|error| Failure::Runtime(anyhow!("{}: {error}", path.display())))?;
    output.answer(&walked.walk, || {
        format!("{}\ntrace: {}\n", table(&walked.walk), path.display())
    })
}

/// The walk for a person.
fn table(walk: &Walk) -> String {
    let mut text = format!(
        "rank {}: a step of {:.4} s, {} ops, {} waits of the host, {} of tensors at the peak{}\n\n",
        walk.rank,
        walk.step_s,
        walk.ops,
        walk.host_waits,
        walk.peak_bytes,
        walk.host_bytes
            .map_or(String::new(), |bytes| format!(", {bytes} on the host"))
    );
    let mut line = |cells: [String; 4]| {
        let [a, b, c, d] = cells;
        let line = format!("{a:<38} {b:>12} {c:>8} {d:>12}");
        writeln!(text, "{}", line.trim_end()).expect("a string takes any text");
    };
    let own = str::to_owned;
    line(["at the peak", "bytes", "", ""].map(own));
    for class in TensorClass::ALL {
        let bytes = walk.bytes[class].to_string();
        line([own(class.name()), bytes, String::new(), String::new()]);
    }
    line([const { "" }; 4].map(own));
    line(["largest at the peak", "each", "count", "together"].map(own));
    for alive in &walk.largest {
        line([
            format!("{}: {}", alive.class.name(), alive.name),
            alive.bytes.to_string(),
            alive.count.to_string(),
            alive.total_bytes.to_string(),
        ]);
    }
    if !walk.collectives.is_empty() {
        line([const { "" }; 4].map(own));
        line(["collectives", "each", "calls", "together"].map(own));
    }
    for calls in &walk.collectives {
        line([
            format!(
                "{} over {} ({} ranks)",
                calls.kind.stem(),
                calls.group,
                calls.ranks
            ),
            calls.bytes.to_string(),
            calls.calls.to_string(),
            calls.total_bytes.to_string(),
        ]);
    }
    text
}
