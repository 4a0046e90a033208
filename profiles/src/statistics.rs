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

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle_one_or_lies_between_two() {
        assert_eq!(median(vec![]), None);
        assert_eq!(median(vec![3.0]), Some(3.0));
        assert_eq!(median(vec![5.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(vec![4.0, 1.0, 9.0, 2.0]), Some(3.0));
    }
}
