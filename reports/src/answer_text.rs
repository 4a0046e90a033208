//! [`plan_table`]: the answer of a search as text for a person.
//!
//! What is best and what comes next, where the time and the memory of each go, why the runners-up
//! lost, and what the search refused. The machine-readable form is the [`Answer`] itself.

use std::fmt::Write as _;

use moefold_planner::answer::{
    Answer, PlacedExperts, PlacedLayer, RuledOut, Untried, Verdict, Why,
};
use moefold_planner::choice::Objective;
use moefold_planner::plan::{Alternative, PlannedLayout, PlannedRouting};
use moefold_profiles::{Category, TensorClass};

use crate::draw::color;
use crate::format::{self, MemoryUnit, TimeUnit};
use crate::sizes;
use crate::subject::json_word;
use crate::tables::Table;

/// Plans whose breakdown is shown, side by side.
const MAX_COLUMNS: usize = 5;
/// The share of a device's memory from which a plan is called tight. The memory model counts
/// fragmentation at its mean of 5 %; the measurements behind that reach 9.3 %.
const TIGHT: f64 = 0.95;
/// Reasons of refusal that are listed; the rest are summed.
const MAX_REASONS: usize = 12;

/// The answer of a search in aligned text, without colour, ending in a newline. `runners_up` says why
/// each of `plans[1..]` lost, as the search found it.
pub fn plan_table(answer: &Answer, runners_up: &[Alternative]) -> String {
    let mut out = String::new();
    if let Some(asked) = asked(answer) {
        line(&mut out, &asked);
        out.push('\n');
    }
    if answer.plans.is_empty() {
        line(&mut out, "No layout is feasible.");
    } else {
        out.push_str(&ranking(answer).text());
        let shown = &answer.plans[..answer.plans.len().min(MAX_COLUMNS)];
        out.push('\n');
        out.push_str(&time(shown).text());
        out.push('\n');
        out.push_str(&memory(answer, shown).text());
        out.push('\n');
        line(&mut out, &prices(&answer.plans[0]));
        let notes = [
            interval(&answer.plans[0]),
            told_apart(answer),
            routing(&answer.plans[0]),
            by_layer(answer),
            offloaded(answer),
            without_experts(answer),
            headroom(answer),
            tight(answer),
            beyond_positions(answer),
            outside_domain(answer),
        ];
        for note in notes.into_iter().flatten() {
            line(&mut out, &note);
        }
        let lost = lost(runners_up);
        if !lost.is_empty() {
            out.push('\n');
            out.push_str(&lost.text());
        }
    }
    for table in [sizes::table(answer), sizes::lengths(answer)]
        .into_iter()
        .flatten()
    {
        out.push('\n');
        out.push_str(&table.text());
    }
    if let Some(experts) = &answer.experts {
        out.push('\n');
        line(&mut out, &placed(experts));
    }
    if let Some(why) = &answer.why {
        out.push('\n');
        out.push_str(&became(answer, why));
    }
    out.push('\n');
    out.push_str(&search(answer));
    out
}

/// How experts are best placed.
fn placed(experts: &PlacedExperts) -> String {
    let layers = &experts.layers;
    let mean = |own: fn(&PlacedLayer) -> f64| {
        layers.iter().map(own).sum::<f64>() / layers.len().max(1) as f64
    };
    let held = match experts.copies {
        0 => "each on one rank".to_owned(),
        copies => format!("{copies} more on each rank"),
    };
    let comes = match experts.step_s {
        Some(step_s) => format!(
            "Under that routing #1 takes {} a step, and so placed {} ({}). Megatron-LM places experts in order, so give it a \
             checkpoint in which experts and rows of routers are in this order",
            format::seconds(experts.in_order_step_s),
            format::seconds(step_s),
            format::signed_percent(step_s / experts.in_order_step_s - 1.0)
        ),
        None => {
            "Megatron-LM holds no expert more than once, and their memory is not counted".to_owned()
        }
    };
    format!(
        "Experts in order leave the busiest of {} ranks {:.3} times the mean, over the layers; placed by mean load, {held}, \
         {:.3} times (no placement below {:.3}). {comes}; --json has the placement.",
        experts.ep,
        mean(|layer| layer.in_order),
        mean(|layer| layer.busiest),
        mean(|layer| layer.at_least)
    )
}

