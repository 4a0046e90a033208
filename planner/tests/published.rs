//! Predictions against what others measured and published, case by case.
//!
//! The tables in `data/published` name their sources. Memory is held to a bar; time is printed, with the
//! misses left in, and held to what the search needs of it: the order of layouts.

#![expect(
    clippy::print_stdout,
    reason = "every case is reported, `--nocapture` shows it"
)]

use std::collections::BTreeMap;
use std::path::Path;

use moefold_planner::interval::{self, Calibration, Class};
use moefold_planner::model::count;
use moefold_planner::plan::PlannedLayout;
use moefold_planner::published::{
    Priced, Row, Validation, Verdict, calibrated, judge, misses, price, price_all, shipped_rows,
};
use moefold_profiles::Profile;
use moefold_profiles::import::{Options, import};

/// The rows of a table.
fn rows(table: &str) -> Vec<Row> {
    let mut rows = shipped_rows();
    rows.retain(|row| row.table == table);
    assert!(!rows.is_empty(), "{table}");
    rows
}

fn predicted(row: &Row, profiles: &[Profile]) -> PlannedLayout {
    match price(row, profiles) {
        Priced::Fits(plan) => *plan,
        other => panic!("{}: {other:?}", row.id),
    }
}

#[test]
fn golden_memory_of_simumax_b200_runs() {
    let (mut sum, mut worst, mut distinct) = (0.0, 0.0_f64, Vec::new());
    for row in rows("simumax_b200") {
        let measured = row.mem_gib.expect("a measurement");
        let layout = row.options.pins.to_string();
        // Rows that only differ in the number of microbatches are one measurement.
        let key = (layout.clone(), measured.to_bits());
        if distinct.contains(&key) {
            continue;
        }
        distinct.push(key);
        let allocated = price(&row, &[]).allocated_gib().expect("a plan");
        let error = allocated / measured - 1.0;
        println!(
            "{} {layout}: {allocated:.2} GiB, measured {measured:.2} ({:+.2} %)",
            row.id,
            100.0 * error
        );
        sum += error.abs();
        worst = worst.max(error.abs());
    }
    let mape = 100.0 * sum / distinct.len() as f64;
    println!(
        "{} layouts: MAPE {mape:.2} %, worst {:.2} %",
        distinct.len(),
        100.0 * worst
    );
    assert!(mape <= 0.5, "{mape}");
    assert!(worst <= 0.015, "{worst}");
}

/// Predicted over measured time of every SimuMax row, less 1, under what profiles measured.
fn errors_of_simumax_rows(profiles: &[Profile]) -> Vec<f64> {
    let (mut pairs, mut errors) = (Vec::new(), Vec::new());
    for row in rows("simumax_b200") {
        let ms = 1e3 * predicted(&row, profiles).predicted.step_s;
        let measured = 1e3 * row.step_s.expect("a measurement");
        let error = ms / measured - 1.0;
        println!(
            "{} {ms:.0} ms, measured {measured:.0} ({:+.1} %)",
            row.id,
            100.0 * error
        );
        errors.push(error);
        pairs.push((ms, measured));
    }
    let correlation = rank_correlation(&pairs);
    println!("rank correlation {correlation:.3}");
    assert!(correlation > 0.95, "{correlation}");
    errors
}

/// Mean and largest error, either way, in percent.
fn mean_and_worst(errors: &[f64]) -> [f64; 2] {
    let sum: f64 = errors.iter().map(|error| error.abs()).sum();
    let worst = errors.iter().fold(0.0, |worst: f64, e| worst.max(e.abs()));
    let [mean, worst] = [sum / errors.len() as f64, worst].map(|error| 100.0 * error);
    println!("mean error {mean:.1} %, worst {worst:.1} %");
    [mean, worst]
}

/// Eight GPUs of one node and no network: what is compared is mostly products and their tails.
#[test]
fn time_of_simumax_b200_runs_is_as_measured() {
    let [mean, _] = mean_and_worst(&errors_of_simumax_rows(&[]));
    assert!(mean <= 10.0, "{mean}");
}

/// The same with what SimuMax measured on that machine. The file holds the figures of
/// `configs/system/b200_bf16_ceperm.json` in github.com/MooreThreads/SimuMax@4dcaae5 (Apache-2.0), efficiencies
/// rounded to four digits. SimuMax itself is 5.6 % off on average over its 43 rows, and 13.5 % at worst.
#[test]
fn time_of_simumax_b200_runs_follows_from_its_system_file() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/simumax-b200.json");
    let imported = import(&path, &Options::default()).expect("it is read");
    let errors = errors_of_simumax_rows(&[imported.profile]);
    let [mean, worst] = mean_and_worst(&errors);
    assert!(mean <= 5.0, "{mean}");
    assert!(worst <= 13.0, "{worst}");
}

