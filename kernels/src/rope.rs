//! Rotary position embedding, in place.
//!
//! Of each head vector `rotary_dim` elements are rotated in pairs, the `i`-th by the angle
//! `position * frequency_i`, and times an amplitude; the others pass. Frequencies are
//! `theta^(-2i / rotary_dim)` ([`frequencies`]; Su et al. 2021, arXiv 2104.09864) or what a model makes of
//! them. Which elements are a pair is a [`Pairing`]. Backward is the inverse rotation, times the amplitude.
//!
//! A device implementation: elementwise over `[tokens, heads, d]`, from f32 tables of cosines and
//! sines that are made in f64 on the host and rounded once.

use moefold_profiles::{Dtype, Op, Pass};

use crate::buffer::with;
use crate::device::{Backend, Device, TensorClass};
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// Which elements of a head vector are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairing {
    /// `(i, i + rotary_dim / 2)`: the half style, Hugging Face's `rotate_half`.
    Halves,
    /// `(2i, 2i + 1)`: the interleaved style of the paper.
    Neighbours,
}

/// Cosines and sines of the angles, and what they rotate.
#[derive(Debug, Clone)]
pub struct Rope {
    /// `[tokens, rotary_dim / 2]`, or one row a position.
    pub cos: Tensor,
    /// As the cosines.
    pub sin: Tensor,
    /// Which row each token takes `[tokens]`, where it is not its own.
    pub rows: Option<Tensor>,
    /// What is a pair.
    pub pairing: Pairing,
    /// Leading elements of a head that pass.
    pub skipped: usize,
}

impl Rope {
    /// The same angles for pairs of another kind.
    #[must_use]
    pub fn pairing(self, pairing: Pairing) -> Self {
        Self { pairing, ..self }
    }

    /// The same for tokens that take these rows of the tables `[tokens]`: positions, where there is a row for each.
    #[must_use]
    pub fn at(self, rows: Tensor) -> Self {
        Self {
            rows: Some(rows),
            ..self
        }
    }

    /// The same for heads whose first elements pass.
    #[must_use]
    pub fn skipping(self, skipped: usize) -> Self {
        Self { skipped, ..self }
    }
}

/// The cost-table key for `x: [tokens, heads, d]`.
pub fn key(x: &Tensor, pass: Pass) -> Op {
    key_of(x, x.width(), pass)
}

/// The same where only `dim` elements of each head are rotated.
fn key_of(x: &Tensor, dim: usize, pass: Pass) -> Op {
    Op::Rope {
        rows: x.num_rows() as u64,
        dim: dim as u64,
        pass,
        dtype: x.dtype(),
    }
}

/// `theta^(-2i / rotary_dim)` for each of `rotary_dim / 2` pairs: radians a position.
///
/// # Panics
/// When `rotary_dim` is odd.
pub fn frequencies(rotary_dim: usize, theta: f64) -> Vec<f64> {
    assert!(
        rotary_dim.is_multiple_of(2),
        "rope::frequencies: rotary_dim is {rotary_dim}, expected even"
    );
    (0..rotary_dim / 2)
        .map(|i| theta.powf(-2.0 * i as f64 / rotary_dim as f64))
        .collect()
}

/// The tables for tokens at these positions, from the start of a head, in the half style. Cosines and sines
/// are times `amplitude`.
pub fn table(
    device: &Device,
    positions: &(impl ExactSizeIterator<Item = u32> + Clone),
    frequencies: &[f64],
    amplitude: f64,
) -> Rope {
    let dims = [positions.len(), frequencies.len()];
    let values = |f: fn(f64) -> f64| -> Vec<f32> {
        let angles = positions
            .clone()
            .flat_map(|p| frequencies.iter().map(move |w| f64::from(p) * w));
        angles.map(|angle| (amplitude * f(angle)) as f32).collect()
    };
    let table = |f| {
        if device.is_meta() {
            return device.empty(TensorClass::Transient, Dtype::F32, &dims);
        }
        device.from_f32(TensorClass::Transient, &values(f), &dims)
    };
    Rope {
        cos: table(f64::cos),
        sin: table(f64::sin),
        rows: None,
        pairing: Pairing::Halves,
        skipped: 0,
    }
}