/// What became of a layout that was asked about.
fn became(answer: &Answer, why: &Why) -> String {
    let mut out = String::new();
    let asked = &why.asked;
    let (Some(best), Some(first)) = (&why.best, answer.plans.first()) else {
        let what = match why.verdict {
            Verdict::Memory => "does not fit",
            _ => "is refused",
        };
        line(&mut out, &format!("{asked} {what}:"));
        for rule in &why.rules {
            line(&mut out, &format!("  {rule}"));
        }
        return out;
    };
    let own = format!(
        "{asked} is at best {} with recompute {}{}, {} a step and {} at its peak",
        format::candidate(best),
        format::recompute(&best.recompute),
        best.cuda_graph
            .map_or_else(String::new, |graphs| format!(" and CUDA graphs {graphs}")),
        format::seconds(best.step_s),
        format::gib(best.peak_gib)
    );
    if why.verdict == Verdict::First {
        line(&mut out, &format!("{own}: it is #1."));
        return out;
    }
    let slower = format::signed_percent(best.step_s / first.predicted.step_s - 1.0);
    line(&mut out, &format!("{own}: {slower} against #1."));
    if why.verdict == Verdict::Ahead {
        let text = format!(
            "The search did not try it so: other microbatches, virtual stages and splits are tried for its #1 only. \
             --layout {asked} plans it."
        );
        line(&mut out, &text);
    }
    if let (Some(bounds), Verdict::Slower, Some(last)) =
        (&why.bounds, why.verdict, answer.plans.last())
    {
        let (bound, least_s) = match bounds.ruled_out {
            Some(RuledOut::Work) => ("the work of its layers rules it out", bounds.work_s),
            Some(RuledOut::Split) => ("the time of its best split rules it out", bounds.split_s),
            None => ("no bound rules it out", bounds.split_s),
        };
        let text = format!(
            "It takes {} at least, and the last plan shown takes {}: {bound}.",
            format::seconds(least_s),
            format::seconds(last.predicted.step_s)
        );
        line(&mut out, &text);
    }
    let mut table = Table::new(["category".to_owned(), ">against #1 (s)".to_owned()]);
    for category in Category::ALL {
        if let Some(more_s) = why.more_s.get(category.name()) {
            table.row([
                color::category_label(category).to_owned(),
                format!("{more_s:+.4}"),
            ]);
        }
    }
    table.row([
        "step".to_owned(),
        format!("{:+.4}", best.step_s - first.predicted.step_s),
    ]);
    out.push_str(&table.text());
    out
}

fn line(out: &mut String, text: &str) {
    out.push_str(text);
    out.push('\n');
}

/// Model, cluster and request in a line; what is unknown is left out.
fn asked(answer: &Answer) -> Option<String> {
    let model = answer.model.as_ref()?;
    let mut text = model.name.clone();
    if let (Some(cluster), Some(request)) = (&answer.cluster, &answer.request) {
        let ranks = if cluster.gpu.is_cpu() {
            format!("{} CPU ranks", request.gpus)
        } else {
            format!("{} {}", request.gpus, cluster.gpu.name)
        };
        write!(
            text,
            " on {ranks} ({}), sequence {}, global batch {}",
            cluster.name, request.batch.seq_len, request.batch.global_batch
        )
        .expect("writing to a string does not fail");
    }
    Some(text)
}

