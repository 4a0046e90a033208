//! Less memory: what it costs ([`front_table`]), and what would fit where nothing does ([`shortage_table`]), as tables in text.

use moefold_planner::answer::{Answer, Shortage};
use moefold_profiles::statistics::unbeaten;

use crate::format::{self, MemoryUnit, TimeUnit};
use crate::tables::Table;

/// What a request that nothing satisfies needs at least, change by change, and the smallest that fits.
pub fn shortage_table(shortage: &Shortage) -> String {
    let mut table = Table::new([
        "change".to_owned(),
        ">least memory (GiB)".to_owned(),
        "fits".to_owned(),
        "layout".to_owned(),
        "recompute".to_owned(),
    ]);
    for saver in &shortage.savers {
        table.row([
            saver.change.clone(),
            format!("{:.1}", saver.peak_gib),
            if saver.fits { "yes" } else { "no" }.to_owned(),
            saver.layout.to_string(),
            format::recompute(&saver.recompute),
        ]);
    }
    let mut out = table.text();
    out.push('\n');
    let smallest = match shortage.smallest() {
        Some(saver) => {
            let more = shortage.savers.last().filter(|more| more.fits);
            let more = more.filter(|more| more.change != saver.change);
            let more = more.map(|more| format!(" By more ranks alone: {}.", more.change));
            format!(
                "The smallest of these changes that fits: {}.{}",
                saver.change,
                more.unwrap_or_default()
            )
        }
        None => "None of these changes fits by itself; a shorter sequence or a smaller model may."
            .to_owned(),
    };
    out.push_str(&smallest);
    out.push('\n');
    out
}

/// What less memory costs, as a table in text: of the candidates of a search with a front those that no other beats in both time and
/// memory, the fastest first.
pub fn front_table(answer: &Answer) -> String {
    let Some(first) = answer.plans.first() else {
        return String::new();
    };
    let mut all = answer.search.feasible.clone();
    all.push(first.into());
    let all = unbeaten(all, |one| [one.step_s, one.peak_gib]);
    let longest = all.iter().map(|one| one.step_s).fold(0.0, f64::max);
    let largest = all.iter().map(|one| one.peak_gib).fold(0.0, f64::max);
    let time = TimeUnit::for_longest(longest);
    let memory = MemoryUnit::for_largest(largest);
    let mut table = Table::new([
        "with less memory".to_owned(),
        "recompute".to_owned(),
        format!(">step ({})", time.name()),
        String::new(),
        format!(">peak ({})", memory.name()),
    ]);
    let [per_second, per_gib] = [time.per_second(), memory.per_gib()];
    for candidate in &all {
        table.row([
            format::candidate(candidate),
            format::recompute(&candidate.recompute),
            format::in_column(candidate.step_s * per_second, longest * per_second),
            format::signed_percent(candidate.step_s / first.predicted.step_s - 1.0),
            format::in_column(candidate.peak_gib * per_gib, largest * per_gib),
        ]);
    }
    table.text()
}

#[cfg(test)]
mod tests {
    use moefold_planner::answer::Candidate;

    use super::*;
    use crate::sample;

    #[test]
    fn a_front_has_what_no_other_beats_in_time_and_memory() {
        let mut answer = sample::answer(1);
        let first = Candidate::from(&answer.plans[0]);
        let of = |time: f64, memory: f64| Candidate {
            step_s: time * first.step_s,
            peak_gib: memory * first.peak_gib,
            ..first.clone()
        };
        // Slower and larger than another, as slow as the first and larger, and two of the front.
        answer.search.feasible = vec![of(1.3, 0.9), of(1.5, 0.5), of(1.0, 1.1), of(1.2, 0.8)];
        let text = front_table(&answer);
        let changes: Vec<&str> = text
            .split_whitespace()
            .filter(|word| word.ends_with('%'))
            .collect();
        assert_eq!(changes, ["+0.0%", "+20%", "+50%"], "{text}");
    }
}
