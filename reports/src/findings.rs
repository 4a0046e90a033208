//! What a comparison says, in sentences: who wins and by how much, where the time goes, how good the
//! predictions were.

use moefold_planner::answer::SearchRecord;
use moefold_planner::plan::PlannedRouting;
use moefold_profiles::Category;
use moefold_profiles::statistics::median;
use moefold_profiles::trace::TimeByCategory;

use crate::draw::color;
use crate::format;
use crate::losses::{Difference, differences};
use crate::subject::{Comparison, Measured, Subject};

/// Categories that are said to explain a difference.
const EXPLAINING: usize = 3;
/// A share of a step that explains nothing.
const NEGLIGIBLE: f64 = 0.002;
/// How much more memory than predicted is put down to routing that was assumed to be balanced.
const UNEVEN: f64 = 0.03;
/// How much more than its cores a machine may have to do before that is said.
const CROWDED: f64 = 0.1;
/// From how much on it is said that a fixed piece of work took longer or less than before.
const CHANGED: f64 = 0.1;
/// A lead smaller than this is no lead.
const TIE: f64 = 0.005;

/// The findings, the most important first.
pub(crate) fn of(comparison: &Comparison) -> Vec<String> {
    let mut findings = prediction(comparison);
    findings.extend(of_runs(comparison, |_, measured| host_of(measured)));
    findings.extend(of_runs(comparison, pace_of));
    if comparison.is_comparable() {
        findings.extend(winner(comparison, true));
        findings.extend(winner(comparison, false));
    } else {
        findings.push(
            "The inputs differ in model, cluster or batch, so step times are not ranked; compare \
             tokens per second per GPU and MFU with care."
                .to_owned(),
        );
    }
    let leading = comparison.ranking().first().copied();
    if let Some(best) = leading.map(|i| &comparison.subjects[i]) {
        findings.extend(where_time_goes(best));
        findings.extend(memory_of(best));
    }
    findings.extend(of_runs(comparison, |_, measured| loss_of(measured)));
    findings.extend(differences(comparison).iter().map(Difference::sentence));
    findings.extend(of_runs(comparison, |_, measured| balance_of(measured)));
    if let Some(best) = leading.map(|i| &comparison.subjects[i]) {
        findings.push(confidence(best));
    }
    for (name, search) in &comparison.searches {
        findings.push(search_of(name, search));
    }
    findings
}

/// The fastest among the measured or among the predicted, where there are several, and its lead.
fn winner(comparison: &Comparison, measured: bool) -> Option<String> {
    let speed = |s: &Subject| {
        if measured {
            s.tokens_per_s_per_gpu()
        } else {
            s.planned.predicted.tokens_per_s_per_gpu
        }
    };
    let step = |s: &Subject| {
        if measured {
            s.step_s()
        } else {
            s.planned.predicted.step_s
        }
    };
    let mut field: Vec<&Subject> = comparison
        .subjects
        .iter()
        .filter(|s| {
            if measured {
                s.measured_step_s().is_some()
            } else {
                s.profiles == comparison.best_prices()
            }
        })
        .collect();
    if field.is_empty() {
        return None;
    }
    field.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let what = if measured { "measured" } else { "predicted" };
    let first = field[0];
    let figures = format!(
        "{} a step, {} tokens/s/{}",
        format::seconds(step(first)),
        format::short_count(speed(first)),
        comparison.rank_word()
    );
    let [_, second, ..] = field[..] else {
        return Some(format!(
            "{} ({}): {what} {figures}.",
            first.name,
            first.described()
        ));
    };
    let slowest = field[field.len() - 1];
    let lead = speed(first) / speed(second) - 1.0;
    let lead = if lead < TIE {
        "level with".to_owned()
    } else {
        format!("{} ahead of", format::percent(lead))
    };
    let mut text = format!(
        "Fastest {what}: {} ({}), {figures}; {lead} {} ({})",
        first.name,
        first.described(),
        second.name,
        second.described(),
    );
    if field.len() > 2 {
        text = format!(
            "{text} and {:.2} times the speed of the slowest of the {}",
            speed(first) / speed(slowest),
            field.len()
        );
    }
    text.push('.');
    Some(text)
}