fn ranking(answer: &Answer) -> Table {
    let plans = &answer.plans;
    let longest = plans.iter().map(|p| p.predicted.step_s).fold(0.0, f64::max);
    let largest = plans.iter().map(|p| p.predicted.peak_gib);
    let largest = largest.fold(0.0, f64::max);
    let time = TimeUnit::for_longest(longest);
    let memory = MemoryUnit::for_largest(largest);
    let is_cpu = answer.cluster.as_ref().is_some_and(|c| c.gpu.is_cpu());
    let rank = if is_cpu { "rank" } else { "GPU" };
    let mut table = Table::new([
        ">#".to_owned(),
        "layout".to_owned(),
        "schedule".to_owned(),
        ">microbatches".to_owned(),
        "recompute".to_owned(),
        "dispatcher".to_owned(),
        format!(">step ({})", time.name()),
        format!(">tokens/s/{rank}"),
        format!(">TFLOP/s/{rank}"),
        ">MFU".to_owned(),
        format!(">peak ({})", memory.name()),
    ]);
    for (i, plan) in plans.iter().enumerate() {
        let p = &plan.predicted;
        table.row([
            (i + 1).to_string(),
            format::planned(plan),
            json_word(&plan.pipeline.schedule),
            plan.layout.microbatches.to_string(),
            match plan.recompute.alike() {
                Some(set) => set.to_string(),
                None if plan.recompute.block().is_some() => plan.recompute.to_string(),
                None => "by layer".to_owned(),
            },
            json_word(&plan.dispatcher),
            format::in_column(p.step_s * time.per_second(), longest * time.per_second()),
            format::short_count(p.tokens_per_s_per_gpu),
            format::three_digits(p.model_tflops_per_gpu),
            format::percent(p.mfu),
            format::in_column(p.peak_gib * memory.per_gib(), largest * memory.per_gib()),
        ]);
    }
    table
}

/// A row a category, a column a plan, shares beside the seconds of the first.
fn time(plans: &[PlannedLayout]) -> Table {
    let longest = plans.iter().map(|p| p.predicted.step_s).fold(0.0, f64::max);
    let unit = TimeUnit::for_longest(longest);
    let mut table = Table::new(columns(
        format!("time of a step ({})", unit.name()),
        plans.len(),
    ));
    let per = unit.per_second();
    let figure = |seconds: f64| format::in_column(seconds * per, longest * per);
    for category in Category::ALL {
        let of = |p: &PlannedLayout| p.predicted.time_s.get(category).0;
        if plans.iter().all(|p| of(p) == 0.0) {
            continue;
        }
        let first = &plans[0].predicted;
        let share = format::percent(of(&plans[0]) / first.time_s.total().0);
        table.row(
            [color::category_label(category).to_owned()]
                .into_iter()
                .chain(plans.iter().map(|p| figure(of(p))))
                .chain([share]),
        );
    }
    table.row(
        ["step".to_owned()]
            .into_iter()
            .chain(plans.iter().map(|p| figure(p.predicted.time_s.total().0)))
            .chain(["100%".to_owned()]),
    );
    table
}

/// A row a class of memory, a column a plan.
fn memory(answer: &Answer, plans: &[PlannedLayout]) -> Table {
    let largest = plans.iter().map(|p| p.predicted.peak_gib);
    let largest = largest.fold(0.0, f64::max);
    let unit = MemoryUnit::for_largest(largest);
    let mut table = Table::new(columns(
        format!("memory of the fullest rank ({})", unit.name()),
        plans.len(),
    ));
    let per = unit.per_gib();
    let figure = |gib: f64| format::in_column(gib * per, largest * per);
    let first = &plans[0].predicted;
    for class in TensorClass::ALL {
        let of = |p: &PlannedLayout| p.predicted.memory_gib[class];
        if plans.iter().all(|p| of(p) == 0.0) {
            continue;
        }
        let share = format::percent(of(&plans[0]) / first.memory_gib.total());
        table.row(
            [class.name().to_owned()]
                .into_iter()
                .chain(plans.iter().map(|p| figure(of(p))))
                .chain([share]),
        );
    }
    table.row(
        ["peak".to_owned()]
            .into_iter()
            .chain(plans.iter().map(|p| figure(p.predicted.peak_gib)))
            .chain(["100%".to_owned()]),
    );
    if plans.iter().any(|p| p.predicted.host_gib.is_some()) {
        let on_host = |p: &PlannedLayout| figure(p.predicted.host_gib.unwrap_or(0.0));
        table.row(
            ["on the host".to_owned()]
                .into_iter()
                .chain(plans.iter().map(on_host))
                .chain([String::new()]),
        );
    }
    if let Some(cluster) = &answer.cluster {
        let capacity = cluster.gpu.memory_gib;
        let share = |p: &PlannedLayout| format::percent(p.predicted.peak_gib / capacity);
        table.row(
            [format!("of {}", format::gib(capacity))]
                .into_iter()
                .chain(plans.iter().map(share))
                .chain([String::new()]),
        );
    }
    table
}

