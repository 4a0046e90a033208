//! The simulation against a dumb event loop, its laws, and published pipeline bubbles.

use moefold_profiles::random::SplitMix64;

use super::*;
use crate::choice::ScheduleName;
use crate::layout::Places;

fn random_times(random: &mut SplitMix64, schedule: &Schedule) -> StageTimes {
    let (pp, stages, places) = (schedule.pp, schedule.num_stages(), schedule.places());
    let mut spans = |count: u32, below: u64| -> Vec<Span> {
        (0..count).map(|_| Span(random.below(below))).collect()
    };
    let mut times = StageTimes {
        forward: spans(stages, 100),
        first_forward: spans(stages, 150),
        backward: spans(stages, 200),
        last_backward: spans(stages, 250),
        weight: None,
        hidden: None,
        hop: spans(stages - 1, 60),
        hop_overlapped: false,
        reduce: spans(stages, 50),
        optimizer: spans(pp, 80),
    };
    if schedule.name.divides_backward() {
        let whole = times.backward.iter().zip(&times.last_backward);
        let part = whole.map(|(&each, &last)| Span(random.below(each.min(last).0 + 1)));
        times.weight = Some(part.collect());
    }
    if schedule.name.combines() {
        let part = |random: &mut SplitMix64, of: Span| Span(random.below(of.0 / 4 + 1));
        let mut parts = |of: &[Span]| of.iter().map(|&of| part(random, of)).collect::<Vec<_>>();
        let [forward, backward] = [parts(&times.forward), parts(&times.backward)];
        let alone: Vec<Span> = parts(&backward);
        let last = times.last_backward.iter().zip(&alone);
        let alone: Vec<Span> = last.map(|(&last, &alone)| alone.min(last)).collect();
        let together = (0..stages).map(|stage| {
            let own = places.of_rank(places.rank_of(stage));
            // No more than the pass that has less to hide, and no less than a backward pass hides alone.
            own.map(|other| {
                let least = forward[stage as usize].min(backward[other as usize]);
                least.max(alone[other as usize])
            })
            .collect()
        });
        times.hidden = Some(Hidden::new(places, together.collect(), alone));
    }
    times
}

fn schedules() -> impl Iterator<Item = Schedule> {
    let sizes = (1..=5).flat_map(|pp| (1..=4).map(move |vpp| (pp, vpp)));
    sizes.flat_map(|(pp, vpp)| {
        let names = ScheduleName::all_of(pp, vpp).filter(move |_| pp > 1 || vpp == 1);
        names.flat_map(move |name| {
            let sizes = (1..=9).filter_map(move |count| match name {
                _ if name.is_vee() => Some(count),
                _ if vpp > 1 => (count <= 3).then_some(count * pp),
                _ => Some(count),
            });
            sizes.map(move |microbatches| Schedule::new(name, pp, vpp, microbatches))
        })
    })
}

