//! The tables of a comparison: for people with few digits, for machines with all of them.

use moefold_profiles::units::Bytes;
use moefold_profiles::{Category, TensorClass};

use crate::draw::color;
use crate::format::{self, MemoryUnit, TimeUnit};
use crate::held::Held;
use crate::ops::{self, OpTime};
use crate::plots::memory::measured_gib;
use crate::subject::{Comparison, Subject, json_word};
use crate::tables::Table;

/// Ops of a run that are shown as text.
const MAX_OPS: usize = 12;

/// A table with its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Named {
    /// File name without its ending.
    pub(crate) stem: String,
    /// Heading.
    pub(crate) title: String,
    /// For people.
    pub(crate) shown: Table,
    /// For machines: every digit, units in the headings.
    pub(crate) raw: Table,
}

/// All tables, in the order of a page.
pub(crate) fn all(comparison: &Comparison) -> Vec<Named> {
    let mut tables = vec![layouts(comparison), time(comparison), memory(comparison)];
    tables.extend(reserved(comparison));
    tables.extend(op_times(comparison));
    tables.extend(refusals(comparison));
    tables
}

fn layouts(comparison: &Comparison) -> Named {
    let subjects = &comparison.subjects;
    let any_run = comparison.runs().next().is_some();
    let any_step = comparison.any_step_measured();
    let longest = subjects.iter().map(|s| s.planned.predicted.step_s);
    let time = TimeUnit::for_longest(longest.fold(0.0, f64::max));
    let largest = subjects.iter().map(|s| s.planned.predicted.peak_gib);
    let memory = MemoryUnit::for_largest(largest.fold(0.0, f64::max));
    let mut headings: Vec<String> = ["name", "layout"].map(str::to_owned).to_vec();
    headings.push(format!(">predicted step ({})", time.name()));
    let any_interval = subjects
        .iter()
        .any(|s| format::interval(&s.planned.predicted).is_some());
    if any_interval {
        headings.push(">four of five steps".to_owned());
    }
    if any_step {
        headings.push(format!(">measured step ({})", time.name()));
        headings.push(">error".to_owned());
    }
    headings.push(format!(">tokens/s/{}", comparison.rank_word()));
    headings.push(">MFU".to_owned());
    headings.push(format!(">predicted peak ({})", memory.name()));
    if any_run {
        headings.push(format!(">measured peak ({})", memory.name()));
    }
    headings.push(">of capacity".to_owned());
    headings.push("recompute".to_owned());
    headings.push("dispatcher".to_owned());
    let mut shown = Table::new(&headings);
    for s in subjects {
        let predicted = &s.planned.predicted;
        let mut cells = vec![s.name.clone(), s.described()];
        cells.push(format::three_digits(predicted.step_s * time.per_second()));
        if any_interval {
            let interval = format::interval(predicted);
            cells.push(interval.unwrap_or_else(|| "-".to_owned()));
        }
        if any_step {
            cells.push(or_dash(s.measured_step_s(), |t| {
                format::three_digits(t * time.per_second())
            }));
            cells.push(or_dash(s.step_error(), format::signed_percent));
        }
        // Of the measured step, where there is one.
        let origin = match s.measured_step_s() {
            None if any_step => " (predicted)",
            _ => "",
        };
        let tokens = format::short_count(s.tokens_per_s_per_gpu());
        cells.push(format!("{tokens}{origin}"));
        cells.push(format!("{}{origin}", format::percent(s.mfu())));
        cells.push(format::three_digits(predicted.peak_gib * memory.per_gib()));
        if any_run {
            cells.push(or_dash(s.measured_peak_gib(), |gib| {
                format::three_digits(gib * memory.per_gib())
            }));
        }
        let capacity = s.setting.capacity_gib();
        cells.push(or_dash(capacity, |gib| {
            format::percent(predicted.peak_gib / gib)
        }));
        cells.push(format::recompute(&s.planned.recompute));
        cells.push(json_word(&s.planned.dispatcher));
        shown.row(cells);
    }
    Named {
        stem: "layouts".to_owned(),
        title: "Layouts".to_owned(),
        shown,
        raw: raw_layouts(subjects),
    }
}

