//! The router z-loss: the mean over tokens of the square of `z = log sum over experts of e^logit`, which
//! keeps logits small (ST-MoE, arXiv 2202.08906, equation 5).
//!
//! [`forward`] gives `z`, whose squares a caller sums up as it likes; the gradient of `factor` times that
//! sum is `2 factor z softmax(logits)`.
//!
//! A device implementation: one pass over each row, in f32. The floor: forward reads `4 T E` bytes,
//! backward reads twice that and writes it once.

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise::{self, sweep};
use crate::tensor::{Tensor, expect_dims};

pub(crate) use cuda::programs;

/// The cost-table key of [`forward`].
pub fn key(logits: &Tensor) -> Op {
    sweep(SweepKind::SumExp, logits)
}

/// `logits [T, E]` f32 to `z [T]` f32.
///
/// # Panics
/// When `logits` is no matrix.
pub fn forward(logits: &Tensor) -> Tensor {
    const OP: &str = "z_loss::forward";
    let _op = logits.device().begin(|| key(logits));
    let &[tokens, experts] = logits.dims() else {
        panic!("{OP}: logits is {logits:?}, expected [tokens, experts]")
    };
    let device = logits.device();
    let z = device.empty(TensorClass::Activations, Dtype::F32, &[tokens]);
    match &device.0.backend {
        Backend::Cpu(_) => with(OP, [logits], [&z], |[logits], [z]| {
            cpu::forward(logits.f32(), z.f32(), experts);
        }),
        Backend::Cuda(gpu) => cuda::forward(gpu, logits, &z),
    }
    z
}

/// Adds the gradient of `factor` times the sum of the squares of `z [T]` to `dlogits [T, E]`.
///
/// # Panics
/// When the shapes do not agree.
pub fn backward(logits: &Tensor, z: &Tensor, factor: f32, dlogits: &Tensor) {
    const OP: &str = "z_loss::backward";
    let _op = logits.device().begin(|| elementwise::key(dlogits));
    expect_dims(OP, "z", z, &[logits.num_rows()]);
    expect_dims(OP, "dlogits", dlogits, logits.dims());
    match &logits.device().0.backend {
        Backend::Cpu(_) => with(OP, [logits, z], [dlogits], |[logits, z], [dlogits]| {
            cpu::backward(logits.f32(), z.f32(), factor, dlogits.f32());
        }),
        Backend::Cuda(gpu) => cuda::backward(gpu, logits, z, factor, dlogits),
    }
}

mod cpu {
    use crate::simd::{exp, max, sum, vectorized};

    vectorized! {
        fn all(logits: &[f32], z: &mut [f32], experts: usize) {
            for (z, row) in z.iter_mut().zip(logits.chunks_exact(experts)) {
                let top = max(row);
                *z = top + sum(row, |x| exp(x - top)).ln();
            }
        }
    }

    pub(super) fn forward(logits: &[f32], z: &mut [f32], experts: usize) {
        all(logits, z, experts);
    }

    pub(super) fn backward(logits: &[f32], z: &[f32], factor: f32, dlogits: &mut [f32]) {
        let experts = logits.len() / z.len().max(1);
        let rows = logits.chunks(experts.max(1));
        let rows = rows.zip(dlogits.chunks_mut(experts.max(1)));
        for (&z, (logits, dlogits)) in z.iter().zip(rows) {
            for (d, &x) in dlogits.iter_mut().zip(logits) {
                *d += 2.0 * factor * z * exp(x - z);
            }
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::program::{Arg, Entry, Grid, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("z_loss");
    const THREADS: u32 = 256;
    /// A warp has a token.
    const TOKENS_PER_BLOCK: usize = THREADS as usize / 32;

    fn program() -> Program {
        SOURCE.with(&[])
    }

    /// What is launched, with its limits.
    pub(crate) fn programs() -> Vec<Listed> {
        vec![Listed {
            program: program(),
            needs: Needs::Sm80,
            entries: vec![
                Entry::plain("z_loss_forward", 48, 0),
                Entry::plain("z_loss_backward", 48, 0),
            ],
        }]
    }

    fn dealt(logits: &Tensor) -> (Grid, [Arg; 2]) {
        let (tokens, experts) = (logits.num_rows(), logits.width());
        let grid = Grid::linear(tokens.div_ceil(TOKENS_PER_BLOCK), THREADS, 0);
        (grid, [Arg::size(tokens), Arg::size(experts)])
    }

    pub(super) fn forward(gpu: &Cuda, logits: &Tensor, z: &Tensor) {
        const OP: &str = "z_loss::forward";
        disjoint(OP, &[logits], &[z]);
        logits.expect_dtype(OP, Dtype::F32);
        let (grid, sizes) = dealt(logits);
        let arguments = [&[logits.into(), z.into()][..], &sizes].concat();
        gpu.launch(OP, &program(), "z_loss_forward", grid, &arguments);
    }

    pub(super) fn backward(gpu: &Cuda, logits: &Tensor, z: &Tensor, factor: f32, dlogits: &Tensor) {
        const OP: &str = "z_loss::backward";
        disjoint(OP, &[logits, z], &[dlogits]);
        logits.expect_dtype(OP, Dtype::F32);
        let (grid, sizes) = dealt(logits);
        let tensors = [logits.into(), z.into(), Arg::F32(factor), dlogits.into()];
        let arguments = [&tensors[..], &sizes].concat();
        gpu.launch(OP, &program(), "z_loss_backward", grid, &arguments);
    }
}
