//! Intervals from synthetic misses, whose quantiles are known.

use moefold_profiles::random::SplitMix64;
use moefold_profiles::units::Seconds;

use super::*;

fn class(generation: Generation, width: Width) -> Class {
    Class {
        generation: Some(generation),
        width: Some(width),
    }
}

/// Rows of as many families, with ratios `1, 1 + step, ...`.
fn misses(class: Class, families: usize, step: f64) -> Vec<Miss> {
    let miss = |index: usize| Miss {
        class,
        family: format!("{class:?} {index}"),
        ratio: 1.0 + step * index as f64,
    };
    (0..families).map(miss).collect()
}

#[test]
fn golden_quantiles_are_widened_by_the_number_of_families() {
    let own = class(Generation::Hopper, Width::Wide);
    // Of n rows of n families the ends are the 0.1 * (n + 1)-th from either side: at 4 the outermost, at
    // 14 halfway between the first and the second.
    let four = Spread::of(&misses(own, 4, 0.1)).expect("rows");
    assert_eq!((four.interval.low, four.interval.high), (1.0, 1.3));
    let many = Spread::of(&misses(own, 14, 0.1)).expect("rows");
    assert!((many.interval.low - 1.1_f64.sqrt()).abs() < 1e-12);
    assert!((many.interval.high - (2.3 * 2.2_f64).sqrt()).abs() < 1e-12);
    assert!((many.median - (1.6 * 1.7_f64).sqrt()).abs() < 1e-12);
    // The same rows of one family say less.
    let mut one = misses(own, 14, 0.1);
    for miss in &mut one {
        "one".clone_into(&mut miss.family);
    }
    let one = Spread::of(&one).expect("rows");
    assert_eq!((one.interval.low, one.interval.high), (1.0, 2.3));
}

#[test]
fn a_class_of_few_families_goes_by_what_it_is_part_of() {
    let wide = class(Generation::Hopper, Width::Wide);
    let narrow = class(Generation::Hopper, Width::Narrow);
    let other = class(Generation::Ampere, Width::Wide);
    let mut all = misses(wide, 4, 0.0);
    all.extend(misses(narrow, 6, 0.1));
    let families = |class| Spread::near(class, &all).expect("rows").families;
    assert_eq!(families(narrow), 6);
    assert_eq!(families(wide), 10);
    assert_eq!(families(other), 10);
    assert_eq!(Spread::near(wide, &[]), None);
}

#[test]
fn law_a_new_family_is_inside_four_times_of_five() {
    // Families are drawn from a uniform distribution on a logarithmic scale.
    let mut random = SplitMix64::new(1);
    let own = class(Generation::Hopper, Width::Wide);
    let (mut inside, mut all) = (0, 0);
    for _ in 0..400 {
        let mut rows = misses(own, 12, 0.0);
        for row in &mut rows {
            row.ratio = random.unit().exp();
        }
        let spread = Spread::near(own, &rows).expect("rows");
        for _ in 0..10 {
            all += 1;
            inside += i32::from(spread.interval.holds(random.unit().exp()));
        }
    }
    let share = f64::from(inside) / f64::from(all);
    assert!((share - COVERAGE).abs() < 0.03, "{share}");
}

#[test]
fn law_less_known_prices_widen_an_interval() {
    let known = |measured: f64, interpolated: f64| Confidence {
        measured,
        interpolated,
        extrapolated: 1.0 - measured - interpolated,
    };
    let width_of = |confidence: &Confidence, samples, stack, assumed| {
        let known = Known {
            confidence,
            samples,
            fitted: None,
            assumed,
        };
        let own = class(Generation::Hopper, Width::Wide);
        let Interval { low, high } = of(stack, own, &known);
        assert!(low < high);
        high / low
    };
    let width =
        |confidence: &Confidence, samples, stack| width_of(confidence, samples, stack, false);
    let shares = [
        known(1.0, 0.0),
        known(0.5, 0.5),
        known(0.0, 1.0),
        known(0.0, 0.0),
    ];
    let widths = shares.map(|shares| width(&shares, Some(0.05), StackName::Moefold));
    assert!(
        widths.windows(2).all(|pair| pair[0] < pair[1]),
        "{widths:?}"
    );
    let noisy = width(&shares[0], Some(0.2), StackName::Moefold);
    assert!(noisy > widths[0]);
    // Of assumed rates alone half to twice is as likely as all of it, and nothing is assumed of what was measured.
    let assumed = |shares| width_of(shares, Some(0.05), StackName::Moefold, true);
    assert_eq!(assumed(&shares[0]), widths[0]);
    let ends = [assumed(&shares[3]), widths[3]].map(|width: f64| (width.ln() / 2.0).powi(2));
    assert!(
        (ends[0] - ends[1] - 2f64.ln().powi(2)).abs() < 1e-12,
        "{ends:?}"
    );
    // What a profile measures does not take published misses away.
    let shipped = width(&shares[3], None, StackName::Megatron);
    for shares in shares {
        let wide = width(&shares, Some(0.05), StackName::Megatron);
        assert!(wide >= shipped * (1.0 - 1e-12));
    }
}

#[test]
fn law_what_two_layouts_share_does_not_tell_them_apart() {
    let time = |experts: f64, exchange: f64| {
        let mut time = TimeByCategory::default();
        time.add(Category::Experts, Seconds(experts));
        time.add(Category::EpComm, Seconds(exchange));
        time
    };
    let first = time(3.0, 1.0);
    let apart = |second: &TimeByCategory| told_apart(StackName::Moefold, &first, second, 0.1);
    // The same mix, however slow: only repeats differ.
    assert_eq!(apart(&time(6.0, 2.0)), REPEATS);
    // Shares of 0.5 instead of 0.75 and 0.25.
    let golden = (0.1 * DEVIATIONS * 0.25 * 2.0_f64.sqrt()).hypot(REPEATS);
    assert!((apart(&time(2.0, 2.0)) - golden).abs() < 1e-12);
    assert!(apart(&time(0.0, 4.0)) > golden);
}
