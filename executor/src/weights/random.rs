//! Normal random numbers at any place of a tensor, without those before it.
//!
//! A ChaCha stream belongs to the seed and the tensor's name. Element `i` comes from its words `i & !1`
//! and `i | 1`, by the transform of Box and Muller (1958). ChaCha can be set to
//! any word, so each rank makes its own part of a tensor and all parts fit.

use std::thread;

use rand::{RngCore as _, SeedableRng as _};
use rand_chacha::ChaCha8Rng;

use super::region::Region;
use crate::device::cores;

/// Numbers that are worth a thread of their own: some milliseconds.
const PART: usize = 1 << 18;

/// The values of a region, row by row: normal, mean 0, deviation `std`. Parts of a large one are made
/// beside each other.
pub(super) fn normal_region(seed: u64, region: &Region<'_>, std: f64) -> Vec<f32> {
    let mut values = vec![0.0; region.len()];
    let (width, row_len) = (region.cols.len(), region.width());
    let first = |row: usize| ((region.rows.start + row) * row_len + region.cols.start) as u64;
    if width == row_len {
        // The rows follow each other in the tensor too.
        fill_normal(seed, region.tensor, first(0), std, &mut values);
    } else if width > 0 {
        beside(&mut values, width, |at, values| {
            for (row, values) in values.chunks_mut(width).enumerate() {
                fill_part(seed, region.tensor, first(at / width + row), std, values);
            }
        });
    }
    values
}

/// Fills `values` with elements `first..` of the tensor `name`: normal, mean 0, deviation `std`.
/// Parts of a large tensor are made beside each other.
fn fill_normal(seed: u64, name: &str, first: u64, std: f64, values: &mut [f32]) {
    beside(values, 1, |at, values| {
        fill_part(seed, name, first + at as u64, std, values);
    });
}

/// Fills parts of `values` on as many threads as are worth it, with multiples of `unit` in each; `fill`
/// is told where its part begins.
fn beside(values: &mut [f32], unit: usize, fill: impl Fn(usize, &mut [f32]) + Sync) {
    let threads = cores().min(values.len() / PART);
    if threads < 2 {
        return fill(0, values);
    }
    let part = values.len().div_ceil(threads).next_multiple_of(unit);
    thread::scope(|scope| {
        for (index, values) in values.chunks_mut(part).enumerate() {
            let fill = &fill;
            scope.spawn(move || fill(index * part, values));
        }
    });
}

fn fill_part(seed: u64, name: &str, first: u64, std: f64, values: &mut [f32]) {
    let mut hash = blake3::Hasher::new();
    hash.update(&seed.to_le_bytes());
    hash.update(name.as_bytes());
    let mut random = ChaCha8Rng::from_seed(*hash.finalize().as_bytes());
    random.set_word_pos(u128::from(first & !1));
    let mut place = first;
    let mut rest = values;
    while !rest.is_empty() {
        let pair = normal_pair(random.next_u32(), random.next_u32());
        let skipped = (place & 1) as usize;
        let count = (2 - skipped).min(rest.len());
        let (now, later) = rest.split_at_mut(count);
        for (value, normal) in now.iter_mut().zip(&pair[skipped..]) {
            *value = (std * normal) as f32;
        }
        place += count as u64;
        rest = later;
    }
}

/// Two independent standard normal numbers from two uniform words.
fn normal_pair(a: u32, b: u32) -> [f64; 2] {
    const UNIT: f64 = 1.0 / 4_294_967_296.0;
    // In (0, 1], so that the logarithm exists.
    let radius = (-2.0 * ((f64::from(a) + 1.0) * UNIT).ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * f64::from(b) * UNIT).sin_cos();
    [radius * cos, radius * sin]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normal(seed: u64, name: &str, first: u64, len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        fill_normal(seed, name, first, 0.02, &mut values);
        values
    }

    #[test]
    fn law_any_part_equals_the_part_of_the_whole() {
        let whole = normal(7, "w", 0, 50);
        for first in 0..50 {
            for len in 0..50 - first {
                assert_eq!(
                    normal(7, "w", first as u64, len),
                    whole[first..first + len],
                    "{first} + {len}"
                );
            }
        }
    }

    #[test]
    fn law_a_tensor_made_in_parts_equals_its_parts() {
        let (first, len) = (3, 7 * PART + 5);
        let whole = normal(7, "w", first, len);
        for at in [0, PART - 1, PART, len / 2, len / 2 + 1, len - 3] {
            let some = normal(7, "w", first + at as u64, 3);
            assert_eq!(some, whole[at..at + 3], "{at}");
        }
    }

    #[test]
    fn law_a_region_equals_its_rows() {
        let dims = [3000, 1200];
        for (rows, cols) in [
            (0..5, 0..1200),
            (7..9, 3..4),
            (10..2000, 17..1011),
            (0..0, 0..3),
        ] {
            let region = Region {
                tensor: "w",
                dims: &dims,
                rows: rows.clone(),
                cols: cols.clone(),
            };
            let by_row: Vec<f32> = rows
                .flat_map(|row| normal(7, "w", (row * dims[1] + cols.start) as u64, cols.len()))
                .collect();
            assert_eq!(normal_region(7, &region, 0.02), by_row);
        }
    }

    #[test]
    fn law_seeds_and_names_have_their_own_numbers() {
        assert_ne!(normal(7, "w", 0, 8), normal(8, "w", 0, 8));
        assert_ne!(normal(7, "w", 0, 8), normal(7, "v", 0, 8));
    }

    #[test]
    fn the_numbers_are_normal() {
        let n = 100_000;
        let values = normal(1, "w", 0, n);
        let moment = |power: i32| -> f64 {
            values
                .iter()
                .map(|&v| (f64::from(v) / 0.02).powi(power))
                .sum::<f64>()
                / n as f64
        };
        // Standard errors of the first four moments: sqrt(1, 2, 15, 96 over n); five of them.
        let error = |variance: f64| 5.0 * (variance / n as f64).sqrt();
        assert!(moment(1).abs() < error(1.0), "mean {}", moment(1));
        assert!(
            (moment(2) - 1.0).abs() < error(2.0),
            "variance {}",
            moment(2)
        );
        assert!(moment(3).abs() < error(15.0), "skew {}", moment(3));
        assert!(
            (moment(4) - 3.0).abs() < error(96.0),
            "kurtosis {}",
            moment(4)
        );
    }
}