/// A published throughput and what is predicted for its layout, TFLOP/s a GPU.
struct Throughput {
    id: String,
    /// Rows that can be compared with each other: same model, system and source.
    group: String,
    measured: f64,
    predicted: f64,
}

/// Layouts whose order is known from their sources, in bf16.
fn throughputs() -> Vec<Throughput> {
    rows("layouts")
        .into_iter()
        .map(|row| {
            let batch = row.options.batch;
            let tokens = (batch.seq_len * batch.global_batch) as f64 / f64::from(row.gpus);
            let flops = tokens * count::flops_per_token(&row.model, batch.seq_len).0;
            let source = row.id.split('-').next().unwrap_or_default();
            Throughput {
                group: format!("{source} {} {}", row.model.name, row.cluster.name),
                measured: flops / row.step_s.expect("a measurement") / 1e12,
                predicted: predicted(&row, &[]).predicted.model_tflops_per_gpu,
                id: row.id,
            }
        })
        .collect()
}

/// Spearman's rank correlation; equal values share their mean rank.
fn rank_correlation(pairs: &[(f64, f64)]) -> f64 {
    let ranks = |values: Vec<f64>| -> Vec<f64> {
        values
            .iter()
            .map(|value| {
                let below = values.iter().filter(|other| *other < value).count();
                let same = values.iter().filter(|other| *other == value).count();
                below as f64 + (same as f64 - 1.0) / 2.0
            })
            .collect()
    };
    let a = ranks(pairs.iter().map(|pair| pair.0).collect());
    let b = ranks(pairs.iter().map(|pair| pair.1).collect());
    let mean = (pairs.len() as f64 - 1.0) / 2.0;
    let product = |x: &[f64], y: &[f64]| -> f64 {
        x.iter().zip(y).map(|(x, y)| (x - mean) * (y - mean)).sum()
    };
    product(&a, &b) / (product(&a, &a) * product(&b, &b)).sqrt()
}

#[test]
fn published_layouts_are_ranked_as_measured() {
    let rows = throughputs();
    let mut groups: BTreeMap<&str, Vec<&Throughput>> = BTreeMap::new();
    for row in &rows {
        groups.entry(&row.group).or_default().push(row);
    }
    let mut errors = 0.0;
    for (group, rows) in &groups {
        for row in rows {
            let ratio = row.predicted / row.measured;
            println!(
                "{} {:.0} TFLOP/s, measured {:.0} ({ratio:.2})",
                row.id, row.predicted, row.measured
            );
            errors += (ratio - 1.0).abs();
            // Conventions of FLOPs differ by up to 1.7 in arXiv 2504.14960; elsewhere a model
            // without fitted factors is expected within a third.
            assert!(
                row.id.starts_with("mpf") || (ratio - 1.0).abs() < 0.4,
                "{}",
                row.id
            );
        }
        let pairs: Vec<(f64, f64)> = rows.iter().map(|r| (r.predicted, r.measured)).collect();
        if pairs.len() > 2 {
            let correlation = rank_correlation(&pairs);
            println!(
                "{group}: rank correlation {correlation:.3} over {}",
                pairs.len()
            );
            assert!(correlation > 0.9, "{group}: {correlation}");
        }
    }
    println!("MAPE {:.1} %", 100.0 * errors / rows.len() as f64);
}

#[test]
fn folding_beats_its_unfolded_twin_wherever_it_was_measured_to() {
    let rows = throughputs();
    let get = |id: u32| {
        let id = format!("mpf-{id:03}");
        rows.iter().find(|row| row.id == id).expect("a row")
    };
    // Unfolded and folded runs of the same model, GPUs and batch (arXiv 2504.14960).
    let twins = [(4, 5), (9, 10), (21, 25), (22, 26), (23, 27), (24, 28)]
        .into_iter()
        .chain((37..42).map(|id| (id, id + 5)))
        .chain((82..86).map(|id| (id, id + 4)));
    for (unfolded, folded) in twins {
        let (unfolded, folded) = (get(unfolded), get(folded));
        assert!(folded.measured > unfolded.measured);
        assert!(folded.predicted > unfolded.predicted, "{}", folded.id);
    }
}

