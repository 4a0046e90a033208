//! Sums of squares for the gradient norm, in f64 on the host ([`crate::scalars`] keeps them on the device).
//!
//! A device implementation: partial sums of fixed blocks, then the blocks in order; the result comes
//! to the host (see `total.rs`).

use moefold_profiles::Op;

use crate::buffer::with;
use crate::device::Backend;
use crate::tensor::Tensor;
use crate::total::{Of, total};

/// The cost-table key for `x`.
pub fn key(x: &Tensor) -> Op {
    Op::GradNorm {
        len: x.len() as u64,
    }
}

/// Sum of the squares of all elements, f32 or bf16. Does not depend on the number of threads.
pub fn sum_squares(x: &Tensor) -> f64 {
    let _op = x.device().begin(|| key(x));
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with("grad_norm", [x], [], |[x], []| {
            cpu::sum_squares(cpu, x.f32())
        }),
        Backend::Cuda(gpu) => total(gpu, "grad_norm::sum_squares", x, Of::Squares),
    }
}

mod cpu {
    use crate::parallel::Cpu;
    use crate::simd::vectorized;

    /// Elements of a block.
    const BLOCK: usize = 1 << 14;

    pub(super) fn sum_squares(cpu: &Cpu, x: &[f32]) -> f64 {
        let mut partial = vec![0.0; x.len().div_ceil(BLOCK)];
        let parts = cpu.threads() * 4;
        let size = partial.len().div_ceil(parts).max(1);
        let tasks = x
            .chunks(size * BLOCK)
            .zip(partial.chunks_mut(size))
            .collect::<Vec<_>>();
        cpu.tasks(tasks, |(x, partial)| {
            for (x, partial) in x.chunks(BLOCK).zip(partial) {
                *partial = block(x);
            }
        });
        partial.iter().sum()
    }

    vectorized! {
        fn block(x: &[f32]) -> f64 {
            let mut lanes = [0.0f64; 16];
            let (chunks, tail) = x.as_chunks::<16>();
            for x in chunks {
                for i in 0..16 {
                    lanes[i] += f64::from(x[i]) * f64::from(x[i]);
                }
            }
            for (lane, &x) in lanes.iter_mut().zip(tail) {
                *lane += f64::from(x) * f64::from(x);
            }
            lanes.iter().sum()
        }
    }
}