/// The dumb way: every rank in turn takes its next action once the message it needs is there.
fn event_loop(schedule: &Schedule, times: &StageTimes) -> Span {
    let ranks = schedule.ranks.len();
    let mut clock = vec![0_u64; ranks];
    let less = times.hidden.as_ref();
    let mut next = vec![0; ranks];
    let mut arrivals = std::collections::HashMap::new();
    let last = schedule.microbatches - 1;
    loop {
        let mut moved = false;
        for rank in 0..ranks {
            let Some(&action) = schedule.ranks[rank].get(next[rank]) else {
                continue;
            };
            let now = &mut clock[rank];
            match action {
                Action::RecvActivation(s, m) => match arrivals.get(&(s.0, m.0, true)) {
                    Some(&at) => *now = (*now).max(at),
                    None => continue,
                },
                Action::RecvGradient(s, m) => match arrivals.get(&(s.0, m.0, false)) {
                    Some(&at) => *now = (*now).max(at),
                    None => continue,
                },
                Action::Forward(s, m) => {
                    let all = [&times.forward, &times.first_forward];
                    *now += all[usize::from(m.0 == 0)][s.0 as usize].0;
                }
                Action::Backward(s, m) => {
                    let all = [&times.backward, &times.last_backward];
                    *now += all[usize::from(m.0 == last)][s.0 as usize].0;
                    *now -= less.map_or(0, |less| less.alone[s.0 as usize].0);
                }
                Action::Combined { forward, backward } => {
                    let [f, b] = [forward.0, backward.0].map(|stage| stage.0 as usize);
                    assert!(forward.1.0 > 0 && backward.1.0 < last, "ends run alone");
                    let hidden = less.expect("of combined passes").together[f][b / ranks];
                    *now += (times.forward[f] + times.backward[b] - hidden).0;
                }
                Action::BackwardInput(s, m) => {
                    let all = [&times.backward, &times.last_backward];
                    let weight = times.weight.as_ref().expect("a part")[s.0 as usize];
                    *now += all[usize::from(m.0 == last)][s.0 as usize].0 - weight.0;
                }
                Action::BackwardWeight(s, _) => {
                    *now += times.weight.as_ref().expect("a part")[s.0 as usize].0;
                }
                Action::SendActivation(s, m) => {
                    let there = *now + times.hop[s.0 as usize].0;
                    arrivals.insert((s.0 + 1, m.0, true), there);
                    if !times.hop_overlapped {
                        *now = there;
                    }
                }
                Action::SendGradient(s, m) => {
                    let there = *now + times.hop[s.0 as usize - 1].0;
                    arrivals.insert((s.0 - 1, m.0, false), there);
                    if !times.hop_overlapped {
                        *now = there;
                    }
                }
                Action::ReduceGradients(s) => *now += times.reduce[s.0 as usize].0,
                Action::OptimizerStep => continue,
            }
            next[rank] += 1;
            moved = true;
        }
        if !moved {
            break;
        }
    }
    let barrier = clock.iter().copied().max().expect("ranks");
    let step = times.optimizer.iter().map(|o| o.0).max().expect("ranks");
    Span(barrier + step)
}

#[test]
fn oracle_equals_a_dumb_event_loop() {
    let mut random = SplitMix64::new(2026);
    for schedule in schedules() {
        for overlapped in [false, true] {
            let mut times = random_times(&mut random, &schedule);
            times.hop_overlapped = overlapped;
            let timeline = simulate(&schedule, &times);
            let (pp, vpp, m) = (schedule.pp, schedule.vpp, schedule.microbatches);
            assert_eq!(
                timeline.total,
                event_loop(&schedule, &times),
                "pp {pp} vpp {vpp} microbatches {m} overlapped {overlapped}"
            );
        }
    }
}

#[test]
fn law_parts_of_every_rank_sum_to_the_step() {
    let mut random = SplitMix64::new(5);
    for schedule in schedules() {
        let mut times = random_times(&mut random, &schedule);
        for overlapped in [false, true] {
            times.hop_overlapped = overlapped;
            let timeline = simulate(&schedule, &times);
            for rank in &timeline.ranks {
                assert_eq!(rank.total(), timeline.total);
                assert!(rank.busy() <= timeline.total);
            }
            // Nobody comes to the optimizer later than the critical rank, so what it waits for
            // is only what other stages owe it.
            let slowest = times.optimizer.iter().max().expect("ranks");
            let own = times.optimizer[timeline.critical as usize];
            assert!(timeline.ranks[timeline.critical as usize].bubble >= *slowest - own);
        }
    }
}

#[test]
fn law_bound_never_exceeds_the_simulation() {
    let mut random = SplitMix64::new(11);
    for schedule in schedules() {
        for round in 0..6 {
            let mut times = random_times(&mut random, &schedule);
            times.hop_overlapped = round % 2 == 0;
            if round > 3 {
                times.reduce.fill(Span::ZERO);
                times.first_forward.clone_from(&times.forward);
                times.last_backward.clone_from(&times.backward);
            }
            let bound = lower_bound(schedule.places(), schedule.microbatches, &times);
            let total = simulate(&schedule, &times).total;
            assert!(bound <= total, "{bound:?} {total:?}");
        }
    }
}

