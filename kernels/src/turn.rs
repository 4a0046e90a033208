//! Transposes into scratch, for products whose operand would otherwise be packed element by element.
//!
//! Where few rows share a transposed operand (an expert's tokens, a block of queries) the packing
//! of the `gemm` crate is a third of the product; turning the operand first by tiles of vector
//! registers costs a few percent.
#![expect(
    unsafe_code,
    reason = "tiles are read and written through pointers, bounds checked once"
)]

use crate::matrix::Matrix;

/// Rows and columns of a tile.
const TILE: usize = 8;

/// The same matrix, of which the transpose has adjacent columns, with adjacent columns in `scratch`.
pub(crate) fn turned<'a>(m: Matrix<'_>, scratch: &'a mut Vec<f32>) -> Matrix<'a> {
    let source = m.t();
    let (rows, cols) = (m.num_rows(), m.num_cols());
    if scratch.len() < rows * cols {
        scratch.resize(rows * cols, 0.0);
    }
    let scratch = &mut scratch[..rows * cols];
    let tiled_cols = tiled(source, scratch, cols);
    for col in tiled_cols..cols {
        for (row, &x) in source.row(col).iter().enumerate() {
            scratch[row * cols + col] = x;
        }
    }
    Matrix::new(scratch, rows, cols)
}

/// Writes as many of the source's rows as make whole tiles into the first columns of `out`, whose
/// rows have `width`; how many columns that were.
fn tiled(source: Matrix<'_>, out: &mut [f32], width: usize) -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx") {
        let (rows, cols) = (source.num_rows(), source.num_cols());
        let (whole_rows, whole_cols) = (rows / TILE * TILE, cols / TILE * TILE);
        for first in (0..whole_rows).step_by(TILE) {
            let lines: [&[f32]; TILE] = std::array::from_fn(|i| source.row(first + i));
            assert!(out.len() >= cols * width && first + TILE <= width);
            // SAFETY: AVX was found. Every line has `cols` elements, of which the tiles read
            // those below `whole_cols`; rows below that of `out` have `width` elements each, of
            // which they write eight from `first` on (asserted).
            unsafe { avx::turn(lines, whole_cols, out.as_mut_ptr().add(first), width) };
            for (i, line) in lines.iter().enumerate() {
                for col in whole_cols..cols {
                    out[col * width + first + i] = line[col];
                }
            }
        }
        return whole_rows;
    }
    let _ = (source, out, width);
    0
}

#[cfg(target_arch = "x86_64")]
mod avx {
    use std::arch::x86_64::{
        _MM_HINT_T0, _mm_prefetch, _mm256_loadu_ps, _mm256_permute2f128_ps, _mm256_shuffle_ps,
        _mm256_storeu_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
    };

    use super::TILE;

    /// Eight rows of `cols` elements, a multiple of eight, become eight columns of `out`.
    ///
    /// # Safety
    /// The lines have `cols` elements; `out` may be written at `row * width..row * width + 8` for
    /// every row below `cols`.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn turn(lines: [&[f32]; TILE], cols: usize, out: *mut f32, width: usize) {
        for col in (0..cols).step_by(TILE) {
            // The lines of the next call follow these where the source is whole; the hardware does
            // not see that coming.
            if col % (2 * TILE) == 0 {
                for line in lines {
                    let next = line.as_ptr().wrapping_add(TILE * line.len() + col);
                    _mm_prefetch::<_MM_HINT_T0>(next.cast());
                }
            }
            // SAFETY: promised by the caller.
            unsafe {
                let a = _mm256_loadu_ps(lines[0].as_ptr().add(col));
                let b = _mm256_loadu_ps(lines[1].as_ptr().add(col));
                let c = _mm256_loadu_ps(lines[2].as_ptr().add(col));
                let d = _mm256_loadu_ps(lines[3].as_ptr().add(col));
                let e = _mm256_loadu_ps(lines[4].as_ptr().add(col));
                let f = _mm256_loadu_ps(lines[5].as_ptr().add(col));
                let g = _mm256_loadu_ps(lines[6].as_ptr().add(col));
                let h = _mm256_loadu_ps(lines[7].as_ptr().add(col));
                // Pairs of rows interleaved, then fours, then the halves of the registers.
                let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
                let (ef, ef_high) = (_mm256_unpacklo_ps(e, f), _mm256_unpackhi_ps(e, f));
                let (gh, gh_high) = (_mm256_unpacklo_ps(g, h), _mm256_unpackhi_ps(g, h));
                let top = [
                    _mm256_shuffle_ps::<0x44>(ab, cd),
                    _mm256_shuffle_ps::<0xee>(ab, cd),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ];
                let bottom = [
                    _mm256_shuffle_ps::<0x44>(ef, gh),
                    _mm256_shuffle_ps::<0xee>(ef, gh),
                    _mm256_shuffle_ps::<0x44>(ef_high, gh_high),
                    _mm256_shuffle_ps::<0xee>(ef_high, gh_high),
                ];
                for i in 0..4 {
                    let low = _mm256_permute2f128_ps::<0x20>(top[i], bottom[i]);
                    let high = _mm256_permute2f128_ps::<0x31>(top[i], bottom[i]);
                    _mm256_storeu_ps(out.add((col + i) * width), low);
                    _mm256_storeu_ps(out.add((col + i + 4) * width), high);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn law_elements_stay_where_they_are() {
        let mut scratch = vec![f32::NAN; 7];
        for (rows, cols) in [(1, 1), (8, 8), (7, 9), (16, 40), (33, 21), (0, 5), (5, 0)] {
            let data: Vec<f32> = (0..rows * cols).map(|i| i as f32).collect();
            let m = Matrix::new(&data, cols, rows).t();
            let turned = turned(m, &mut scratch);
            for row in 0..rows {
                let want: Vec<f32> = (0..cols).map(|col| (col * rows + row) as f32).collect();
                assert_eq!(turned.row(row), want, "{rows}x{cols}");
            }
        }
    }
}