fn columns(first: String, plans: usize) -> impl Iterator<Item = String> {
    [first]
        .into_iter()
        .chain((1..=plans).map(|i| format!(">#{i}")))
        .chain([">of #1".to_owned()])
}

/// How the prices of a plan are known.
fn prices(plan: &PlannedLayout) -> String {
    let c = &plan.predicted.confidence;
    format!(
        "Prices of #1 by share of busy time: {} measured, {} interpolated, {} extrapolated.",
        format::percent(c.measured),
        format::percent(c.interpolated),
        format::percent(c.extrapolated)
    )
}

/// How the experts of the first plan are assumed to be loaded, and what another load would do.
fn routing(plan: &PlannedLayout) -> Option<String> {
    let p = &plan.predicted;
    Some(match p.routing.as_ref()? {
        PlannedRouting::Balanced { .. } if plan.layout.ep == 1 => {
            "Routing does not matter to #1: each rank holds all experts.".to_owned()
        }
        PlannedRouting::Balanced { doubled } => {
            let gib = format::gib(doubled.peak_gib);
            format!(
                "Routing is assumed to be balanced. Where one rank's experts get twice their even share, \
                 #1 peaks at {gib} ({}) and takes {} a step ({}); --routing RUN_DIR takes the routing of \
                 a run.",
                format::signed_percent(doubled.peak_gib / p.peak_gib - 1.0),
                format::seconds(doubled.step_s),
                format::signed_percent(doubled.step_s / p.step_s - 1.0),
            )
        }
        PlannedRouting::Recorded {
            source,
            busiest,
            fullest,
            balanced,
        } => {
            let mean = |loads: &[f64]| loads.iter().sum::<f64>() / loads.len().max(1) as f64;
            format!(
                "Routing is that of {source}: over the layers, the busiest rank of #1 gets {:.2} times its \
                 even share; where memory peaks, a rank has {:.2} times. Against balanced routing that \
                 costs {} a step ({}) and {} of the fullest rank ({}).",
                mean(busiest),
                mean(fullest),
                format::seconds(p.step_s - balanced.step_s),
                format::signed_percent(p.step_s / balanced.step_s - 1.0),
                format::gib(p.peak_gib - balanced.peak_gib),
                format::signed_percent(p.peak_gib / balanced.peak_gib - 1.0),
            )
        }
    })
}

/// How far the step of a plan may be from what is predicted.
fn interval(plan: &PlannedLayout) -> Option<String> {
    let interval = format::interval(&plan.predicted)?;
    Some(format!("Four of five steps like #1 take {interval}."))
}

/// Whether the first two plans can be told apart.
fn told_apart(answer: &Answer) -> Option<String> {
    let [first, second, ..] = answer.plans.as_slice() else {
        return None;
    };
    let needed = answer.search.told_apart?;
    let slower = second.predicted.step_s / first.predicted.step_s - 1.0;
    // Where memory is the objective, the second may be faster.
    let apart = slower.abs() > needed;
    (!apart).then(|| {
        format!(
            "#1 and #2 cannot be told apart: they differ by {}, and layouts as unlike as these by {} or more \
             are told apart.",
            format::percent(slower.abs()),
            format::percent(needed)
        )
    })
}

/// What of the plans rests on the host, where something does.
fn offloaded(answer: &Answer) -> Option<String> {
    let plans = (1..).zip(&answer.plans);
    let some = plans.filter(|(_, plan)| !plan.offload.is_none());
    let words: Vec<String> = some
        .map(|(rank, plan)| format!("#{rank} {}", plan.offload))
        .collect();
    (!words.is_empty()).then(|| format!("On the host between the passes: {}.", words.join("; ")))
}