fn time_of(subject: &Subject) -> &TimeByCategory {
    match &subject.measured {
        Some(measured) => &measured.summary.time_s,
        None => &subject.planned.predicted.time_s,
    }
}

fn where_time_goes(subject: &Subject) -> Option<String> {
    let time = time_of(subject);
    let total = time.total().0;
    if total <= 0.0 {
        return None;
    }
    let mut parts: Vec<(Category, f64)> = Category::ALL
        .map(|c| (c, time.get(c).0 / total))
        .into_iter()
        .collect();
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let most: Vec<String> = parts
        .iter()
        .take(3)
        .filter(|(_, share)| *share > 0.005)
        .map(|(c, share)| format!("{} ({:.0}%)", color::category_label(*c), 100.0 * share))
        .collect();
    let share_of = |counts: fn(Category) -> bool| {
        let counted = Category::ALL.into_iter().filter(|&c| counts(c));
        100.0 * counted.map(|c| time.get(c).0).sum::<f64>() / total
    };
    let communication = share_of(Category::is_communication);
    let waiting = share_of(Category::is_waiting);
    Some(format!(
        "Most of the step of {} goes to {}; exposed communication takes {communication:.0}%, waiting \
         for ranks, stages and the host {waiting:.0}%.",
        subject.name,
        listed(&most)
    ))
}

fn memory_of(subject: &Subject) -> Option<String> {
    let predicted = &subject.planned.predicted;
    let parts = predicted.memory_gib.iter();
    let (largest, gib) = parts.max_by(|a, b| a.1.total_cmp(b.1))?;
    if predicted.peak_gib <= 0.0 {
        return None;
    }
    let of_capacity = match subject.setting.capacity_gib() {
        Some(capacity) => format!(
            ", {} of the {} a rank has",
            format::percent(predicted.peak_gib / capacity),
            format::gib(capacity)
        ),
        None => String::new(),
    };
    let measured = match subject.measured_peak_gib() {
        Some(measured) => format!(
            " It measured {} ({}).{}",
            format::gib(measured),
            format::off(predicted.peak_gib / measured - 1.0, "high", "low"),
            match predicted.routing {
                Some(PlannedRouting::Balanced { .. })
                    if measured > (1.0 + UNEVEN) * predicted.peak_gib =>
                    " Routing was assumed to be balanced: plan --routing with the run directory counts what \
                     it routed.",
                _ => "",
            }
        ),
        None => String::new(),
    };
    Some(format!(
        "The fullest rank of {} is predicted to peak at {}{of_capacity}; {} are {:.0}% of it.{measured}",
        subject.name,
        format::gib(predicted.peak_gib),
        largest.name(),
        100.0 * gib / predicted.peak_gib,
    ))
}

/// How far the predictions of what was measured were off, and which categories of a run explain it.
fn prediction(comparison: &Comparison) -> Vec<String> {
    let mut findings = Vec::new();
    let mut errors = Vec::new();
    for subject in &comparison.subjects {
        let Some(error) = subject.step_error() else {
            continue;
        };
        errors.push(error.abs());
        let of = subject.logged.as_ref().map_or(String::new(), |logged| {
            let plural = if logged.steps == 1 { "" } else { "s" };
            format!(
                " (median of {} step{plural}, {})",
                logged.steps, logged.source
            )
        });
        let predicted = &subject.planned.predicted;
        let why = subject.measured.as_ref().map_or(String::new(), |measured| {
            explained(&predicted.time_s, &measured.summary.time_s)
        });
        findings.push(format!(
            "The step of {} was predicted at {} and measured at {}{of}: {}{why}.",
            subject.name,
            format::seconds(predicted.step_s),
            format::seconds(subject.step_s()),
            format::step_off(error),
        ));
        let logged = subject.logged.iter();
        let noted = logged.filter_map(|logged| Some((&logged.source, logged.note?)));
        findings.extend(noted.map(|(source, note)| format!("{source}: {note}.")));
    }
    if errors.len() > 1 {
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let worst = errors.iter().copied().fold(0.0, f64::max);
        findings.insert(
            0,
            format!(
                "Over {} runs the predicted step was {} off on average, {} at worst.",
                errors.len(),
                format::percent(mean),
                format::percent(worst)
            ),
        );
    }
    findings
}

