//! Is training right: a loss curve against the CPU's, and every layout against one rank.

use moefold_reports::tables::Table;
use serde_json::json;

use super::{Bench, Trial, minutes};
use crate::{Error, together};

/// Losses of f32 on two devices, or of two layouts, may differ by this much of themselves.
pub(super) const F32_TOLERANCE: f64 = 1e-4;
/// Over how many steps losses are compared one by one: later ones follow from what rounding made of the
/// first. On an H100 in f32 they are 1.7 % off a CPU's after 200 steps, 5e-8 in the first 20.
const ALIKE: usize = 20;
/// What the mean loss of a tenth of a run may differ by of itself, in any precision. On an H100 it is 0.8 % at most
/// in f32, where only the order of sums differs, and 1.9 % in bf16.
const TENTH_TOLERANCE: f64 = 3e-2;
/// Losses in bf16 may differ from those in f32 by this much of themselves.
pub(super) const BF16_TOLERANCE: f64 = 1e-2;

/// A layout that is compared with one rank: its ranks, its degrees and what its plan asks for beside them.
type Layout = (u32, &'static str, &'static [&'static str]);

/// Degrees of up to eight ranks, where attention and experts divide the same ranks differently, then what else a plan
/// may ask for that leaves losses as they are: schedules of pipelines, context parallelism, divided
/// weights, recomputation, offload and exchanges beside compute. The first alone is tried where little is asked for.
const LAYOUTS: [Layout; 26] = [
    (4, "tp=2,ep=4,etp=1,mbs=1", &[]),
    (2, "tp=2,ep=1,etp=2,mbs=1", &[]),
    (2, "tp=1,ep=2,etp=1,mbs=1", &[]),
    (4, "tp=1,ep=2,etp=2,mbs=1", &[]),
    (8, "tp=1,ep=8,etp=1,mbs=1", &[]),
    (8, "tp=2,ep=4,etp=2,mbs=1", &[]),
    (8, "tp=4,ep=8,etp=1,mbs=1", &[]),
    (8, "tp=4,ep=2,etp=2,mbs=1", &[]),
    (4, "pp=2,ep=2,etp=1,mbs=1", &["--schedule", "1f1b"]),
    (
        4,
        "pp=2,vpp=2,tp=2,ep=2,etp=1,mbs=1",
        &["--schedule", "interleaved"],
    ),
    (2, "pp=2,ep=1,etp=1,mbs=1", &["--schedule", "zb-h1"]),
    (4, "pp=2,tp=2,ep=2,etp=1,mbs=1", &["--schedule", "zb-v"]),
    (2, "pp=2,ep=1,etp=1,mbs=1", &["--schedule", "v-half"]),
    (2, "pp=2,ep=1,etp=1,mbs=1", &["--schedule", "v-min"]),
    (4, "pp=2,ep=2,etp=1,mbs=1", &["--schedule", "dualpipe-v"]),
    (
        4,
        "pp=2,ep=2,etp=1,mbs=1",
        &[
            "--schedule",
            "dualpipe-v-combined",
            "--overlap",
            "expert-alltoall,delay-wgrad",
        ],
    ),
    (
        4,
        "tp=2,ep=4,etp=1,mbs=1",
        &["--overlap", "expert-alltoall,delay-wgrad"],
    ),
    (2, "cp=2,ep=2,etp=1,mbs=1", &["--cp-comm-type", "p2p"]),
    (2, "cp=2,ep=2,etp=1,mbs=1", &["--cp-comm-type", "a2a"]),
    (2, "cp=2,ep=2,etp=1,mbs=1", &["--cp-comm-type", "allgather"]),
    (4, "tp=1,ep=2,etp=1,mbs=1", &["--zero", "fsdp"]),
    (
        2,
        "ep=2,etp=1,mbs=1",
        &["--dispatcher", "alltoall", "--recompute", "full"],
    ),
    (
        2,
        "tp=2,ep=2,etp=1,mbs=1",
        &["--recompute", "core_attn,layernorm,moe_act"],
    ),
    (
        2,
        "ep=2,etp=1,mbs=1",
        &["--offload", "attn_norm,expert_fc1,moe_act"],
    ),
    (
        2,
        "ep=2,etp=1,mbs=1",
        &["--optimizer-offload-fraction", "0.5"],
    ),
    (
        8,
        "tp=2,cp=2,pp=2,ep=4,etp=1,mbs=1",
        &["--recompute", "full", "--optimizer-offload-fraction", "0.5"],
    ),
];

/// One run: its plan's ranks, layout and precision, and where it runs.
pub(super) struct Run<'a> {
    pub(super) name: &'a str,
    pub(super) gpus: u32,
    pub(super) layout: &'a str,
    /// What its plan asks for beside degrees.
    pub(super) asked: &'a [&'a str],
    pub(super) precision: &'a str,
    pub(super) device: &'a str,
    pub(super) steps: usize,
}

