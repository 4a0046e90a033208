//! A bias of every expert on rows sorted by expert: `y[rows of e] += p b_e`, optionally times a routing
//! probability `p` a row (GPT-OSS, arXiv 2508.10925: biases of both products of its experts).
//!
//! Where the probability is multiplied into the activation before the second product, the bias of that
//! product takes it here. Backward: `db_e += sum of p dy` over the rows of `e`, and `dp = dy . b_e`. Rows
//! and offsets are those of [`crate::grouped_gemm`]; experts without rows get no gradient.
//!
//! A device implementation: sums over rows in a fixed order, arithmetic in f32. The floor: forward reads
//! and writes y, each gradient reads dy.

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::sweep;
use crate::grouped_gemm::Rows;
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key of biases added to `y`.
pub fn key(y: &Tensor) -> Op {
    sweep(SweepKind::ExpertBias, y)
}

/// `y [N, w] += p [N] * bias [E, w]`, of each row its expert's.
///
/// # Panics
/// When the shapes or counts do not agree.
pub fn add(y: &Tensor, bias: &Tensor, probs: Option<&Tensor>, rows: Rows<'_>) {
    const OP: &str = "expert_bias::add";
    let _op = y.device().begin(|| key(y));
    check(OP, y, bias, probs, rows);
    match &y.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            match probs {
                Some(probs) => with(OP, [bias, probs], [y], |[bias, probs], [y]| {
                    cpu::add(cpu, y.f32(), bias.f32(), Some(probs.f32()), &counts);
                }),
                None => with(OP, [bias], [y], |[bias], [y]| {
                    cpu::add(cpu, y.f32(), bias.f32(), None, &counts);
                }),
            }
        }
        Backend::Cuda(gpu) => cuda::add(gpu, y, bias, probs, &rows.offsets(y.device())),
    }
}

/// `dbias [E, w] += p [N] * dy [N, w]`, summed over the rows of each expert.
///
/// # Panics
/// As [`add`].
pub fn grad(dy: &Tensor, probs: Option<&Tensor>, rows: Rows<'_>, dbias: &Tensor) {
    const OP: &str = "expert_bias::grad";
    let _op = dy.device().begin(|| sweep(SweepKind::Sum, dy));
    check(OP, dy, dbias, probs, rows);
    match &dy.device().0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            match probs {
                Some(probs) => with(OP, [dy, probs], [dbias], |[dy, probs], [dbias]| {
                    cpu::grad(cpu, dy.f32(), Some(probs.f32()), &counts, dbias.f32());
                }),
                None => with(OP, [dy], [dbias], |[dy], [dbias]| {
                    cpu::grad(cpu, dy.f32(), None, &counts, dbias.f32());
                }),
            }
        }
        Backend::Cuda(gpu) => cuda::grad(gpu, dy, probs, &rows.offsets(dy.device()), dbias),
    }
}

/// `dprobs [N] = dy [N, w] . bias [E, w]`, of each row its expert's.
///
/// # Panics
/// As [`add`].
pub fn grad_probs(dy: &Tensor, bias: &Tensor, rows: Rows<'_>) -> Tensor {
    const OP: &str = "expert_bias::grad_probs";
    let _op = dy.device().begin(|| sweep(SweepKind::Sum, dy));
    check(OP, dy, bias, None, rows);
    let device = dy.device();
    let dprobs = device.empty(TensorClass::Activations, Dtype::F32, &[dy.num_rows()]);
    match &device.0.backend {
        Backend::Cpu(cpu) => {
            let counts = rows.counts();
            with(OP, [dy, bias], [&dprobs], |[dy, bias], [dprobs]| {
                cpu::grad_probs(cpu, dy.f32(), bias.f32(), &counts, dprobs.f32());
            });
        }
        Backend::Cuda(gpu) => cuda::grad_probs(gpu, dy, bias, &rows.offsets(device), &dprobs),
    }
    dprobs
}

