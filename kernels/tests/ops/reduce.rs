//! Tests of ordered sums and copies of ranges against plain loops.

use moefold_kernels::Tensor;
use moefold_kernels::reduce::*;

use crate::support::{
    Check, integers, on_every_device, oracle_everywhere, statistic, tensor, wide,
};

#[test]
fn oracle_sum_in_order() {
    oracle_everywhere(16, |device, rng| {
        // One source, as many as arguments hold, and more; whole 16-byte pieces and not.
        let sources = [1, rng.size(2..=8), rng.size(9..=14)][rng.size(0..=2)];
        let len = [0, rng.size(1..=40), 8 * rng.size(1..=200)][rng.size(0..=2)];
        let values: Vec<Vec<f32>> = (0..sources).map(|_| rng.values(len)).collect();
        let mut want = vec![0.0; len];
        for values in &values {
            for (want, value) in want.iter_mut().zip(wide(values)) {
                *want += value;
            }
        }
        let sum = |srcs: &[Tensor], dst: Tensor| {
            sum_ordered(&srcs.iter().collect::<Vec<_>>(), &dst);
            dst
        };
        let all = |make: &dyn Fn(&[f32]) -> Tensor| -> Vec<Tensor> {
            values.iter().map(|values| make(values)).collect()
        };
        let stored = |values: &[f32]| tensor(device, values, &[len]);
        let exact = |values: &[f32]| statistic(device, values, &[len]);
        let nothing = vec![0.0; len];
        let (narrow, full) = (all(&stored), all(&exact));
        vec![
            Check("as stored", sum(&narrow, stored(&nothing)), want.clone()),
            Check("into f32", sum(&narrow, exact(&nothing)), want.clone()),
            Check("from f32", sum(&full, stored(&nothing)), want.clone()),
            Check("of f32", sum(&full, exact(&nothing)), want),
        ]
    });
}

#[test]
fn oracle_maxima_also_over_one_of_the_sources() {
    oracle_everywhere(8, |device, rng| {
        let sources = [1, rng.size(2..=8), rng.size(9..=11)][rng.size(0..=2)];
        let len = [0, rng.size(1..=40), 8 * rng.size(1..=60)][rng.size(0..=2)];
        let mut values: Vec<Vec<f32>> = (0..sources).map(|_| rng.values(len)).collect();
        if sources > 1 && len > 0 {
            // A number wins over NaN.
            values[rng.size(0..=sources - 1)][len / 2] = f32::NAN;
        }
        let max = |i: usize| values.iter().map(|v| v[i]).fold(f32::NAN, f32::max);
        let largest: Vec<f32> = (0..len).map(max).collect();
        let total = |i: usize| values.iter().map(|v| f64::from(v[i])).sum::<f64>();
        let want: Vec<f64> = (0..len).filter(|&i| i != len / 2).map(total).collect();
        let place = rng.size(0..=sources - 1);
        let over = |op: fn(&[&Tensor], &Tensor)| {
            let kind = |v: &[f32]| statistic(device, v, &[len]);
            let tensors: Vec<Tensor> = values.iter().map(|v| kind(v)).collect();
            op(&tensors.iter().collect::<Vec<_>>(), &tensors[place]);
            tensors[place].clone()
        };
        let sum = over(sum_ordered);
        let mut finite = sum.to_f32();
        if len > 0 {
            finite.remove(len / 2);
        }
        vec![
            Check("max", over(maximum), wide(&largest)),
            Check("sum", statistic(device, &finite, &[finite.len()]), want),
        ]
    });
}

#[test]
fn integers_are_copied_as_they_are() {
    on_every_device(2, |device| {
        // Bits that are no floats worth keeping, among them.
        let ids = [0, -1, i32::MAX, i32::MIN, 0x7f80_0001, 7, 8, 9, 1 << 23];
        let (from, to) = (
            integers(device, &ids, &[9]),
            integers(device, &[5; 9], &[9]),
        );
        copy_all(&[
            (&from.view(0, &[8]), &to.view(0, &[8])),
            (&from.view(8, &[1]), &to.view(8, &[1])),
        ]);
        assert_eq!(to.to_i32(), ids);
    });
}

/// The order is that of the sources: this sum is 1 in it, and 0 in any other order.
#[test]
fn oracle_sums_are_not_reordered() {
    oracle_everywhere(1, |device, _| {
        let parts = [1e8f32, -1e8, 1.0].map(|value| statistic(device, &[value; 7], &[7]));
        let sum = statistic(device, &[0.0; 7], &[7]);
        sum_ordered(&parts.iter().collect::<Vec<_>>(), &sum);
        assert_eq!(sum.to_f32(), [1.0; 7]);
        Vec::new()
    });
}

#[test]
fn oracle_copies_of_ranges() {
    oracle_everywhere(16, |device, rng| {
        // Ranges of one tensor, some empty, to places in another in the opposite order.
        let unit = [1, 8][rng.size(0..=1)];
        let lens: Vec<usize> = (0..rng.size(1..=10))
            .map(|_| unit * [0, rng.size(1..=30), rng.size(1..=600)][rng.size(0..=2)])
            .collect();
        let total: usize = lens.iter().sum();
        let values = rng.values(total);
        let (mut start, mut want) = (0, vec![0.0; total]);
        for len in &lens {
            let place = total - start - len;
            want[place..place + len].copy_from_slice(&wide(&values[start..start + len]));
            start += len;
        }
        let moved = |src: Tensor, dst: Tensor| {
            let mut start = 0;
            let views: Vec<(Tensor, Tensor)> = lens
                .iter()
                .map(|&len| {
                    let from = src.view(start, &[len]);
                    start += len;
                    (from, dst.view(total - start, &[len]))
                })
                .collect();
            copy_all(&views.iter().map(|(s, d)| (s, d)).collect::<Vec<_>>());
            dst
        };
        let stored = |values: &[f32]| tensor(device, values, &[total]);
        let exact = |values: &[f32]| statistic(device, values, &[total]);
        let nothing = vec![0.0; total];
        vec![
            Check(
                "same",
                moved(stored(&values), stored(&nothing)),
                want.clone(),
            ),
            Check(
                "widened",
                moved(stored(&values), exact(&nothing)),
                want.clone(),
            ),
            Check("narrowed", moved(exact(&values), stored(&nothing)), want),
        ]
    });
}