fn raw_layouts(subjects: &[Subject]) -> Table {
    let mut raw = Table::new([
        "name",
        "model",
        "cluster",
        "gpus",
        "seq_len",
        "global_batch",
        "tp",
        "cp",
        "dp",
        "pp",
        "vpp",
        "ep",
        "etp",
        "edp",
        "mbs",
        "microbatches",
        "schedule",
        "dispatcher",
        "recompute",
        "precision",
        "stack",
        "predicted_step_s",
        "predicted_step_s_low",
        "predicted_step_s_high",
        "measured_step_s",
        "predicted_tokens_per_s_per_gpu",
        "measured_tokens_per_s_per_gpu",
        "predicted_mfu",
        "measured_mfu",
        "predicted_peak_gib",
        "measured_peak_gib",
        "capacity_gib",
    ]);
    for s in subjects {
        let (l, p) = (&s.planned.layout, &s.planned.predicted);
        let (model, cluster) = (&s.setting.model, &s.setting.cluster);
        let request = s.setting.request.as_ref();
        raw.row([
            s.name.clone(),
            model.as_ref().map_or_else(String::new, |m| m.name.clone()),
            cluster
                .as_ref()
                .map_or_else(String::new, |c| c.name.clone()),
            s.ranks().to_string(),
            request.map_or_else(String::new, |r| r.batch.seq_len.to_string()),
            request.map_or_else(String::new, |r| r.batch.global_batch.to_string()),
            l.tp.to_string(),
            l.cp.to_string(),
            l.dp.to_string(),
            l.pp.to_string(),
            l.vpp.to_string(),
            l.ep.to_string(),
            l.etp.to_string(),
            l.edp.to_string(),
            l.mbs.to_string(),
            l.microbatches.to_string(),
            json_word(&s.planned.pipeline.schedule),
            json_word(&s.planned.dispatcher),
            s.planned.recompute.to_string(),
            json_word(&s.planned.precision),
            json_word(&s.planned.stack),
            p.step_s.to_string(),
            or_nothing(p.step_s_low),
            or_nothing(p.step_s_high),
            or_nothing(s.measured_step_s()),
            p.tokens_per_s_per_gpu.to_string(),
            or_nothing(s.measured_tokens_per_s_per_gpu()),
            p.mfu.to_string(),
            or_nothing(s.measured_step_s().map(|_| s.mfu())),
            p.peak_gib.to_string(),
            or_nothing(s.measured_peak_gib()),
            or_nothing(s.setting.capacity_gib()),
        ]);
    }
    raw
}

/// A row for each prediction and each measurement.
fn both(subjects: &[Subject]) -> impl Iterator<Item = (&Subject, &'static str)> {
    subjects.iter().flat_map(|s| {
        let measured = s.measured.is_some().then_some((s, "measured"));
        std::iter::once((s, "predicted")).chain(measured)
    })
}

fn time(comparison: &Comparison) -> Named {
    let of = |s: &Subject, origin: &str| match (&s.measured, origin) {
        (Some(measured), "measured") => measured.summary.time_s.clone(),
        _ => s.planned.predicted.time_s.clone(),
    };
    let rows: Vec<_> = both(&comparison.subjects)
        .map(|(s, origin)| (s, origin, of(s, origin)))
        .collect();
    let longest = rows.iter().map(|(_, _, t)| t.total().0).fold(0.0, f64::max);
    let unit = TimeUnit::for_longest(longest);
    let used: Vec<Category> = Category::ALL
        .into_iter()
        .filter(|&c| rows.iter().any(|(_, _, t)| t.get(c).0 > 0.0))
        .collect();
    let mut shown = Table::new(
        ["name".to_owned(), "origin".to_owned()]
            .into_iter()
            .chain(
                used.iter()
                    .map(|&c| format!(">{}", color::category_label(c))),
            )
            .chain([format!(">step ({})", unit.name())]),
    );
    let mut raw = Table::new(
        ["name".to_owned(), "origin".to_owned()]
            .into_iter()
            .chain(Category::ALL.map(|c| format!("{}_s", c.name())))
            .chain(["step_s".to_owned()]),
    );
    for (s, origin, time) in &rows {
        let per = unit.per_second();
        let figure = |seconds: f64| format::in_column(seconds * per, longest * per);
        let head = [s.name.clone(), (*origin).to_owned()];
        shown.row(
            head.clone()
                .into_iter()
                .chain(used.iter().map(|&c| figure(time.get(c).0)))
                .chain([figure(time.total().0)]),
        );
        raw.row(
            head.into_iter()
                .chain(Category::ALL.map(|c| time.get(c).0.to_string()))
                .chain([time.total().0.to_string()]),
        );
    }
    Named {
        stem: "time".to_owned(),
        title: format!("Time of a step by category ({})", unit.name()),
        shown,
        raw,
    }
}