/// The three categories in which a measured step differs most from the predicted one, and what all differ by:
/// some cancel others.
fn explained(predicted: &TimeByCategory, measured: &TimeByCategory) -> String {
    let more = |c: Category| measured.get(c).0 - predicted.get(c).0;
    let mut most = Category::ALL;
    most.sort_by(|&a, &b| more(b).abs().total_cmp(&more(a).abs()));
    let step_s = measured.total().0;
    let most: Vec<Category> = most
        .into_iter()
        .take(EXPLAINING)
        .filter(|&c| more(c).abs() > NEGLIGIBLE * step_s)
        .collect();
    if most.is_empty() {
        return String::new();
    }
    let words = |&c: &Category| {
        // A label with a comma would read as two.
        let label = color::category_label(c).replace(", ", "/");
        format!("{label} ({})", format::signed_seconds(more(c)))
    };
    format!(
        "; measured less predicted is {} over all categories, most in {}",
        format::signed_seconds(step_s - predicted.total().0),
        listed(&most.iter().map(words).collect::<Vec<_>>())
    )
}

/// That other programs kept the machine from the run, where they did.
fn host_of(measured: &Measured) -> Option<String> {
    let host = measured.summary.host.as_ref()?;
    let cores = f64::from(host.cores);
    let own = f64::from(host.threads).min(cores);
    let others = match host.others_busy {
        Some(others) => {
            let is_loaded = others + own > (1.0 + CROWDED) * cores;
            is_loaded.then(|| {
                format!(
                    "other programs kept {others:.1} of the {} cores busy",
                    host.cores
                )
            })
        }
        // What ran before the run is not its own.
        None => (host.load_before + own > (1.0 + CROWDED) * cores).then(|| {
            format!(
                "the machine of {} cores had {:.1} runnable threads before it began",
                host.cores, host.load_before
            )
        }),
    }?;
    Some(format!(
        "While {{}} ran, {others}, beside {} computing threads of the run: its times are of a machine with \
         more to do than it has cores.",
        host.threads
    ))
}

/// That the machine was faster or slower than when the profiles of its prices were measured, where it was.
fn pace_of(subject: &Subject, measured: &Measured) -> Option<String> {
    let mean = |[before_s, after_s]: [f64; 2]| f64::midpoint(before_s, after_s);
    let then = subject.profiles.iter().filter_map(|profile| profile.pace_s);
    let then_s = median(then.map(mean).collect()).filter(|then_s| *then_s > 0.0)?;
    let now_s = mean(measured.summary.host.as_ref()?.pace_s?);
    let more = now_s / then_s - 1.0;
    let (longer, slower) = if more > 0.0 {
        ("longer", "slower")
    } else {
        ("less", "faster")
    };
    (more.abs() > CHANGED).then(|| {
        format!(
            "Before and after {{}} ran, a fixed piece of work took {} {longer} than when the profiles of the prices were measured: \
             the machine was {slower}, and prices are those of then.",
            format::percent(more.abs())
        )
    })
}

/// One sentence for all runs of which the same can be said: a sentence has `{}` where the names go.
fn of_runs(
    comparison: &Comparison,
    say: impl Fn(&Subject, &Measured) -> Option<String>,
) -> Vec<String> {
    let mut said: Vec<(String, Vec<String>)> = Vec::new();
    for (subject, measured) in comparison.runs() {
        if let Some(sentence) = say(subject, measured) {
            match said.iter_mut().find(|(known, _)| *known == sentence) {
                Some((_, names)) => names.push(subject.name.clone()),
                None => said.push((sentence, vec![subject.name.clone()])),
            }
        }
    }
    said.into_iter()
        .map(|(sentence, names)| sentence.replace("{}", &listed(&names)))
        .collect()
}