/// What a path adds up to under some times.
fn along(path: &LongestPath, times: &StageTimes) -> Span {
    let mut sum = path.messages.0 as i64 + times.optimizer[path.optimizer as usize].0 as i64;
    for stage in 0..path.forward.len() {
        let of = |spans: &[Span]| spans[stage].0 as i64;
        sum += i64::from(path.forward[stage]) * of(&times.forward);
        let waits = of(&times.first_forward) - of(&times.forward);
        sum += i64::from(path.first_forward[stage]) * waits;
        sum += i64::from(path.backward[stage]) * of(&times.backward);
        sum += path.weight[stage] * times.weight(stage).0 as i64;
        sum += i64::from(path.reduce[stage]) * of(&times.reduce);
        if let Some(hidden) = &times.hidden {
            sum -= i64::from(path.alone[stage]) * of(&hidden.alone);
            let together = path.together[stage].iter().zip(&hidden.together[stage]);
            for (&passes, hidden) in together {
                sum -= i64::from(passes) * hidden.0 as i64;
            }
        }
    }
    Span(sum.try_into().expect("a time"))
}

/// The longest path is as long as the step, and no longer than another step of the same schedule and messages.
#[test]
fn law_a_step_is_its_longest_path() {
    let mut random = SplitMix64::new(1960);
    let mut exact = 0;
    for schedule in schedules() {
        let simulator = Simulator::new(&schedule);
        for hop_overlapped in [false, true] {
            let [times, mut others] = [(); 2].map(|()| {
                let times = random_times(&mut random, &schedule);
                StageTimes {
                    last_backward: times.backward.clone(),
                    hop_overlapped,
                    ..times
                }
            });
            others.hop.clone_from(&times.hop);
            let path = simulator.longest(&times);
            assert_eq!(along(&path, &times), simulator.run(&times).total);
            let (own, other) = (along(&path, &others), simulator.run(&others).total);
            assert!(own <= other, "{:?}: {own:?} {other:?}", schedule.name);
            exact += u32::from(own == other);
        }
    }
    assert!(exact > 10, "{exact}");
}

#[test]
fn law_faster_is_never_slower() {
    let mut random = SplitMix64::new(23);
    for schedule in schedules() {
        for overlapped in [false, true] {
            let mut slow = random_times(&mut random, &schedule);
            slow.hop_overlapped = overlapped;
            let simulator = Simulator::new(&schedule);
            let total = simulator.run(&slow).total;
            let mut fast = slow.clone();
            for hop in &mut fast.hop {
                hop.0 /= 2;
            }
            assert!(simulator.run(&fast).total <= total);
            fast.forward[0].0 /= 2;
            assert!(simulator.run(&fast).total <= total);
            let mut hidden = slow.clone();
            hidden.hop_overlapped = true;
            assert!(simulator.run(&hidden).total <= total);
        }
    }
}

/// PipeDream-flush (arXiv 2104.04473, section 2.2): with equal stages and free messages the
/// bubble is `pp - 1` microbatches, and `vpp` stages a rank divide it.
#[test]
fn golden_equal_stages_have_the_published_bubble() {
    let (forward, backward) = (12, 24);
    for schedule in schedules().filter(|schedule| !schedule.name.divides_backward()) {
        let stages = schedule.num_stages() as usize;
        let vpp = u64::from(schedule.vpp);
        let (pp, m) = (u64::from(schedule.pp), u64::from(schedule.microbatches));
        // A stage is a vpp-th of a rank's work; 12 and 24 divide by every vpp tried.
        let times = StageTimes::new(
            schedule.pp,
            vec![Span(forward / vpp); stages],
            vec![Span(backward / vpp); stages],
        );
        let expected = Span((m * vpp + pp - 1) * (forward + backward) / vpp);
        let timeline = simulate(&schedule, &times);
        let bound = lower_bound(schedule.places(), schedule.microbatches, &times);
        assert_eq!(timeline.total, expected);
        assert_eq!(bound, expected);
        assert_eq!(
            timeline.ranks[timeline.critical as usize].bubble,
            Span((pp - 1) * (forward + backward) / vpp)
        );
    }
}