impl Run<'_> {
    /// Plans and trains the quickstart model on English text, with further flags; its losses.
    pub(super) fn losses(&self, bench: &Bench<'_>, flags: &[&str]) -> Result<Vec<f64>, String> {
        let plan = bench.path(&format!("{}.json", self.name));
        let gpus = self.gpus.to_string();
        let planned = [
            "plan",
            "--model",
            "quickstart",
            "--cluster",
            &bench.cluster,
            "--gpus",
            &gpus,
            "--seq-len",
            "128",
            "--global-batch",
            "16",
            "--stack",
            "moefold",
            "--precision",
            self.precision,
            "--layout",
            self.layout,
            "--out",
            &plan,
        ];
        let planned = [&planned[..], self.asked].concat();
        bench.moefold(&format!("{}-plan", self.name), &planned, minutes(1))?;
        let text = bench.text()?;
        let (steps, warmup) = (self.steps.to_string(), (self.steps / 10).to_string());
        let out = bench.path(self.name);
        let arguments = [
            "execute",
            &plan,
            "--text",
            &text,
            "--device",
            self.device,
            "--steps",
            &steps,
            "--lr",
            "3e-3",
            "--lr-schedule",
            "cosine",
            "--warmup",
            &warmup,
            "--aux-loss-coef",
            "0.01",
            "--out",
            &out,
        ];
        bench.moefold(self.name, &[&arguments, flags].concat(), minutes(5))?;
        let steps = bench.steps(self.name)?;
        Ok(steps.into_iter().map(|step| step.loss).collect())
    }
}

/// The largest relative difference of losses over the first `steps`; of different counts, infinite.
pub(super) fn deviation(found: &[f64], expected: &[f64], steps: usize) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let pairs = found.iter().zip(expected).take(steps);
    pairs
        .map(|(found, expected)| (found / expected - 1.0).abs())
        // NaN is the worst of all, which `f64::max` would drop.
        .fold(0.0, |worst, next| {
            if next > worst || next.is_nan() {
                next
            } else {
                worst
            }
        })
}

/// The largest relative difference of mean losses over a tenth of the steps.
fn tenth_deviation(found: &[f64], expected: &[f64]) -> f64 {
    let tenth = expected.len().div_ceil(10).max(1);
    let means = |losses: &[f64]| -> Vec<f64> {
        let of = |tenth: &[f64]| tenth.iter().sum::<f64>() / tenth.len() as f64;
        losses.chunks(tenth).map(of).collect()
    };
    deviation(&means(found), &means(expected), expected.len())
}

/// A difference for a table.
pub(super) fn figure(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value => format!("{value:.1e}"),
    }
}

/// The same steps on the CPU in f32, on the GPU in f32 and in bf16: alike at first, and in the mean later.
pub(super) fn curve(bench: &Bench<'_>, trial: &mut Trial) {
    let steps = if bench.options.small { 6 } else { 200 };
    let run = |name, precision, device| Run {
        name,
        gpus: 1,
        layout: "tp=1,ep=1,etp=1,mbs=16",
        asked: &[],
        precision,
        device,
        steps,
    };
    let reference = match run("cpu-fp32", "fp32", "cpu").losses(bench, &[]) {
        Ok(losses) => losses,
        Err(why) => return trial.failed(why),
    };
    let mut table = Table::new([
        "run",
        ">first",
        ">last",
        ">worst of first 20",
        ">limit",
        ">worst mean of a tenth",
        ">limit",
    ]);
    let ends = |losses: &[f64]| {
        [losses.first(), losses.last()]
            .map(|loss| loss.map_or_else(String::new, |loss| format!("{loss:.4}")))
    };
    let [first, last] = ends(&reference);
    let cpu = ["CPU, f32".to_owned(), first, last];
    table.row(cpu.into_iter().chain(std::iter::repeat_n(String::new(), 4)));
    let mut curves = vec![("cpu-fp32", reference.clone())];
    for (name, precision, limit) in [
        ("gpu-fp32", "fp32", F32_TOLERANCE),
        ("gpu-bf16", "bf16", BF16_TOLERANCE),
    ] {
        if bench.options.rehearse && precision == "bf16" {
            trial.notes.push("a rehearsal has no bf16".to_owned());
            continue;
        }
        let losses = match run(name, precision, bench.device()).losses(bench, &[]) {
            Ok(losses) => losses,
            Err(why) => {
                trial.failed(why);
                continue;
            }
        };
        let alike = deviation(&losses, &reference, ALIKE);
        let tenths = tenth_deviation(&losses, &reference);
        trial.judge(alike <= limit && tenths <= TENTH_TOLERANCE);
        let [first, last] = ends(&losses);
        table.row([
            format!("GPU, {precision}"),
            first,
            last,
            figure(alike),
            figure(limit),
            figure(tenths),
            figure(TENTH_TOLERANCE),
        ]);
        curves.push((name, losses));
    }
    let title = format!("Losses over {steps} steps on English text");
    trial.tables.push((title, table));
    trial.data = json!({
        "steps": steps,
        "losses": curves.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
    });
}