fn loss_of(measured: &Measured) -> Option<String> {
    let (first, last) = (measured.steps.first()?, measured.steps.last()?);
    if let Some(bad) = measured.steps.iter().find(|s| !s.loss.is_finite()) {
        return Some(format!(
            "The loss of {{}} stopped being a number at step {}.",
            bad.step
        ));
    }
    if measured.steps.len() < 2 {
        return None;
    }
    let change = if last.loss < first.loss {
        "fell"
    } else {
        "rose"
    };
    let validation = measured.summary.validation.map_or(String::new(), |found| {
        format!(" On validation data it ended at {:.3}.", found.loss)
    });
    Some(format!(
        "The loss of {{}} {change} from {:.3} to {:.3} in {} steps.{validation}",
        first.loss,
        last.loss,
        measured.steps.len()
    ))
}

/// How unevenly the last step's tokens fell on the experts, and what was dropped.
fn balance_of(measured: &Measured) -> Option<String> {
    let last = measured.steps.last()?;
    let worst = last
        .expert_load
        .iter()
        .filter_map(|layer| {
            let total: u64 = layer.iter().sum();
            let busiest = layer.iter().copied().max()?;
            (total > 0).then(|| busiest as f64 * layer.len() as f64 / total as f64)
        })
        .reduce(f64::max)?;
    let dropped: u64 = measured.steps.iter().map(|step| step.dropped).sum();
    let drops = if dropped == 0 {
        "no assignment was dropped".to_owned()
    } else {
        format!("{} assignments were dropped", format::grouped(dropped))
    };
    Some(format!(
        "In the last step of {{}} the busiest expert of a layer got {worst:.2} times its even share; \
         {drops}."
    ))
}

fn confidence(subject: &Subject) -> String {
    // Shares that cancel to just below zero are zero.
    let c = &subject.planned.predicted.confidence;
    format!(
        "Of the predicted busy time of {}, {:.0}% rests on costs measured at that very shape, {:.0}% on \
         interpolation between measurements, {:.0}% on extrapolation or rooflines.",
        subject.name,
        100.0 * c.measured.abs(),
        100.0 * c.interpolated.abs(),
        100.0 * c.extrapolated.abs()
    )
}

fn search_of(name: &str, search: &SearchRecord) -> String {
    let refused: u64 = search.refused.values().sum();
    let mut text = format!(
        "The search of {name} looked at {} layouts: {} refused, {} ruled out by a bound, {} priced",
        format::grouped(search.space),
        format::grouped(refused),
        format::grouped(search.pruned),
        format::grouped(search.priced)
    );
    if search.optimal {
        text = format!("{text}; its first plan is {}.", is_best(search));
    } else {
        text = format!(
            "{text}; under the cost model its first plan is the best of those priced, and {}.",
            left_open(search)
        );
    }
    text
}

/// What the first plan is where it is proven best.
pub(crate) fn is_best(search: &SearchRecord) -> &'static str {
    match search.gap_of_others {
        Some(_) => "the best of them under the cost model, however their layers are split",
        None => "the best of them under the cost model",
    }
}

/// What is left to gain where the first plan is not proven best.
pub(crate) fn left_open(search: &SearchRecord) -> String {
    let of_others = search.gap_of_others.filter(|gap| *gap > 0.0).map(|gap| {
        let gap = format::percent(gap);
        format!("other layouts could gain at most {gap} with their layers split otherwise")
    });
    match of_others {
        Some(of_others) if search.gap == 0.0 => of_others,
        Some(of_others) => format!("{}, and {of_others}", own_left_open(search)),
        None => own_left_open(search),
    }
}

/// The same but for what other layouts could gain.
fn own_left_open(search: &SearchRecord) -> String {
    let gap = format::percent(search.gap);
    match search.unseen {
        Some(0) if search.gap < 1.0 => {
            format!(
                "the search was stopped before its end, and what is left could gain at most {gap}"
            )
        }
        Some(0) => "the search was stopped before its end".to_owned(),
        Some(unseen) => format!(
            "the search was stopped, and {} that it has not looked at could gain at most {gap}",
            format::grouped(unseen)
        ),
        None if search.gap > 0.0 => {
            format!("another split or recomputation of its layers could gain at most {gap}")
        }
        None => "other splits of its layers into stages were not tried".to_owned(),
    }
}

/// `a`, `a and b`, `a, b and c`.
fn listed(words: &[String]) -> String {
    match words {
        [] => String::new(),
        [only] => only.clone(),
        [init @ .., last] => format!("{} and {last}", init.join(", ")),
    }
}