/// What plans recompute whose layers differ.
fn by_layer(answer: &Answer) -> Option<String> {
    let plans = (1..).zip(&answer.plans);
    let differ = plans.filter(|(_, plan)| plan.recompute.alike().is_none());
    let words =
        differ.map(|(rank, plan)| format!("#{rank} {}", format::recompute(&plan.recompute)));
    let words = words.collect::<Vec<_>>().join("; ");
    (!words.is_empty()).then(|| format!("By layer: {words}."))
}

/// Whose time is shown where it has none of the experts: layers before them are dense, and the first pipeline
/// rank, which has those, ends last.
fn without_experts(answer: &Answer) -> Option<String> {
    let has_experts = answer.model.as_ref()?.num_moe_layers() > 0;
    let without = |plan: &PlannedLayout| {
        let time = plan.predicted.time_s.get(Category::Experts).0;
        has_experts && plan.layout.pp > 1 && time == 0.0
    };
    let shown = (1..).zip(answer.plans.iter().take(MAX_COLUMNS));
    let all: Vec<String> = shown
        .filter(|(_, plan)| without(plan))
        .map(|(rank, _)| format!("#{rank}"))
        .collect();
    (!all.is_empty()).then(|| {
        format!(
            "Time is that of the pipeline rank that ends last, which in {} holds no experts.",
            all.join(", ")
        )
    })
}

/// What plans were to leave free, where that ruled some out.
fn headroom(answer: &Answer) -> Option<String> {
    let device = answer.cluster.as_ref()?.gpu.memory_gib;
    let limit = answer.search.memory_limit_gib?;
    answer.search.refused.get("memory")?;
    Some(format!(
        "Plans leave {} of {} free (--memory-headroom).",
        format::percent(1.0 - limit / device),
        format::gib(device)
    ))
}

/// A warning about plans that leave less of the memory than allocators differ by.
fn tight(answer: &Answer) -> Option<String> {
    let capacity = answer.cluster.as_ref()?.gpu.memory_gib;
    let tight: Vec<String> = (1..)
        .zip(&answer.plans)
        .filter(|(_, plan)| plan.predicted.peak_gib > TIGHT * capacity)
        .map(|(rank, _)| format!("#{rank}"))
        .collect();
    (!tight.is_empty()).then(|| {
        format!(
            "Tight: over {} of the memory in {}. Context, communicators and mean fragmentation are \
             counted; a run that fragments more may not fit.",
            format::percent(TIGHT),
            tight.join(", ")
        )
    })
}

/// That sequences are longer than the model is told to take.
fn beyond_positions(answer: &Answer) -> Option<String> {
    let known = answer.model.as_ref()?.max_position?;
    let asked = answer.request.as_ref()?.batch.seq_len;
    (asked > known).then(|| {
        format!(
            "Sequences have {} tokens, and the config of the model says at most {} positions: it has to be extended first.",
            format::grouped(asked),
            format::grouped(known)
        )
    })
}

/// Why the experts of the first plan reach past an NVLink domain.
fn outside_domain(answer: &Answer) -> Option<String> {
    let inside = answer.search.inside_domain.as_ref()?;
    let first = &answer.plans[0];
    let ranks = first.layout.ep * first.layout.etp;
    let reach = format!(
        "The experts of #1 span {ranks} GPUs, past the NVLink domain of {}",
        inside.gpus_per_domain
    );
    Some(match &inside.best {
        None => format!("{reach}: no layout that keeps them inside is feasible."),
        Some(best) => {
            let slower = best.step_s / first.predicted.step_s - 1.0;
            format!(
                "{reach}: the best layout that keeps them inside, {}, takes {} a step, {} {}.",
                format::candidate(best),
                format::seconds(best.step_s),
                format::percent(slower.abs()),
                if slower < 0.0 { "less" } else { "more" }
            )
        }
    })
}