/// Layouts of rank threads on the one GPU against one rank there. None is timed, so some run together.
pub(super) fn layouts(bench: &Bench<'_>, trial: &mut Trial) -> Result<(), Error> {
    let steps = 5;
    let layouts = if bench.options.small {
        &LAYOUTS[..1]
    } else {
        &LAYOUTS[..]
    };
    let mut table = Table::new([
        ">ranks",
        "layout",
        "asked",
        "precision",
        ">worst loss",
        ">limit",
        "found",
    ]);
    let mut records = Vec::new();
    for (precision, limit) in [("fp32", F32_TOLERANCE), ("bf16", BF16_TOLERANCE)] {
        if bench.options.rehearse && precision == "bf16" {
            continue;
        }
        let one = Run {
            name: &format!("one-rank-{precision}"),
            gpus: 1,
            layout: "tp=1,ep=1,etp=1,mbs=1",
            asked: &[],
            precision,
            device: bench.device(),
            steps,
        };
        let reference = match one.losses(bench, &[]) {
            Ok(losses) => losses,
            Err(why) => {
                trial.failed(why);
                continue;
            }
        };
        let losses = |(gpus, layout, asked): &Layout| {
            let words = format!("{gpus} ranks {layout} {} {precision}", asked.join(" "));
            let run = Run {
                name: &words.replace(|letter: char| !letter.is_alphanumeric(), "-"),
                gpus: *gpus,
                layout,
                asked,
                ..one
            };
            run.losses(bench, &[])
        };
        for (layout, found) in layouts.iter().zip(together(layouts, losses)?) {
            let (gpus, degrees, asked) = layout;
            let worst = found
                .as_ref()
                .map(|found| deviation(found, &reference, steps));
            let right = worst.as_ref().is_ok_and(|worst| *worst <= limit);
            table.row([
                gpus.to_string(),
                (*degrees).to_owned(),
                asked.join(" "),
                precision.to_owned(),
                worst
                    .as_ref()
                    .map_or_else(|_| "-".to_owned(), |worst| format!("{worst:.1e}")),
                format!("{limit:.0e}"),
                if right { "ok" } else { "WRONG" }.to_owned(),
            ]);
            records.push(json!({
                "ranks": gpus, "layout": degrees, "asked": asked, "precision": precision, "limit": limit,
                "worst": worst.ok().filter(|worst| worst.is_finite()), "losses": found.as_ref().ok(),
            }));
            trial.judge(right);
            trial.notes.extend(found.err());
        }
    }
    let title = format!("Losses over {steps} steps of rank threads on one GPU, against one rank");
    trial.tables.push((title, table));
    trial.data = json!(records);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_difference_is_relative_and_nan_is_worst() {
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
        assert!(close(deviation(&[2.0, 1.1], &[2.0, 1.0], 2), 0.1));
        assert!(close(deviation(&[2.0, 1.1], &[2.0, 1.0], 1), 0.0));
        assert!(deviation(&[f64::NAN, 1.0], &[2.0, 1.0], 2).is_nan());
        assert_eq!(deviation(&[2.0], &[2.0, 1.0], 1), f64::INFINITY);

        let mut losses = [1.0; 20];
        losses[18] = 1.5;
        assert!(close(tenth_deviation(&losses, &[1.0; 20]), 0.25));
        losses[1] = 2.0;
        assert!(close(tenth_deviation(&losses, &[1.0; 20]), 0.5));
    }
}