/// Zero Bubble Pipeline Parallelism (arXiv 2401.10241, table 2): with equal stages, free messages and at least as many
/// microbatches as ranks the bubble of ZB-H1 is `(pp - 1) (F + B - W)`, that of 1F1B `(pp - 1) (F + B + W)`, where
/// gradients of weights take no longer than either other pass.
#[test]
fn golden_divided_passes_have_the_published_bubble() {
    let parts = [[10, 10, 10], [10, 12, 8], [12, 14, 10], [10, 10, 4]];
    let sizes = (2..=8).flat_map(|pp| [pp, pp + 1, 2 * pp, 5 * pp].map(|m| (pp, m)));
    for ((pp, m), [f, b, w]) in sizes.flat_map(|size| parts.map(|part| (size, part))) {
        let stages = pp as usize;
        let mut times = StageTimes::new(pp, vec![Span(f); stages], vec![Span(b + w); stages]);
        let whole = simulate(&Schedule::new(ScheduleName::OneFOneB, pp, 1, m), &times).total;
        times.weight = Some(vec![Span(w); stages]);
        let divided = simulate(&Schedule::new(ScheduleName::ZbH1, pp, 1, m), &times).total;
        let (ranks, work) = (u64::from(pp - 1), u64::from(m) * (f + b + w));
        assert_eq!(whole, Span(work + ranks * (f + b + w)), "{pp} {m}");
        assert_eq!(
            divided,
            Span(work + ranks * (f + b - w)),
            "{pp} {m} {f} {b} {w}"
        );
        assert!(lower_bound(Places::new(pp, 1, false), m, &times) <= divided);
    }
}

/// With stages and passes alike and free messages ZB-V waits `pp - 1` passes, for the last rank to begin and all to meet
/// at the end, where 1F1B waits `6 (pp - 1)` and ZB-H1 `2 (pp - 1)` on stages twice as long. V-Half waits about half as
/// long as 1F1B and V-Min two thirds.
#[test]
fn golden_schedules_that_come_back_fill_their_bubbles() {
    for (pp, m) in (2..=16).flat_map(|pp| [(pp, pp), (pp, 4 * pp)]) {
        let stages = 2 * pp as usize;
        let mut times = StageTimes::new(pp, vec![Span(1); stages], vec![Span(2); stages]);
        times.weight = Some(vec![Span(1); stages]);
        let bubble = |name| {
            let schedule = Schedule::new(name, pp, 2, m);
            let total = simulate(&schedule, &times).total;
            assert!(lower_bound(schedule.places(), m, &times) <= total);
            total.0 - 6 * u64::from(m)
        };
        let whole = 6 * u64::from(pp - 1);
        assert_eq!(bubble(ScheduleName::ZbV), u64::from(pp - 1), "{pp} {m}");
        if m >= 2 * pp {
            // Passes that take turns and are not one wait no longer for each other than those of ZB-V.
            assert_eq!(bubble(ScheduleName::DualpipeV), u64::from(pp - 1));
        }
        let half = bubble(ScheduleName::VHalf);
        assert!(10 * half <= 6 * whole, "{pp} {m}: {half} of {whole}");
        let least = bubble(ScheduleName::VMin);
        assert!(4 * least <= 3 * whole, "{pp} {m}: {least} of {whole}");
    }
}

