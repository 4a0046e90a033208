//! [`sweep`]: which of several overlapping spans each moment of a step counts for.

use std::collections::{BTreeMap, BTreeSet};

use moefold_profiles::directory::Key;
use moefold_profiles::trace::{Category, Lane};

use super::span::{Entry, Place};

/// What a span stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Work of its lane.
    Work,
    /// The compute stream's start of a collective, or its wait for one, that has a span of its own.
    Wait,
    /// A collective, when the communication stream did it.
    Carried,
}

/// A span in nanoseconds from the begin of its step.
#[derive(Debug, Clone)]
pub(super) struct Timed {
    pub(super) role: Role,
    pub(super) lane: Lane,
    pub(super) category: Category,
    pub(super) name: &'static str,
    pub(super) key: Option<Key>,
    pub(super) start_ns: u64,
    pub(super) end_ns: u64,
    pub(super) place: Place,
}

impl Timed {
    /// The span as it is kept, of a step that began at `step_ns`.
    pub(super) fn kept(&self, step_ns: u64) -> Entry {
        Entry {
            lane: self.lane,
            category: self.category,
            name: self.name,
            key: self.key,
            start_ns: step_ns + self.start_ns,
            end_ns: step_ns + self.end_ns,
            place: self.place,
        }
    }
}

/// Where a step's time went, in nanoseconds.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Swept {
    /// Each moment once, under one category.
    pub(super) time: BTreeMap<Category, u64>,
    /// Moments in which a collective was carried that count for the compute lane, under its category.
    pub(super) hidden: BTreeMap<Category, u64>,
    /// Of each lane, each moment once; lanes overlap.
    pub(super) busy: BTreeMap<(Lane, &'static str), u64>,
}