/// Rotates `x [tokens, heads, d]` in place.
///
/// # Panics
/// When the table is of other tokens, or of rows of others, or wider than a head.
pub fn forward(x: &Tensor, rope: &Rope) {
    let _op = x
        .device()
        .begin(|| key_of(x, 2 * rope.cos.width(), Pass::Forward));
    rotate("rope::forward", x, rope, 1.0);
}

/// Rotates the gradient `dx [tokens, heads, d]` back, in place.
///
/// # Panics
/// As [`forward`].
pub fn backward(dx: &Tensor, rope: &Rope) {
    let _op = dx
        .device()
        .begin(|| key_of(dx, 2 * rope.cos.width(), Pass::Backward));
    rotate("rope::backward", dx, rope, -1.0);
}

fn rotate(op: &'static str, x: &Tensor, rope: &Rope, direction: f32) {
    let &[tokens, heads, d] = x.dims() else {
        panic!("{op}: x is {x:?}, expected [tokens, heads, d]")
    };
    let half = rope.cos.width();
    assert!(
        rope.skipped + 2 * half <= d,
        "{op}: the table rotates {} elements after {} of heads of {d}",
        2 * half,
        rope.skipped
    );
    match &rope.rows {
        None => expect_dims(op, "cos", &rope.cos, &[tokens, half]),
        Some(rows) => expect_dims(op, "rows", rows, &[tokens]),
    }
    expect_dims(op, "sin", &rope.sin, rope.cos.dims());
    match &x.device().0.backend {
        Backend::Cpu(cpu) => {
            let rows = rope.rows.as_ref().unwrap_or(&rope.cos);
            with(
                op,
                [&rope.cos, &rope.sin, rows],
                [x],
                |[cos, sin, rows], [x]| {
                    let tables = cpu::Tables {
                        cos: cos.f32(),
                        sin: sin.f32(),
                        rows: rope.rows.as_ref().map(|_| rows.i32()),
                        half,
                    };
                    let place = (rope.skipped, rope.pairing);
                    cpu::rotate(cpu, x.f32(), [heads, d], tables, place, direction);
                },
            );
        }
        Backend::Cuda(gpu) => cuda::rotate(gpu, op, x, rope, direction),
    }
}

mod cpu {
    use std::ops::Range;

    use super::Pairing;
    use crate::parallel::Cpu;
    use crate::simd::vectorized;

    /// Tables of `half` angles a row, and the row of each token where it is not its own.
    #[derive(Clone, Copy)]
    pub(super) struct Tables<'a> {
        pub(super) cos: &'a [f32],
        pub(super) sin: &'a [f32],
        pub(super) rows: Option<&'a [i32]>,
        pub(super) half: usize,
    }

    pub(super) fn rotate(
        cpu: &Cpu,
        x: &mut [f32],
        [heads, d]: [usize; 2],
        tables: Tables<'_>,
        (skipped, pairing): (usize, Pairing),
        direction: f32,
    ) {
        let Tables {
            cos,
            sin,
            rows,
            half,
        } = tables;
        if x.is_empty() || half == 0 {
            return;
        }
        let rotate_tokens = match pairing {
            Pairing::Halves => rotate_halves,
            Pairing::Neighbours => rotate_neighbours,
        };
        let sizes = [heads, d, half, skipped];
        let tokens = x.len() / (heads * d);
        cpu.rows(tokens, x.len(), [(x, heads * d)], |range, [x]| {
            let angles = |rows: Range<usize>| {
                let table = rows.start * half..rows.end * half;
                (&cos[table.clone()], &sin[table])
            };
            let Some(rows) = rows else {
                let (cos, sin) = angles(range);
                return rotate_tokens(x, sizes, cos, sin, direction);
            };
            for (x, &row) in x.chunks_exact_mut(heads * d).zip(&rows[range]) {
                let (cos, sin) = angles(row as usize..row as usize + 1);
                rotate_tokens(x, sizes, cos, sin, direction);
            }
        });
    }

    vectorized! {
        fn rotate_halves(
            x: &mut [f32],
            sizes: [usize; 4],
            cos: &[f32],
            sin: &[f32],
            direction: f32,
        ) {
            let [heads, d, half, skipped] = sizes;
            let tables = cos.chunks_exact(half).zip(sin.chunks_exact(half));
            for (token, (cos, sin)) in x.chunks_exact_mut(heads * d).zip(tables) {
                for head in token.chunks_exact_mut(d) {
                    let (first, rest) = head[skipped..].split_at_mut(half);
                    let second = &mut rest[..half];
                    let (cos, sin) = (&cos[..half], &sin[..half]);
                    for i in 0..half {
                        let (a, b, c, s) = (first[i], second[i], cos[i], sin[i] * direction);
                        first[i] = a * c - b * s;
                        second[i] = b * c + a * s;
                    }
                }
            }
        }
    }

    vectorized! {
        fn rotate_neighbours(
            x: &mut [f32],
            sizes: [usize; 4],
            cos: &[f32],
            sin: &[f32],
            direction: f32,
        ) {
            let [heads, d, half, skipped] = sizes;
            let tables = cos.chunks_exact(half).zip(sin.chunks_exact(half));
            for (token, (cos, sin)) in x.chunks_exact_mut(heads * d).zip(tables) {
                for head in token.chunks_exact_mut(d) {
                    let (pairs, _) = head[skipped..].as_chunks_mut::<2>();
                    for ((pair, c), s) in pairs.iter_mut().zip(cos).zip(sin) {
                        let ([a, b], s) = (*pair, s * direction);
                        *pair = [a * c - b * s, b * c + a * s];
                    }
                }
            }
        }
    }
}

