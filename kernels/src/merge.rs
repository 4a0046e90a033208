//! Parts of an attention made one: each over some keys, all over the same queries.
//!
//! `o [T,h,dv]` and `lse [h,T]` are what [`crate::attention`] gives over some keys, `part` and `part_lse`
//! the same over others, of `t` queries of the `T`, from number `at` on. With
//! `all = log(exp(lse) + exp(part_lse))` the whole is `o = exp(lse - all) o + exp(part_lse - all) part`,
//! `lse = all` (online softmax, arXiv 1805.02867; of blocks on a ring, arXiv 2310.01889, section 3).
//!
//! A device implementation: one pass, a warp a head of a token, arithmetic in f32 and rounded once. The
//! floor: o in and out and the part in.

use moefold_profiles::{Op, SweepKind};

use crate::buffer::with;
use crate::device::Backend;
use crate::elementwise::sweep;
use crate::sizes;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key of merging `part`.
pub fn key(part: &Tensor) -> Op {
    sweep(SweepKind::Merge, part)
}

/// Merges `part [t,h,dv]` with `part_lse [h,t]` into `o [T,h,dv]` and `lse [h,T]`, at queries `at ..`.
///
/// # Panics
/// When the shapes do not agree or the queries are not among the `T`.
pub fn merge(part: &Tensor, part_lse: &Tensor, at: usize, o: &Tensor, lse: &Tensor) {
    const OP: &str = "merge::merge";
    let _op = part.device().begin(|| key(part));
    let (&[tokens, heads, width], &[all, ..]) = (part.dims(), o.dims()) else {
        panic!("{OP}: {part:?} into {o:?}, expected [tokens, heads, width] both")
    };
    assert!(
        sizes::sum(OP, [at, tokens]) <= all,
        "{OP}: {tokens} queries from {at} on are not among {all}"
    );
    expect_dims(OP, "o", o, &[all, heads, width]);
    expect_dims(OP, "lse", lse, &[heads, all]);
    expect_dims(OP, "part_lse", part_lse, &[heads, tokens]);
    let sizes = Sizes {
        tokens,
        all,
        at,
        heads,
        width,
    };
    match &part.device().0.backend {
        Backend::Cpu(cpu) => with(
            OP,
            [part, part_lse],
            [o, lse],
            |[part, part_lse], [o, lse]| {
                cpu::merge(cpu, sizes, [part.f32(), part_lse.f32()], o.f32(), lse.f32());
            },
        ),
        Backend::Cuda(gpu) => cuda::merge(gpu, OP, sizes, [part, part_lse], [o, lse]),
    }
}

/// Sizes of one call.
#[derive(Clone, Copy)]
struct Sizes {
    /// Queries of the part, and of the whole.
    tokens: usize,
    all: usize,
    at: usize,
    heads: usize,
    width: usize,
}

mod cpu {
    use super::Sizes;
    use crate::parallel::Cpu;
    use crate::simd::{exp, vectorized};

    pub(super) fn merge(
        cpu: &Cpu,
        s: Sizes,
        [part, part_lse]: [&[f32]; 2],
        o: &mut [f32],
        lse: &mut [f32],
    ) {
        let row = s.heads * s.width;
        let o = &mut o[s.at * row..(s.at + s.tokens) * row];
        let before = &*lse;
        cpu.rows(s.tokens, 3 * part.len(), [(o, row)], |range, [o]| {
            let first = range.start;
            for token in range {
                for head in 0..s.heads {
                    let [a, b, _] = shares(
                        before[head * s.all + s.at + token],
                        part_lse[head * s.tokens + token],
                    );
                    let own = ((token - first) * s.heads + head) * s.width;
                    let of_part = (token * s.heads + head) * s.width;
                    mix(
                        a,
                        &mut o[own..own + s.width],
                        b,
                        &part[of_part..of_part + s.width],
                    );
                }
            }
        });
        for (head, part_lse) in part_lse.chunks_exact(s.tokens.max(1)).enumerate() {
            let lse = &mut lse[head * s.all + s.at..][..s.tokens];
            for (lse, &part_lse) in lse.iter_mut().zip(part_lse) {
                *lse = shares(*lse, part_lse)[2];
            }
        }
    }

    /// What either has of the whole, and the logarithm of that.
    fn shares(lse: f32, part_lse: f32) -> [f32; 3] {
        let top = lse.max(part_lse);
        let [a, b] = [exp(lse - top), exp(part_lse - top)];
        let sum = a + b;
        [a / sum, b / sum, top + sum.ln()]
    }

    vectorized! {
        fn mix(a: f32, o: &mut [f32], b: f32, part: &[f32]) {
            for (o, &part) in o.iter_mut().zip(part) {
                *o = a * *o + b * part;
            }
        }
    }
}

mod cuda {
    //! The launch.

    use moefold_profiles::Dtype;

    use super::Sizes;
    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::operand::vector;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("merge");
    const THREADS: u32 = 256;
    /// A warp has a head of a token.
    const ROWS_PER_BLOCK: usize = THREADS as usize / 32;

    fn program(dtype: Dtype, vector: usize) -> Program {
        SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
    }

    /// Every specialization.
    pub(crate) fn programs() -> Vec<Listed> {
        [
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 1, Needs::Odd),
            (Dtype::F32, 1, Needs::Odd),
        ]
        .map(|(dtype, vector, needs)| Listed {
            program: program(dtype, vector),
            needs,
            entries: vec![Entry::plain("merge", 48, 0)],
        })
        .into()
    }

    pub(super) fn merge(
        gpu: &Cuda,
        op: &'static str,
        s: Sizes,
        [part, part_lse]: [&Tensor; 2],
        [o, lse]: [&Tensor; 2],
    ) {
        disjoint(op, &[part, part_lse], &[o, lse]);
        o.expect_dtype(op, part.dtype());
        for statistic in [part_lse, lse] {
            statistic.expect_dtype(op, Dtype::F32);
        }
        let (rows, vector) = (s.tokens * s.heads, vector(&[part, o]));
        let mut arguments: Vec<Arg> = [part, part_lse, o, lse].map(Arg::from).to_vec();
        let sizes = [rows, s.heads, s.width / vector, s.tokens, s.all, s.at];
        arguments.extend(sizes.map(Arg::size));
        gpu.launch(
            op,
            &program(part.dtype(), vector),
            "merge",
            Grid::linear(rows.div_ceil(ROWS_PER_BLOCK), THREADS, 0),
            &arguments,
        );
    }
}