fn memory(comparison: &Comparison) -> Named {
    let of = |s: &Subject, origin: &str| match (&s.measured, origin) {
        (Some(_), "measured") => measured_gib(s),
        _ => Some(s.planned.predicted.memory_gib),
    };
    let rows: Vec<_> = both(&comparison.subjects)
        .filter_map(|(s, origin)| of(s, origin).map(|parts| (s, origin, parts)))
        .collect();
    let largest = rows.iter().map(|(_, _, p)| p.total()).fold(0.0, f64::max);
    let unit = MemoryUnit::for_largest(largest);
    let mut shown = Table::new(
        ["name".to_owned(), "origin".to_owned()]
            .into_iter()
            .chain(TensorClass::ALL.map(|class| format!(">{}", class.name())))
            .chain([format!(">peak ({})", unit.name())]),
    );
    let mut raw = Table::new(
        ["name".to_owned(), "origin".to_owned()]
            .into_iter()
            .chain(TensorClass::ALL.map(|class| format!("{}_gib", class.name())))
            .chain(["peak_gib".to_owned()]),
    );
    for (s, origin, parts) in &rows {
        let per = unit.per_gib();
        let figure = |gib: f64| format::in_column(gib * per, largest * per);
        let head = [s.name.clone(), (*origin).to_owned()];
        shown.row(
            head.clone()
                .into_iter()
                .chain(parts.iter().map(|(_, &gib)| figure(gib)))
                .chain([figure(parts.total())]),
        );
        raw.row(
            head.into_iter()
                .chain(parts.iter().map(|(_, gib)| gib.to_string()))
                .chain([parts.total().to_string()]),
        );
    }
    Named {
        stem: "memory".to_owned(),
        title: format!("Memory of the fullest rank by class ({})", unit.name()),
        shown,
        raw,
    }
}

fn op_times(comparison: &Comparison) -> Option<Named> {
    let mut shown = Table::new(
        ["name".to_owned()]
            .into_iter()
            .chain(op_headings(comparison)),
    );
    let mut raw = Table::new([
        "name",
        "op",
        "predicted_s",
        "measured_s",
        "predicted_calls",
        "measured_calls",
        "predicted_call_s",
        "measured_call_s",
        "share_of_difference",
    ]);
    for s in &comparison.subjects {
        for (op, share) in ops::by_miss(s) {
            shown.row(
                [s.name.clone()]
                    .into_iter()
                    .chain(op_cells(comparison, &op, share)),
            );
            let [predicted, measured] = op.call_s();
            raw.row([
                s.name.clone(),
                op.name.clone(),
                or_nothing(op.predicted),
                or_nothing(op.measured),
                or_nothing(op.calls[0]),
                or_nothing(op.calls[1]),
                or_nothing(predicted),
                or_nothing(measured),
                share.to_string(),
            ]);
        }
    }
    (!shown.is_empty()).then(|| Named {
        stem: "ops".to_owned(),
        title: "Busy time a step by op, predicted and measured".to_owned(),
        shown,
        raw,
    })
}

/// The ops of each run that are off by most, as text for a person.
pub(crate) fn op_text(comparison: &Comparison) -> String {
    let mut text = String::new();
    for (subject, _) in comparison.runs() {
        let ops = ops::by_miss(subject);
        if ops.is_empty() {
            continue;
        }
        let mut table = Table::new(op_headings(comparison));
        for (op, share) in ops.iter().take(MAX_OPS) {
            table.row(op_cells(comparison, op, *share));
        }
        let more = ops.len().saturating_sub(MAX_OPS);
        let rest = match more {
            0 => String::new(),
            more => format!("and {more} more in ops.csv\n"),
        };
        let heading = format!("\n{}, what is off by most first:\n", subject.name);
        text.extend([heading, table.text(), rest]);
    }
    text
}

/// Units of an op's time in a step and of one call.
fn op_units(comparison: &Comparison) -> [TimeUnit; 2] {
    let ops: Vec<OpTime> = comparison.subjects.iter().flat_map(ops::of).collect();
    let longest = |seconds: &mut dyn Iterator<Item = Option<f64>>| {
        TimeUnit::for_longest(seconds.flatten().fold(0.0, f64::max))
    };
    [
        longest(&mut ops.iter().flat_map(|op| [op.predicted, op.measured])),
        longest(&mut ops.iter().flat_map(OpTime::call_s)),
    ]
}

fn op_headings(comparison: &Comparison) -> impl Iterator<Item = String> + use<> {
    let [step, call] = op_units(comparison).map(TimeUnit::name);
    [
        "op".to_owned(),
        format!(">predicted ({step})"),
        format!(">measured ({step})"),
        ">error".to_owned(),
        format!(">off by ({step})"),
        ">share of difference".to_owned(),
        ">calls: predicted".to_owned(),
        ">calls: measured".to_owned(),
        format!(">a call: predicted ({call})"),
        format!(">a call: measured ({call})"),
    ]
    .into_iter()
}

