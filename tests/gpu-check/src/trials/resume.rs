//! Does a run that was stopped go on as if it had not been: its losses against those of a run that was
//! not, under the layout that saved it and under another.

use std::path::Path;

use moefold_reports::tables::Table;
use serde_json::json;

use super::losses::{BF16_TOLERANCE, F32_TOLERANCE, Run, deviation, figure};
use super::{Bench, Trial};

/// The layouts that save and go on: one rank, and ranks that attention and experts divide differently.
const LAYOUTS: [(u32, &str, &str); 2] = [
    (1, "one-rank", "tp=1,ep=1,etp=1,mbs=1"),
    (4, "four-ranks", "tp=2,ep=4,etp=1,mbs=1"),
];

/// Every layout goes on where each has stopped.
pub(super) fn resume(bench: &Bench<'_>, trial: &mut Trial) {
    let steps = if bench.options.small { 4 } else { 20 };
    let mut table = Table::new([
        "precision",
        "saved by",
        "taken up by",
        ">worst loss",
        ">limit",
        ">checkpoint MiB",
        "found",
    ]);
    let mut records = Vec::new();
    for (precision, tolerance) in [("fp32", F32_TOLERANCE), ("bf16", BF16_TOLERANCE)] {
        if bench.options.rehearse && precision == "bf16" {
            trial.notes.push("a rehearsal has no bf16".to_owned());
            continue;
        }
        for (gpus, saver, layout) in LAYOUTS {
            let half = (steps / 2).to_string();
            let name = format!("{saver}-{precision}");
            let run = Run {
                name: &name,
                gpus,
                layout,
                asked: &[],
                precision,
                device: bench.device(),
                steps,
            };
            let whole = match run.losses(bench, &["--save-every", &half]) {
                Ok(losses) => losses,
                Err(why) => {
                    trial.failed(why);
                    continue;
                }
            };
            let checkpoint = bench.path(&format!("{name}/checkpoints/step-{half}"));
            for (gpus, reader, layout) in LAYOUTS {
                let by = Run {
                    name: &format!("{name}-by-{reader}"),
                    gpus,
                    layout,
                    ..run
                };
                let rest = by.losses(bench, &["--resume", &checkpoint]);
                let limit = if saver == reader { 0.0 } else { tolerance };
                let worst = rest
                    .as_ref()
                    .map(|rest| deviation(rest, &whole[steps / 2..], steps));
                let right = worst.as_ref().is_ok_and(|worst| *worst <= limit);
                let bytes = size(Path::new(&checkpoint));
                table.row([
                    precision.to_owned(),
                    saver.to_owned(),
                    reader.to_owned(),
                    worst
                        .as_ref()
                        .map_or_else(|_| "-".to_owned(), |worst| figure(*worst)),
                    figure(limit),
                    format!("{:.1}", bytes as f64 / f64::from(1 << 20)),
                    if right { "ok" } else { "WRONG" }.to_owned(),
                ]);
                records.push(json!({
                    "precision": precision, "saved_by": saver, "taken_up_by": reader, "limit": limit,
                    "worst": worst.ok().filter(|worst| worst.is_finite()), "bytes": bytes,
                    "uninterrupted": whole, "losses": rest.as_ref().ok(),
                }));
                trial.judge(right);
                trial.notes.extend(rest.err());
            }
        }
    }
    let title = format!(
        "Losses after a stop at half of {steps} steps, against the run that went on; under the same \
         layout they are equal to the last digit"
    );
    trial.tables.push((title, table));
    trial.data = json!(records);
}

/// Bytes of a folder's files.
fn size(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| entry.metadata().ok());
    sizes.map(|metadata| metadata.len()).sum()
}
