//! Statistics of timings.

/// The median; of an even number, the mean of the middle two. None of none.
pub fn median(values: Vec<f64>) -> Option<f64> {
    quantile(values, 0.5)
}

/// The quantile `q` by linear interpolation between order statistics. None without values.
pub fn quantile(mut values: Vec<f64>, q: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let position = q * values.len().checked_sub(1)? as f64;
    let below = values[position.floor() as usize];
    let above = values[position.ceil() as usize];
    if below == above {
        return Some(below);
    }
    Some(below + (above - below) * position.fract())
}

/// Of some things those that no other beats in both of two respects, in each of which less is better: the least in the first
/// of them first. Of equals the one that stands first. Both are finite.
pub fn unbeaten<T>(mut all: Vec<T>, respects: impl Fn(&T) -> [f64; 2]) -> Vec<T> {
    all.sort_by(|a, b| {
        let ([first, second], [other_first, other_second]) = (respects(a), respects(b));
        first
            .total_cmp(&other_first)
            .then(second.total_cmp(&other_second))
    });
    let mut least = f64::INFINITY;
    all.retain(|one| {
        let [_, second] = respects(one);
        let is_less = second < least;
        least = least.min(second);
        is_less
    });
    all
}

/// Of some values by name those whose half is nearest to `middle`, at least three where there are: what something
/// else held up is not among them. The nearest come first, and of two as near the one that stands first.
pub fn nearest_half<T>(mut values: Vec<(T, f64)>, middle: f64) -> Vec<T> {
    values.sort_by(|a, b| f64::total_cmp(&(a.1 - middle).abs(), &(b.1 - middle).abs()));
    values.truncate(values.len().div_ceil(2).max(3));
    values.into_iter().map(|(name, _)| name).collect()
}

/// Of points of a size, a value and a weight: what never falls with size and is nearest to them, as sizes and values in
/// order of size. It is the least sum of weighted squares, by pooling adjacent violators (Ayer, Brunk, Ewing, Reid and
/// Silverman 1955): where a larger size has a smaller value both have their mean. Points of one size are one.
pub fn never_falling(mut points: Vec<[f64; 3]>) -> Vec<[f64; 2]> {
    points.sort_by(|a, b| a[0].total_cmp(&b[0]));
    let both = |one: [f64; 2], other: [f64; 2]| {
        let weight = one[1] + other[1];
        [(one[0] * one[1] + other[0] * other[1]) / weight, weight]
    };
    // Sizes, and the value and weight that all of them have.
    let mut pools: Vec<(Vec<f64>, [f64; 2])> = Vec::new();
    for same in points.chunk_by(|a, b| a[0].total_cmp(&b[0]).is_eq()) {
        let mut mean = [0.0; 2];
        for &[_, value, weight] in same {
            mean = both(mean, [value, weight]);
        }
        let mut pool = (vec![same[0][0]], mean);
        while let Some((mut sizes, mean)) = pools.pop_if(|last| last.1[0] >= pool.1[0]) {
            sizes.append(&mut pool.0);
            pool = (sizes, both(mean, pool.1));
        }
        pools.push(pool);
    }
    let each = |(sizes, [value, _]): (Vec<f64>, [f64; 2])| {
        sizes.into_iter().map(move |size| [size, value])
    };
    pools.into_iter().flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// By the other definition: at each size, of all that begin no later the most of what their means fall to by
        /// an end no earlier.
        #[test]
        fn law_what_never_falls_is_the_nearest_such(
            given in prop::collection::vec((1_u32..6, 1_u32..9, 1_u32..4), 0..8),
        ) {
            let given: Vec<[f64; 3]> = given
                .iter()
                .map(|&(size, value, weight)| [size, value, weight].map(f64::from))
                .collect();
            let mut sizes: Vec<f64> = given.iter().map(|point| point[0]).collect();
            sizes.sort_by(f64::total_cmp);
            sizes.dedup();
            let mean = |from: f64, to: f64| {
                let within = given.iter().filter(|point| (from..=to).contains(&point[0]));
                let add = |sum: [f64; 2], point: &[f64; 3]| {
                    [sum[0] + point[1] * point[2], sum[1] + point[2]]
                };
                let [sum, weights] = within.fold([0.0; 2], add);
                sum / weights
            };
            let found = never_falling(given.clone());
            prop_assert_eq!(found.len(), sizes.len());
            for (found, &size) in found.iter().zip(&sizes) {
                let ends = || sizes.iter().filter(|end| **end >= size);
                let least = |from: f64| ends().map(|to| mean(from, *to)).fold(f64::INFINITY, f64::min);
                let begins = sizes.iter().filter(|begin| **begin <= size);
                let expected = begins.map(|from| least(*from)).fold(0.0, f64::max);
                prop_assert!((found[1] - expected).abs() < 1e-9, "{given:?} {found:?} {expected}");
                prop_assert_eq!(found[0], size);
            }
        }
    }

    #[test]
    fn golden_what_falls_is_pooled_and_what_rises_is_kept() {
        let rising = vec![[1.0, 2.0, 1.0], [4.0, 5.0, 9.0], [9.0, 6.0, 1.0]];
        let kept: Vec<[f64; 2]> = rising.iter().map(|point| [point[0], point[1]]).collect();
        assert_eq!(never_falling(rising), kept);
        // One rare slow point does not speak for what is larger.
        let rare = vec![[1.0, 10.0, 1.0], [2.0, 4.0, 5.0], [3.0, 9.0, 2.0]];
        assert_eq!(never_falling(rare), [[1.0, 5.0], [2.0, 5.0], [3.0, 9.0]]);
    }

    #[test]
    fn law_unbeaten_is_what_nothing_beats_in_both() {
        let points: Vec<[f64; 2]> = (0..40)
            .map(|i| [(i * 7) % 13, (i * 5) % 11].map(f64::from))
            .collect();
        let left = unbeaten(points.clone(), |point| *point);
        for point in &points {
            let beats =
                |other: &[f64; 2]| other != point && other[0] <= point[0] && other[1] <= point[1];
            let is_beaten = points.iter().any(beats);
            assert_eq!(left.contains(point), !is_beaten, "{point:?}");
        }
        assert!(left.windows(2).all(|pair| pair[0][0] < pair[1][0]));
    }

    #[test]
    fn golden_the_half_nearest_to_the_middle_is_at_least_three() {
        let named = |values: &[f64]| (0..).zip(values.iter().copied()).collect();
        let half = |values: &[f64]| nearest_half::<usize>(named(values), 2.0);
        assert_eq!(
            half(&[9.0, 2.0, 2.1, 2.2, 5.0, 1.0, 1.9, 2.5]),
            [1, 2, 6, 3]
        );
        assert_eq!(half(&[9.0, 2.0, 5.0, 1.0]), [1, 3, 2]);
        assert_eq!(half(&[9.0]), [0]);
        assert!(half(&[]).is_empty());
    }

    #[test]
    fn the_median_is_the_middle_one_or_lies_between_two() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0]), Some(3.0));
        assert_eq!(median(vec![5.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(vec![4.0, 1.0, 9.0, 2.0]), Some(3.0));
    }
}