fn op_cells(
    comparison: &Comparison,
    op: &OpTime,
    share: f64,
) -> impl Iterator<Item = String> + use<> {
    let [step, call] = op_units(comparison);
    let figure = |unit: TimeUnit| move |s: f64| format::three_digits(s * unit.per_second());
    let calls = op.calls.map(|calls| or_dash(calls, format::calls));
    let [predicted, measured] = op.call_s().map(|s| or_dash(s, figure(call)));
    let [predicted_calls, measured_calls] = calls;
    [
        op.name.clone(),
        or_dash(op.predicted, figure(step)),
        or_dash(op.measured, figure(step)),
        or_dash(op.error(), format::signed_percent),
        figure(step)(op.miss_s()),
        format::percent(share),
        predicted_calls,
        measured_calls,
        predicted,
        measured,
    ]
    .into_iter()
}

/// Where the memory of the fullest rank of each run went, beyond its tensors.
fn reserved(comparison: &Comparison) -> Option<Named> {
    let held: Vec<(&Subject, Held)> = comparison
        .runs()
        .filter_map(|(s, measured)| Some((s, Held::of(&measured.summary)?)))
        .collect();
    let largest = held.iter().map(|(_, held)| {
        let reserved = held.pool.map_or(Bytes::ZERO, |pool| pool.reserved);
        reserved.max(held.tensors()).max(held.resident).gib()
    });
    let largest = largest.fold(0.0, f64::max);
    let unit = MemoryUnit::for_largest(largest);
    let mut shown = Table::new(
        ["name", ">rank"]
            .map(str::to_owned)
            .into_iter()
            .chain(
                [
                    "tensors",
                    "holes",
                    "reserved, not reached",
                    "reserved",
                    "beside tensors",
                    "process",
                ]
                .map(|what| format!(">{what} ({})", unit.name())),
            )
            .chain([">growths".to_owned()]),
    );
    let mut raw = Table::new([
        "name",
        "rank",
        "tensor_bytes",
        "hole_bytes",
        "unused_bytes",
        "reserved_bytes",
        "beside_bytes",
        "resident_bytes",
        "growths",
    ]);
    for (s, held) in held {
        let pool = held.pool;
        let sizes = [
            Some(held.tensors()),
            pool.map(|pool| pool.holes),
            pool.map(|pool| pool.unused),
            pool.map(|pool| pool.reserved),
            (!held.is_host()).then_some(held.beside),
            (held.resident > Bytes::ZERO).then_some(held.resident),
        ];
        let per = unit.per_gib();
        let size = |bytes: Option<Bytes>| {
            or_dash(bytes.map(Bytes::gib), |gib| {
                format::in_column(gib * per, largest * per)
            })
        };
        let head = [s.name.clone(), held.rank.to_string()];
        let growths = pool.map(|pool| pool.growths);
        let count = |none: &str| growths.map_or_else(|| none.to_owned(), |n| n.to_string());
        let cells = head.clone().into_iter().chain(sizes.map(size));
        shown.row(cells.chain([count("-")]));
        let bytes = |bytes: Option<Bytes>| bytes.map_or_else(String::new, |b| b.0.to_string());
        raw.row(head.into_iter().chain(sizes.map(bytes)).chain([count("")]));
    }
    (!shown.is_empty()).then(|| Named {
        stem: "reserved".to_owned(),
        title: format!(
            "Memory of the fullest rank of each run, beyond its tensors at the peak ({})",
            unit.name()
        ),
        shown,
        raw,
    })
}

fn refusals(comparison: &Comparison) -> Option<Named> {
    let mut shown = Table::new(["search", "reason", ">layouts"]);
    let mut raw = Table::new(["search", "reason", "layouts"]);
    for (name, search) in &comparison.searches {
        let mut refused: Vec<(&String, &u64)> = search.refused.iter().collect();
        refused.sort_by(|a, b| b.1.cmp(a.1).then_with(|| a.0.cmp(b.0)));
        for (reason, count) in refused {
            shown.row([name.clone(), reason.clone(), format::grouped(*count)]);
            raw.row([name.clone(), reason.clone(), count.to_string()]);
        }
    }
    (!shown.is_empty()).then(|| Named {
        stem: "refused".to_owned(),
        title: "Layouts refused by the search, by reason".to_owned(),
        shown,
        raw,
    })
}

fn or_dash(value: Option<f64>, write: impl Fn(f64) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), write)
}

fn or_nothing(value: Option<f64>) -> String {
    value.map_or_else(String::new, |v| v.to_string())
}