/// Intervals come from a file, since pricing all rows takes too long for each plan.
#[test]
fn golden_intervals_come_from_the_misses_of_published_rows() {
    let rows = shipped_rows();
    let now = calibrated(&rows, &price_all(&rows, &[])).expect("there are pairs");
    let then = interval::shipped();
    let close = |now: f64, then: f64| (now - then).abs() < 0.0015;
    let same = |now: &Calibration, then: &Calibration| {
        (now.generation, now.precision, now.rows, now.families)
            == (then.generation, then.precision, then.rows, then.families)
            && close(now.low, then.low)
            && close(now.median, then.median)
            && close(now.high, then.high)
    };
    let classes = now.classes.len() == then.classes.len()
        && now
            .classes
            .iter()
            .zip(&then.classes)
            .all(|(a, b)| same(a, b));
    assert!(
        classes && same(&now.any, &then.any) && close(now.told_apart, then.told_apart),
        "prices have changed: write the file again with `moefold validate --calibration \
         planner/data/calibration.json`\nfound {now:?}\nfile {then:?}"
    );
}

/// Of 80 percent, judged without the rows of the same source and model.
#[test]
fn steps_are_inside_their_interval_as_often_as_it_says() {
    let rows = shipped_rows();
    let priced = price_all(&rows, &[]);
    let found = judge(&rows, &priced, &misses(&rows, &priced));
    let inside = found.all.inside.expect("rows with times");
    println!("{:.1} % inside", 100.0 * inside);
    assert!((0.7..=0.9).contains(&inside), "{inside}");
    // No more than a coin's worth of a large class may miss: the classes tell errors apart.
    for group in found.groups.iter().filter(|group| group.rows >= 20) {
        let inside = group.inside.expect("rows with times");
        println!(
            "{} {} {}: {inside:.2}",
            group.source, group.gpu, group.precision
        );
        assert!(
            inside >= 0.5,
            "{} {} {}",
            group.source,
            group.gpu,
            group.precision
        );
    }
    // Intervals that say nothing would hold every step.
    let widths = found
        .rows
        .iter()
        .filter_map(|row| Some(row.step_s_high? / row.step_s_low?));
    let mut widths: Vec<f64> = widths.collect();
    widths.sort_by(f64::total_cmp);
    assert!(
        widths[widths.len() / 2] < 2.0,
        "{}",
        widths[widths.len() / 2]
    );
    // Without its own family a row's interval is another than with it.
    let with_own = interval::shipped();
    assert!(found.rows.iter().zip(&rows).any(|(row, of)| {
        let class = Class::of(&of.cluster, of.options.precision);
        let low = row
            .step_s_low
            .zip(row.predicted_step_s)
            .map(|(low, step)| low / step);
        low.is_some_and(|low| (low - with_own.interval(class).low).abs() > 0.01)
    }));
}

/// Sizes of errors of step time, the least first, of rows that are asked for and whose times count.
fn sizes(found: &Validation, of: impl Fn(&Verdict) -> bool) -> Vec<f64> {
    let rows = found.rows.iter().filter(|row| !row.order_only && of(row));
    let size = |row: &Verdict| Some((row.predicted_step_s? / row.measured_step_s? - 1.0).abs());
    let mut sizes: Vec<f64> = rows.filter_map(size).collect();
    sizes.sort_by(f64::total_cmp);
    sizes
}

/// Steps, memory and the order of layouts, of all rows and of those whose hosts hide least.
#[test]
fn published_rows_are_as_near_as_the_planner_promises() {
    let rows = shipped_rows();
    let priced = price_all(&rows, &[]);
    let found = judge(&rows, &priced, &misses(&rows, &priced));
    let sure = |row: &Verdict| row.precision == "bf16" || row.cuda_graph == "full_iteration";
    for (what, sizes, bars) in [
        ("all", sizes(&found, |_| true), [0.08, 0.20]),
        ("bf16 and whole graphs", sizes(&found, sure), [0.06, 0.15]),
    ] {
        let at = |share: f64| sizes[(share * sizes.len() as f64).ceil() as usize - 1];
        let [median, p90] = [at(0.5), at(0.9)];
        println!(
            "{what}: {} steps, median {median:.3}, 90 % {p90:.3}",
            sizes.len()
        );
        assert!(sizes.len() >= 100, "{what}: {}", sizes.len());
        assert!(
            median <= bars[0] && p90 <= bars[1],
            "{what}: {median} {p90}"
        );
    }
    let all = found.all;
    let memory = all.memory.expect("rows with memory");
    let tau = all.tau.expect("pairs");
    println!(
        "memory {:.4} of {}, tau {tau:.3} of {} pairs",
        memory.mean, memory.rows, all.pairs
    );
    assert!(memory.mean <= 0.01, "{}", memory.mean);
    assert!(all.pairs >= 40 && tau >= 0.9, "{} {tau}", all.pairs);
    let none: [String; 0] = [];
    assert_eq!(all.too_large, none, "ran");
    assert_eq!(all.missed, none, "ran out of memory");
    // 8 pipeline ranks of 64 ranks of experts on 256 GPUs: misprinted.
    assert_eq!(all.refused, ["mb-25.09-008"]);
}