/// Why each runner-up is not first.
fn lost(runners_up: &[Alternative]) -> Table {
    let mut table = Table::new([">#", "why it is not #1 (mean over pipeline ranks)"]);
    for (i, runner_up) in runners_up.iter().enumerate() {
        table.row([(i + 2).to_string(), runner_up.why.clone()]);
    }
    table
}

/// What is tried only where it is named, each with what the degrees of #1 come to under it, as far as that is known.
fn untried(answer: &Answer) -> Option<String> {
    let first = &answer.plans.first()?.predicted;
    let request = answer.request.as_ref();
    let by_memory = request.is_some_and(|request| request.objective == Objective::Memory);
    let change = |own: f64, first: f64| format::signed_percent(own / first - 1.0);
    let comes = |one: &Untried| {
        let gib = one.peak_gib?;
        Some(match (one.fits?, one.step_s) {
            (false, _) => format!("needs {gib:.1} GiB"),
            (true, Some(step_s)) if !by_memory => {
                let change = change(step_s, first.step_s);
                format!("{}, {change}", format::seconds(step_s))
            }
            (true, _) => format!("{gib:.1} GiB, {}", change(gib, first.peak_gib)),
        })
    };
    let each = answer.search.not_searched.iter().map(|one| {
        let comes = comes(one).map_or(String::new(), |comes| format!(" ({comes})"));
        format!("{}{comes}", one.flag())
    });
    let each = each.collect::<Vec<_>>().join(", ");
    (!each.is_empty())
        .then(|| format!("Tried only where named, here at the degrees and stages of #1 as far as they allow these: {each}."))
}

fn search(answer: &Answer) -> String {
    let search = &answer.search;
    let refused: u64 = search.refused.values().sum();
    // Zero where the caller keeps clocks out of its output.
    let time = if search.elapsed_s > 0.0 {
        format!(" in {}", format::seconds(search.elapsed_s))
    } else {
        String::new()
    };
    let mut out = format!(
        "Looked at {} layouts{time}: {} refused, {} ruled out by a bound, {} priced. ",
        format::grouped(search.space),
        format::grouped(refused),
        format::grouped(search.pruned),
        format::grouped(search.priced)
    );
    if search.optimal {
        let best = crate::findings::is_best(search);
        line(&mut out, &format!("#1 is {best}."));
    } else {
        line(
            &mut out,
            &format!(
                "Under the cost model #1 is the best of those priced; {}.",
                crate::findings::left_open(search)
            ),
        );
    }
    if !search.offloaded_together.is_empty() {
        let each = search.offloaded_together.iter().map(ToString::to_string);
        let each = each.collect::<Vec<_>>().join(", ");
        let told =
            format!("--offload auto tried all unions of {each} that are legal, and no other set.");
        line(&mut out, &told);
    }
    if let Some(untried) = untried(answer) {
        line(&mut out, &untried);
    }
    let mut reasons: Vec<(&String, u64)> = search.refused.iter().map(|(k, n)| (k, *n)).collect();
    reasons.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(b.0)));
    let mut table = Table::new([">refused", "reason"]);
    for (reason, count) in reasons.iter().take(MAX_REASONS) {
        table.row([format::grouped(*count), (*reason).clone()]);
    }
    if reasons.len() > MAX_REASONS {
        let rest: u64 = reasons[MAX_REASONS..].iter().map(|(_, n)| n).sum();
        let kinds = reasons.len() - MAX_REASONS;
        table.row([format::grouped(rest), format!("{kinds} other reasons")]);
    }
    if !table.is_empty() {
        out.push('\n');
        out.push_str(&table.text());
    }
    out
}

#[cfg(test)]
mod tests {
    use moefold_planner::answer::{InsideDomain, Size};
    use moefold_planner::plan::Outcome;
    use moefold_profiles::units::Seconds;

    use super::*;
    use crate::sample;