fn check(op: &'static str, rows: &Tensor, bias: &Tensor, probs: Option<&Tensor>, of: Rows<'_>) {
    let (&[num_rows, width], &[experts, _]) = (rows.dims(), bias.dims()) else {
        panic!("{op}: rows are {rows:?} and biases {bias:?}, expected two dims each")
    };
    expect_dims(op, "biases", bias, &[experts, width]);
    of.expect(op, experts, rows);
    if let Some(probs) = probs {
        expect_dims(op, "probabilities", probs, &[num_rows]);
    }
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::{sum2, vectorized};

    /// The expert of every row.
    fn experts(counts: &[usize]) -> Vec<usize> {
        let of = |(expert, &count): (usize, &usize)| std::iter::repeat_n(expert, count);
        counts.iter().enumerate().flat_map(of).collect()
    }

    pub(super) fn add(
        cpu: &Cpu,
        y: &mut [f32],
        bias: &[f32],
        probs: Option<&[f32]>,
        counts: &[usize],
    ) {
        let (experts, width) = (experts(counts), bias.len() / counts.len().max(1));
        let (rows, work) = (experts.len(), 2 * y.len());
        cpu.rows(
            rows,
            work,
            [(&mut y[..rows * width], width)],
            |range, [y]| {
                for (row, y) in range.zip(y.chunks_exact_mut(width.max(1))) {
                    let prob = probs.map_or(1.0, |probs| probs[row]);
                    add_row(y, &bias[experts[row] * width..][..width], prob);
                }
            },
        );
    }

    vectorized! {
        fn add_row(y: &mut [f32], bias: &[f32], prob: f32) {
            for (y, bias) in y.iter_mut().zip(bias) {
                *y += prob * bias;
            }
        }
    }

    /// Experts are dealt to threads, so that each sums its rows in order.
    pub(super) fn grad(
        cpu: &Cpu,
        dy: &[f32],
        probs: Option<&[f32]>,
        counts: &[usize],
        dbias: &mut [f32],
    ) {
        let width = dbias.len() / counts.len().max(1);
        let mut starts = vec![0];
        starts.extend(counts.iter().scan(0, |end, count| {
            *end += count;
            Some(*end)
        }));
        let work = dy.len();
        cpu.rows(counts.len(), work, [(dbias, width)], |range, [dbias]| {
            let mut sum = vec![0.0; width];
            for (expert, dbias) in range.zip(dbias.chunks_exact_mut(width.max(1))) {
                sum.fill(0.0);
                for row in starts[expert]..starts[expert + 1] {
                    let prob = probs.map_or(1.0, |probs| probs[row]);
                    add_row(&mut sum, &dy[row * width..][..width], prob);
                }
                add_row(dbias, &sum, 1.0);
            }
        });
    }

    pub(super) fn grad_probs(
        cpu: &Cpu,
        dy: &[f32],
        bias: &[f32],
        counts: &[usize],
        dprobs: &mut [f32],
    ) {
        let (experts, width) = (experts(counts), bias.len() / counts.len().max(1));
        let (rows, work) = (experts.len(), dy.len());
        cpu.rows(rows, work, [(&mut dprobs[..rows], 1)], |range, [dprobs]| {
            for (row, dprob) in range.zip(dprobs) {
                let bias = &bias[experts[row] * width..][..width];
                *dprob = inner(&dy[row * width..][..width], bias);
            }
        });
    }

    vectorized! {
        fn inner(dy: &[f32], bias: &[f32]) -> f32 {
            sum2(dy, bias, |dy, bias| dy * bias)
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::operand::vector;
    use crate::cuda::program::{Arg, Define, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("expert_bias");
    const THREADS: u32 = 256;
    /// A warp has a row.
    const ROWS_PER_BLOCK: usize = THREADS as usize / 32;

    fn program(dtype: Dtype, vector: usize) -> Program {
        SOURCE.with(&[Define::dtype("T", dtype), Define::int("VEC", vector)])
    }

    /// Bytes of the sums of a block's warps.
    fn shared(vector: usize) -> usize {
        4 * THREADS as usize * vector
    }

    /// Every specialization.
    pub(crate) fn programs() -> Vec<Listed> {
        let list = |(dtype, vector, needs)| Listed {
            program: program(dtype, vector),
            needs,
            entries: vec![
                Entry::plain("expert_bias_add", 64, 0),
                Entry::plain("expert_bias_sums", 64, shared(vector)),
                Entry::plain("expert_bias_probs", 64, 0),
            ],
        };
        let all = [
            (Dtype::Bf16, 8, Needs::Sm80),
            (Dtype::F32, 4, Needs::Sm80),
            (Dtype::Bf16, 1, Needs::Odd),
            (Dtype::F32, 1, Needs::Odd),
        ];
        all.map(list).to_vec()
    }

    /// Rows, accesses of a row, experts.
    fn sizes(x: &Tensor, vector: usize, offsets: &Tensor) -> [Arg; 3] {
        [x.num_rows(), x.width() / vector, offsets.len() - 1].map(Arg::size)
    }

    /// One warp a row.
    fn by_rows(x: &Tensor) -> Grid {
        Grid::linear(x.num_rows().div_ceil(ROWS_PER_BLOCK), THREADS, 0)
    }

    pub(super) fn add(
        gpu: &Cuda,
        y: &Tensor,
        bias: &Tensor,
        probs: Option<&Tensor>,
        offsets: &Tensor,
    ) {
        const OP: &str = "expert_bias::add";
        bias.expect_dtype(OP, y.dtype());
        let reads: Vec<&Tensor> = [bias, offsets].into_iter().chain(probs).collect();
        disjoint(OP, &reads, &[y]);
        let vector = vector(&[y, bias]);
        let tensors = [y.into(), bias.into(), Arg::optional(probs), offsets.into()];
        let arguments = [&tensors[..], &sizes(y, vector, offsets)].concat();
        let program = program(y.dtype(), vector);
        gpu.launch(OP, &program, "expert_bias_add", by_rows(y), &arguments);
    }

    pub(super) fn grad(
        gpu: &Cuda,
        dy: &Tensor,
        probs: Option<&Tensor>,
        offsets: &Tensor,
        dbias: &Tensor,
    ) {
        const OP: &str = "expert_bias::grad";
        dbias.expect_dtype(OP, Dtype::F32);
        let reads: Vec<&Tensor> = [dy, offsets].into_iter().chain(probs).collect();
        disjoint(OP, &reads, &[dbias]);
        let vector = vector(&[dy]);
        let (experts, width) = (offsets.len() - 1, dy.width());
        let tensors = [
            dy.into(),
            Arg::optional(probs),
            offsets.into(),
            dbias.into(),
        ];
        let arguments = [&tensors[..], &[Arg::size(width / vector)]].concat();
        let grid = Grid {
            blocks: [width.div_ceil(32 * vector) as u32, experts as u32, 1],
            threads: THREADS,
            shared: shared(vector) as u32,
        };
        let program = program(dy.dtype(), vector);
        gpu.launch(OP, &program, "expert_bias_sums", grid, &arguments);
    }

    pub(super) fn grad_probs(
        gpu: &Cuda,
        dy: &Tensor,
        bias: &Tensor,
        offsets: &Tensor,
        dprobs: &Tensor,
    ) {
        const OP: &str = "expert_bias::grad_probs";
        bias.expect_dtype(OP, dy.dtype());
        disjoint(OP, &[dy, bias, offsets], &[dprobs]);
        let vector = vector(&[dy, bias]);
        let tensors = [dy, bias, offsets, dprobs].map(Arg::from);
        let arguments = [&tensors[..], &sizes(dy, vector, offsets)].concat();
        let program = program(dy.dtype(), vector);
        gpu.launch(OP, &program, "expert_bias_probs", by_rows(dy), &arguments);
    }
}