/// DualPipeV (<https://github.com/deepseek-ai/DualPipe>, the table of its README): with stages alike and free messages
/// the bubble is `(pp - 1) (F&B + B - 3 W)`, where `F&B` is what a forward and a whole backward pass take as one. Where
/// the parts of a backward pass differ it is no longer, as those that run alone send before they end.
#[test]
fn golden_turns_that_are_one_have_the_published_bubble() {
    let parts = [
        [10, 10, 10, 0],
        [10, 10, 10, 6],
        [12, 14, 10, 8],
        [10, 12, 6, 9],
    ];
    let sizes = (2..=8).flat_map(|pp| [2 * pp, 2 * pp + 1, 5 * pp].map(|m| (pp, m)));
    for ((pp, m), [f, b, w, hidden]) in sizes.flat_map(|size| parts.map(|part| (size, part))) {
        let stages = 2 * pp as usize;
        let mut times = StageTimes::new(pp, vec![Span(f); stages], vec![Span(b + w); stages]);
        times.weight = Some(vec![Span(w); stages]);
        times.hidden = Some(Hidden {
            together: vec![vec![Span(hidden); 2]; stages],
            alone: vec![Span::ZERO; stages],
            most: vec![Span(hidden); stages],
        });
        let schedule = Schedule::new(ScheduleName::DualpipeVCombined, pp, 2, m);
        let timeline = simulate(&schedule, &times);
        // Most of it is on the last rank, whose first passes do not run as one.
        let found = timeline.ranks.iter().map(|rank| rank.bubble.0).max();
        let published = u64::from(pp - 1) * ((f + b + w - hidden) + (b + w) - 3 * w);
        let what = format!("{pp} {m} {f} {b} {w} {hidden}");
        if b == w {
            assert_eq!(found, Some(published), "{what}");
        }
        assert!(found <= Some(published), "{what}: {found:?}");
        assert!(lower_bound(schedule.places(), m, &times) <= timeline.total);
    }
}

#[test]
fn golden_two_ranks_with_exposed_messages() {
    let schedule = Schedule::new(ScheduleName::OneFOneB, 2, 1, 2);
    let mut times = StageTimes::new(2, vec![Span(10); 2], vec![Span(20); 2]);
    times.hop = vec![Span(3)];
    times.reduce = vec![Span(4), Span(5)];
    times.optimizer = vec![Span(7); 2];
    // Rank 0: F 0-10, send -13, F -23, send -26; rank 1: F 13-23, B -43, send -46, F -56,
    // B -76, send -79; rank 0: B 46-66, B 79-99, reduce -103; optimizer -110.
    let timeline = simulate(&schedule, &times);
    assert_eq!(timeline.total, Span(110));
    assert_eq!(timeline.critical, 0);
    assert_eq!(
        timeline.ranks[timeline.critical as usize],
        RankTime {
            forward: Span(20),
            backward: Span(40),
            // Two sends, and the two gradients' ways.
            p2p: Span(3 + 3 + 3 + 3),
            bubble: Span(110 - 20 - 40 - 12 - 4 - 7),
            reduce: Span(4),
            optimizer: Span(7),
            hidden: Span::ZERO,
        }
    );
    // Beside compute, only the ways that someone waits for remain.
    times.hop_overlapped = true;
    assert_eq!(
        simulate(&schedule, &times).total,
        Span(13 + 10 + 20 + 10 + 20 + 3 + 20 + 11)
    );
}

#[test]
fn law_trace_covers_exactly_the_busy_time() {
    let mut random = SplitMix64::new(3);
    for schedule in schedules() {
        let times = random_times(&mut random, &schedule);
        let simulator = Simulator::new(&schedule);
        let timeline = simulator.run(&times);
        let trace = simulator.trace(&times, |action, duration| {
            let (name, category) = match action {
                Action::Forward(..) | Action::Combined { .. } => ("forward", Category::Dense),
                Action::Backward(..) | Action::BackwardInput(..) | Action::BackwardWeight(..) => {
                    ("backward", Category::Dense)
                }
                Action::ReduceGradients(_) => ("reduce", Category::DpComm),
                _ => ("optimizer", Category::Optimizer),
            };
            vec![Part {
                name: name.into(),
                category,
                lane: Lane::Compute,
                layer: None,
                duration,
            }]
        });
        for (rank, time) in timeline.ranks.iter().enumerate() {
            let on_compute = trace
                .spans
                .iter()
                .filter(|span| span.rank == rank as u32 && span.lane == Lane::Compute);
            let busy: Span = on_compute.map(TraceSpan::duration).sum();
            assert_eq!(busy, time.busy());
        }
        let end = trace
            .spans
            .iter()
            .map(|span| span.end)
            .max()
            .expect("spans");
        assert_eq!(end - Instant(0), timeline.total);
    }
}