    #[test]
    fn golden_answer_of_two() {
        let mut answer = sample::answer(2);
        let first = answer.plans[0].predicted.clone();
        answer.plans[1].predicted.time_s = first.time_s.scaled(1.1);
        answer.plans[1].predicted.step_s = 1.1 * first.step_s;
        let runner_up = Alternative {
            schedule: None,
            rank_order: None,
            cp_comm_type: None,
            cuda_graph: None,
            layout: answer.plans[1].layout,
            recompute: answer.plans[1].recompute.clone(),
            step_s: 1.1 * first.step_s,
            peak_gib: answer.plans[1].predicted.peak_gib,
            why: "10.0 % slower: experts +0.41 s".to_owned(),
        };
        let text = plan_table(&answer, &[runner_up]);
        for part in [
            "Mixtral-8x22B-v0.1 on 128 h100 (dgx-h100), sequence 4096, global batch 256\n",
            "1  TP2 PP4x7 DP16 | EP8 EDP4 | mbs 1  interleaved            16  none       alltoall",
            "experts                 4.100  4.510  46.8%\n",
            "activations",
            "2  10.0 % slower: experts +0.41 s\n",
            "#1 is the best of them under the cost model.\n",
            "  9 120  memory\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn plans_that_differ_by_less_than_is_known_are_said_to() {
        let mut answer = sample::answer(2);
        let first = answer.plans[0].predicted.step_s;
        answer.search.told_apart = Some(0.05);
        answer.plans[0].predicted.step_s_low = Some(0.9 * first);
        for (slower, said) in [(1.04, true), (1.06, false)] {
            answer.plans[1].predicted.step_s = slower * first;
            let text = plan_table(&answer, &[]);
            assert!(text.contains("Four of five steps like #1 take "), "{text}");
            assert_eq!(text.contains("cannot be told apart"), said, "{text}");
        }
        // Plans of older files have neither.
        answer.search.told_apart = None;
        answer.plans[0].predicted.step_s_low = None;
        let text = plan_table(&answer, &[]);
        assert!(
            !text.contains("told apart") && !text.contains("Four of five"),
            "{text}"
        );
    }

    #[test]
    fn a_rank_without_experts_is_said_to_be_one() {
        let mut answer = sample::answer(2);
        let said = |answer: &Answer| plan_table(answer, &[]).contains("holds no experts");
        assert!(!said(&answer));
        let plan = &mut answer.plans[1];
        assert!(plan.layout.pp > 1);
        let time = plan.predicted.time_s.get(Category::Experts);
        plan.predicted
            .time_s
            .add(Category::Experts, Seconds(-time.0));
        let text = plan_table(&answer, &[]);
        assert!(
            text.contains("ends last, which in #2 holds no experts.\n"),
            "{text}"
        );
    }

    #[test]
    fn plans_near_capacity_and_experts_past_a_domain_are_explained() {
        let mut answer = sample::answer(2);
        let text = plan_table(&answer, &[]);
        assert!(!text.contains("Tight") && !text.contains("span"), "{text}");
        let capacity = answer.cluster.as_ref().expect("a cluster").gpu.memory_gib;
        answer.plans[1].predicted.peak_gib = 0.97 * capacity;
        let mut best = answer.search.feasible[0].clone();
        best.step_s = 1.25 * answer.plans[0].predicted.step_s;
        answer.search.inside_domain = Some(InsideDomain {
            gpus_per_domain: 4,
            best: Some(best),
        });
        let text = plan_table(&answer, &[]);
        for part in [
            "of the memory in #2. ",
            "The experts of #1 span 8 GPUs, past the NVLink domain of 4: the best layout",
            " a step, 25.0% more.\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn sequences_beyond_the_positions_of_a_model_are_said() {
        let mut answer = sample::answer(1);
        let seq_len = answer.request.as_ref().expect("asked").batch.seq_len;
        for (positions, is_said) in [
            (None, false),
            (Some(seq_len), false),
            (Some(seq_len - 1), true),
        ] {
            answer.model.as_mut().expect("a model").max_position = positions;
            let said = plan_table(&answer, &[]).contains("it has to be extended first");
            assert_eq!(said, is_said, "{positions:?}");
        }
    }

    #[test]
    fn golden_routing_is_said_with_what_another_would_do() {
        let mut answer = sample::answer(1);
        let text = |answer: &Answer| plan_table(answer, &[]);
        assert!(
            !text(&answer).contains("outing"),
            "older answers say nothing"
        );
        let p = &mut answer.plans[0].predicted;
        let outcome = |step: f64, peak: f64| Outcome {
            step_s: step * p.step_s,
            peak_gib: peak * p.peak_gib,
        };
        let (doubled, balanced) = (outcome(1.25, 1.5), outcome(0.8, 0.5));
        p.routing = Some(PlannedRouting::Balanced { doubled });
        let said = text(&answer);
        for part in [
            "assumed to be balanced",
            "(+50%)",
            "(+25%)",
            "--routing RUN_DIR",
        ] {
            assert!(said.contains(part), "{part:?} is not in\n{said}");
        }
        answer.plans[0].layout.ep = 1;
        assert!(text(&answer).contains("does not matter to #1"));
        answer.plans[0].predicted.routing = Some(PlannedRouting::Recorded {
            source: "runs/one".to_owned(),
            busiest: vec![1.0, 1.5],
            fullest: vec![1.5, 2.0],
            balanced,
        });
        let said = text(&answer);
        for part in [
            "that of runs/one",
            "gets 1.25 times",
            "has 1.75 times",
            "(+25%)",
            "(+100%)",
        ] {
            assert!(said.contains(part), "{part:?} is not in\n{said}");
        }
    }

    #[test]
    fn a_first_plan_that_is_not_proven_best_says_what_is_left() {
        let mut answer = sample::answer(1);
        (answer.search.optimal, answer.search.gap) = (false, 0.02);
        let text = plan_table(&answer, &[]);
        let part = "another split or recomputation of its layers could gain at most 2.0%";
        assert!(text.contains(part), "{text}");
        answer.search.unseen = Some(41_223);
        let text = plan_table(&answer, &[]);
        let part =
            "the search was stopped, and 41 223 that it has not looked at could gain at most 2.0%";
        assert!(text.contains(part), "{text}");
        (answer.search.gap, answer.search.gap_of_others) = (0.0, Some(0.03));
        let text = plan_table(&answer, &[]);
        let part = "; other layouts could gain at most 3.0% with their layers split otherwise.";
        assert!(text.contains(part), "{text}");
        (answer.search.optimal, answer.search.gap_of_others) = (true, Some(0.0));
        let text = plan_table(&answer, &[]);
        let part = "#1 is the best of them under the cost model, however their layers are split.";
        assert!(text.contains(part), "{text}");
    }

    #[test]
    fn golden_sizes_have_a_row_each_and_what_is_known() {
        let mut answer = sample::answer(1);
        let size = |gpus: u32, step_s: f64| Size {
            gpus,
            step_s,
            tokens_per_s: 1e6 / step_s,
            days: Some(step_s * 10.0),
            usd_per_trillion_tokens: None,
            failures: None,
        };
        answer.sizes = vec![size(64, 20.0), size(128, 11.0)];
        let text = plan_table(&answer, &[]);
        let table = "\nGPUs  step (s)  tokens/s  days\n  64      20.0    50 000   200\n 128      11.0    90 909   110  #1\n";
        assert!(text.contains(table), "{text}");
    }

    #[test]
    fn nothing_feasible_is_said_with_the_reasons() {
        let mut answer = sample::answer(0);
        answer.search.feasible.clear();
        let text = plan_table(&answer, &[]);
        assert!(text.contains("No layout is feasible.\n"), "{text}");
        assert!(text.contains("memory"), "{text}");
        assert!(text.ends_with('\n'));
    }

    #[test]
    fn many_reasons_are_summed() {
        let mut answer = sample::answer(1);
        answer.search.refused = (0..20).map(|i| (format!("rule {i:02}"), 100 - i)).collect();
        let text = plan_table(&answer, &[]);
        assert!(text.contains("8 other reasons"), "{text}");
    }
}
