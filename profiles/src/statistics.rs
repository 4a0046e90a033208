//! Statistics of timings.

/// The median; of an even number, the mean of the middle two. None of none.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        return Some(values[middle]);
    }
    let below = values.get(middle.checked_sub(1)?)?;
    Some(f64::midpoint(*below, values[middle]))
}

/// Of some values by name those whose half is nearest to `middle`, at least three where there are: what something
/// else held up is not among them. The nearest come first, and of two as near the one that stands first.
pub fn nearest_half<T>(mut values: Vec<(T, f64)>, middle: f64) -> Vec<T> {
    values.sort_by(|a, b| f64::total_cmp(&(a.1 - middle).abs(), &(b.1 - middle).abs()));
    values.truncate(values.len().div_ceil(2).max(3));
    values.into_iter().map(|(name, _)| name).collect()
}

#[cfg(test)]
mod tests {
    use super::{median, nearest_half};

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
