//! Tests of gathers and scatters of rows against plain loops.

use std::ops::Range;

use moefold_kernels::rows::*;

use crate::support::{Check, integers, oracle_everywhere, tensor, wide};

#[test]
fn oracle_gather_and_chunks() {
    oracle_everywhere(30, |device, rng| {
        // Any width, one of whole 16-byte pieces, and one of several tiles a chunk.
        let width = [rng.size(1..=20), 8 * rng.size(1..=9), 264][rng.size(0..=2)];
        let rows = rng.size(1..=40);
        let x = rng.values(rows * width);
        let xw = wide(&x);
        let len = rng.size(0..=50);
        let mut index = rng.ids(len, rows);
        let none = index.iter_mut().filter(|_| rng.size(0..=4) == 0);
        none.for_each(|i| *i = -1);
        let gathered = index.iter().flat_map(|&i| match i {
            -1 => vec![0.0; width],
            i => xw[i as usize * width..][..width].to_vec(),
        });

        // Cut the rows anywhere (empty chunks too) and shuffle the pieces.
        let mut cuts: Vec<usize> = (0..rng.size(0..=6)).map(|_| rng.size(0..=rows)).collect();
        cuts.extend([0, rows]);
        cuts.sort_unstable();
        let mut chunks: Vec<Range<usize>> = cuts.windows(2).map(|w| w[0]..w[1]).collect();
        for i in 0..chunks.len() {
            let other = rng.size(0..=i);
            chunks.swap(i, other);
        }
        let moved: Vec<f64> = chunks
            .iter()
            .flat_map(|c| xw[c.start * width..c.end * width].to_vec())
            .collect();

        let columns = {
            let (a, b) = (rng.size(0..=width), rng.size(0..=width));
            a.min(b)..a.max(b)
        };
        let cut = xw
            .chunks(width)
            .flat_map(|row| row[columns.clone()].to_vec())
            .collect();

        let t = tensor(device, &x, &[rows, width]);
        let all = chunks.iter().cloned().collect();
        let there = gather_chunks(&t, &all);
        let back = scatter_chunks(&there, &all);
        let columns_got = gather_columns(&t, columns.clone());
        let restored = tensor(device, &x, &[rows, width]);
        columns_got.copy_from_f32(&vec![1.0; columns_got.len()]);
        scatter_columns(&columns_got, &restored, columns.clone());
        let restored_want = (0..rows * width)
            .map(|i| {
                if columns.contains(&(i % width)) {
                    1.0
                } else {
                    xw[i]
                }
            })
            .collect();
        vec![
            Check(
                "gather",
                gather(&t, &integers(device, &index, &[len])),
                gathered.collect(),
            ),
            Check("gather_chunks", there, moved),
            Check("scatter_chunks", back, xw.clone()),
            Check("gather_columns", gather_columns(&t, columns), cut),
            Check("scatter_columns", restored, restored_want),
        ]
    });
}