/// Goes through a step of `step_ns` and gives each moment to the innermost span of the compute lane
/// that is running, else to that of another lane, else to the host. Of the spans of a lane that run at
/// once, the one that comes last in `spans` is the innermost. A collective that was carried counts where the
/// compute stream waited for it and not where it ran; a lane is busy where it ran and not where it was
/// waited for.
pub(super) fn sweep(step_ns: u64, spans: &[Timed]) -> Swept {
    let mut turns: BTreeMap<u64, Vec<usize>> = BTreeMap::from([(0, vec![]), (step_ns, vec![])]);
    for (index, span) in spans.iter().enumerate() {
        let (start, end) = (span.start_ns.min(step_ns), span.end_ns.min(step_ns));
        if start < end {
            turns.entry(start).or_default().push(index);
            turns.entry(end).or_default().push(index);
        }
    }
    let mut running: BTreeMap<Lane, BTreeSet<usize>> = BTreeMap::new();
    let mut swept = Swept::default();
    let ends = turns.keys().skip(1).copied().collect::<Vec<_>>();
    for ((now, turning), end) in turns.into_iter().zip(ends) {
        for index in turning {
            let lane = running.entry(spans[index].lane).or_default();
            if !lane.remove(&index) {
                lane.insert(index);
            }
        }
        let innermost = |lane: &BTreeSet<usize>, but: Role| {
            let mut inwards = lane.iter().rev().map(|&index| &spans[index]);
            inwards.find(|span| span.role != but)
        };
        let ns = end - now;
        let counts = |lane| innermost(lane, Role::Carried);
        let compute = running.get(&Lane::Compute).and_then(counts);
        let counted = compute.or_else(|| running.values().find_map(counts));
        let category = counted.map_or(Category::Host, |span| span.category);
        *swept.time.entry(category).or_default() += ns;
        for span in running
            .values()
            .filter_map(|lane| innermost(lane, Role::Wait))
        {
            *swept.busy.entry((span.lane, span.name)).or_default() += ns;
            if compute.is_some() && span.role == Role::Carried {
                *swept.hidden.entry(span.category).or_default() += ns;
            }
        }
    }
    swept
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(lane: Lane, category: Category, name: &'static str, ns: [u64; 2]) -> Timed {
        Timed {
            role: Role::Work,
            lane,
            category,
            name,
            key: None,
            start_ns: ns[0],
            end_ns: ns[1],
            place: Place::default(),
        }
    }

    #[test]
    fn golden_overlap_counts_once_and_for_compute() {
        let spans = [
            span(
                Lane::Communication,
                Category::EpComm,
                "all_to_all",
                [10, 50],
            ),
            span(Lane::Compute, Category::Experts, "experts", [20, 70]),
            span(Lane::Compute, Category::Attention, "gemm", [30, 40]),
        ];
        let swept = sweep(100, &spans);
        let time = [
            (Category::Attention, 10),
            (Category::Experts, 40),
            (Category::EpComm, 10),
            (Category::Host, 40),
        ];
        assert_eq!(swept.time, BTreeMap::from(time));
        let busy = [
            ((Lane::Compute, "experts"), 40),
            ((Lane::Compute, "gemm"), 10),
            ((Lane::Communication, "all_to_all"), 40),
        ];
        assert_eq!(swept.busy, BTreeMap::from(busy));
    }

    /// A gather that runs from 10 to 60, of which the compute stream waits for the last 15, after a host that
    /// was late from 40 to 45.
    #[test]
    fn golden_what_ran_beside_compute_is_hidden_and_what_was_waited_for_counts() {
        let of = |role, name, ns| {
            let span = span(Lane::Communication, Category::TpComm, name, ns);
            Timed { role, ..span }
        };
        let spans = [
            of(Role::Wait, "all_gather", [8, 9]),
            span(Lane::Compute, Category::Dense, "gemm", [9, 40]),
            of(Role::Wait, "all_gather", [45, 60]),
            of(Role::Carried, "all_gather", [10, 60]),
            span(Lane::Compute, Category::Attention, "core", [60, 90]),
        ];
        let swept = sweep(100, &spans);
        let time = [
            (Category::Attention, 30),
            (Category::Dense, 31),
            (Category::TpComm, 16),
            (Category::Host, 23),
        ];
        assert_eq!(swept.time, BTreeMap::from(time));
        assert_eq!(swept.hidden, BTreeMap::from([(Category::TpComm, 30)]));
        let busy = [
            ((Lane::Compute, "gemm"), 31),
            ((Lane::Compute, "core"), 30),
            ((Lane::Communication, "all_gather"), 50),
        ];
        assert_eq!(swept.busy, BTreeMap::from(busy));
    }

    const LANES: [Lane; 2] = [Lane::Compute, Lane::Communication];
    const CATEGORIES: [Category; 3] = [Category::Attention, Category::EpComm, Category::Host];

    proptest! {
        /// Any spans, also ones that reach beyond the step: a clock of another device says when.
        #[test]
        fn law_every_moment_counts_once(
            step in 0_u64..40,
            given in prop::collection::vec((0_usize..2, 0_usize..3, 0_u64..50, 0_u64..20), 0..12),
        ) {
            let spans: Vec<Timed> = given
                .iter()
                .map(|&(lane, category, start, len)| {
                    span(LANES[lane], CATEGORIES[category], "op", [start, start + len])
                })
                .collect();
            let swept = sweep(step, &spans);
            prop_assert_eq!(swept.time.values().sum::<u64>(), step);

            let mut expected = BTreeMap::new();
            let mut busy = [0; 2];
            for now in 0..step {
                let on = |lane| {
                    let running = |s: &&Timed| s.lane == lane && s.start_ns <= now && now < s.end_ns;
                    spans.iter().rfind(running)
                };
                let tops = LANES.map(on);
                let counted = tops[0].or(tops[1]);
                let category = counted.map_or(Category::Host, |span| span.category);
                *expected.entry(category).or_insert(0) += 1;
                for (busy, top) in busy.iter_mut().zip(tops) {
                    *busy += u64::from(top.is_some());
                }
            }
            prop_assert_eq!(&swept.time, &expected);
            for (lane, busy) in LANES.into_iter().zip(busy) {
                prop_assert_eq!(swept.busy.get(&(lane, "op")).copied().unwrap_or(0), busy);
            }
        }
    }
}