mod cuda {
    //! The launch.

    use moefold_profiles::Dtype;

    use super::{Pairing, Rope};
    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("rope");

    const THREADS: usize = 256;

    /// Heads that a thread takes (`HEADS` in the source).
    const HEADS: usize = 4;

    fn program(dtype: Dtype, vec: usize, pairing: Pairing, rows: bool) -> Program {
        let mut defines = vec![
            Define::dtype("T", dtype),
            Define::int("VEC", vec),
            Define::flag("NEIGHBOURS", pairing == Pairing::Neighbours),
        ];
        if rows {
            defines.push(Define::flag("ROWS", true));
        }
        SOURCE.with(&defines)
    }

    /// Elements of an access: 16 bytes where every head, its halves and the tables allow it.
    fn vector(x: &Tensor, rope: &Rope) -> usize {
        let wide = 16 / x.dtype().bytes(1).0 as usize;
        let aligned = |t: &&Tensor| t.address().0.is_multiple_of(16);
        let widths = [x.width(), rope.cos.width(), rope.skipped];
        let whole = widths.iter().all(|width| width.is_multiple_of(wide));
        if whole && [x, &rope.cos, &rope.sin].iter().all(aligned) {
            wide
        } else {
            1
        }
    }

    pub(super) fn rotate(gpu: &Cuda, op: &'static str, x: &Tensor, rope: &Rope, direction: f32) {
        disjoint(op, &[&rope.cos, &rope.sin], &[x]);
        let &[tokens, heads, d] = x.dims() else {
            unreachable!("checked by the caller");
        };
        let (half, vec) = (rope.cos.width(), vector(x, rope));
        let items = tokens * heads.div_ceil(HEADS) * (half / vec);
        let mut args: Vec<Arg> = [x, &rope.cos, &rope.sin].map(Arg::from).to_vec();
        args.extend([tokens, heads, d, half, rope.skipped].map(Arg::size));
        args.push(Arg::F32(direction));
        args.extend(rope.rows.as_ref().map(Arg::from));
        gpu.launch(
            op,
            &program(x.dtype(), vec, rope.pairing, rope.rows.is_some()),
            "rope_rotate",
            Grid::linear(items.div_ceil(THREADS), THREADS as u32, 0),
            &args,
        );
    }

    /// What is launched, with its limits: for aligned heads.
    pub(crate) fn programs() -> Vec<Listed> {
        let mut programs = Vec::new();
        for (dtype, vec, needs) in [
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 1, Needs::Odd),
            (Dtype::Bf16, 1, Needs::Odd),
        ] {
            let pairings = [Pairing::Halves, Pairing::Neighbours];
            for (pairing, rows) in pairings.map(|one| [(one, false), (one, true)]).concat() {
                programs.push(Listed {
                    program: program(dtype, vec, pairing, rows),
                    needs,
                    entries: vec![Entry::plain("rope_rotate", 80, 0)],
                });
            }
        }
        programs
    }
}
