//! Sums, scalings, fills and copies of whole tensors.
//!
//! Shapes must be equal in number of elements; dims may differ. "Into" is named by the parameter
//! `dst`, and what is written has its dtype; of two operands either may be the narrower.
//!
//! A device implementation: one elementwise launch each, arithmetic in f32 and rounded once. A sum
//! to the host adds in f64; a device may add in another fixed order than the CPU's.

use moefold_profiles::{Dtype, Op, SweepKind};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::Tensor;
use crate::total::{Of, total};

pub(crate) use cuda::programs;

/// The cost-table key of an elementwise op on `x`.
pub fn key(x: &Tensor) -> Op {
    Op::Add {
        len: x.len() as u64,
        dtype: x.dtype(),
    }
}

/// The cost-table key of a pass over `x` that is not a sum of tensors.
pub(crate) fn sweep(kind: SweepKind, x: &Tensor) -> Op {
    Op::Sweep {
        kind,
        len: x.len() as u64,
        dtype: x.dtype(),
    }
}

/// `a + b`, new, with the dims and the dtype of `a`.
///
/// # Panics
/// When the lengths differ.
pub fn add(a: &Tensor, b: &Tensor) -> Tensor {
    let _op = a.device().begin(|| key(a));
    expect_len("add", a, b);
    let sum = a
        .device()
        .empty(TensorClass::Activations, a.dtype(), a.dims());
    match &a.device().0.backend {
        Backend::Cpu(cpu) => with("add", [a, b], [&sum], |[a, b], [sum]| {
            let (a, b) = (a.f32(), b.f32());
            cpu.rows(a.len(), 3 * a.len(), [(sum.f32(), 1)], |range, [sum]| {
                cpu::add(&a[range.clone()], &b[range], sum);
            });
        }),
        Backend::Cuda(gpu) => cuda::add(gpu, a, b, &sum),
    }
    sum
}

/// `dst += x`.
///
/// # Panics
/// When the lengths differ.
pub fn add_into(dst: &Tensor, x: &Tensor) {
    axpy(1.0, x, dst);
}

/// `dst += factor * x`.
///
/// # Panics
/// When the lengths differ.
pub fn axpy(factor: f32, x: &Tensor, dst: &Tensor) {
    let _op = x.device().begin(|| key(dst));
    expect_len("axpy", dst, x);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with("axpy", [x], [dst], |[x], [dst]| {
            let x = x.f32();
            cpu.rows(x.len(), 3 * x.len(), [(dst.f32(), 1)], |range, [dst]| {
                cpu::axpy(factor, &x[range], dst);
            });
        }),
        Backend::Cuda(gpu) => cuda::axpy(gpu, factor, x, dst),
    }
}

/// `dst *= factor`.
pub fn scale(dst: &Tensor, factor: f32) {
    let _op = dst.device().begin(|| sweep(SweepKind::Scale, dst));
    match &dst.device().0.backend {
        Backend::Cpu(cpu) => with("scale", [], [dst], |[], [dst]| {
            let dst = dst.f32();
            cpu.rows(dst.len(), 2 * dst.len(), [(dst, 1)], |_, [dst]| {
                cpu::scale(dst, factor);
            });
        }),
        Backend::Cuda(gpu) => cuda::scale(gpu, dst, factor),
    }
}

/// Sets every element.
pub fn fill(dst: &Tensor, value: f32) {
    let _op = dst.device().begin(|| sweep(SweepKind::Fill, dst));
    match &dst.device().0.backend {
        Backend::Cpu(cpu) => with("fill", [], [dst], |[], [dst]| {
            let dst = dst.f32();
            cpu.rows(dst.len(), dst.len(), [(dst, 1)], |_, [dst]| dst.fill(value));
        }),
        Backend::Cuda(gpu) => cuda::fill(gpu, dst, value),
    }
}

/// `dst = x`, converting where the dtypes of a device's floats differ. Nothing happens where both
/// are the same memory.
///
/// # Panics
/// When the lengths differ, or one is of integers and the other is not.
pub fn copy(x: &Tensor, dst: &Tensor) {
    expect_len("copy", dst, x);
    let integers = |t: &Tensor| t.dtype() == Dtype::I32;
    assert!(
        integers(x) == integers(dst),
        "copy: {x:?} into {dst:?}, expected both of integers or neither"
    );
    if x.same_memory(dst) {
        return;
    }
    let _op = x.device().begin(|| sweep(SweepKind::Copy, x));
    match &x.device().0.backend {
        Backend::Cpu(_) => with("copy", [x], [dst], |[x], [dst]| {
            dst.words().copy_from_slice(x.words());
        }),
        Backend::Cuda(gpu) => cuda::copy(gpu, x, dst),
    }
}

/// A copy of `x` in memory of its own.
pub fn duplicate(x: &Tensor, class: TensorClass) -> Tensor {
    let y = x.device().empty(class, x.dtype(), x.dims());
    copy(x, &y);
    y
}

/// Sum of all elements, in f64, to the host: in order on the CPU, in a fixed order elsewhere.
pub fn sum(x: &Tensor) -> f64 {
    let _op = x.device().begin(|| sweep(SweepKind::Sum, x));
    match &x.device().0.backend {
        Backend::Cpu(_) => with("sum", [x], [], |[x], []| {
            x.f32().iter().map(|&x| f64::from(x)).sum()
        }),
        Backend::Cuda(gpu) => total(gpu, "elementwise::sum", x, Of::Values),
    }
}

#[track_caller]
fn expect_len(op: &str, dst: &Tensor, x: &Tensor) {
    assert!(
        dst.len() == x.len(),
        "{op}: {x:?} with {dst:?}, expected as many elements"
    );
}

mod cpu {
    use crate::simd::vectorized;

    vectorized! {
        pub(super) fn add(a: &[f32], b: &[f32], sum: &mut [f32]) {
            for ((sum, &a), &b) in sum.iter_mut().zip(a).zip(b) {
                *sum = a + b;
            }
        }
    }

    vectorized! {
        pub(super) fn axpy(factor: f32, x: &[f32], dst: &mut [f32]) {
            for (dst, &x) in dst.iter_mut().zip(x) {
                *dst += factor * x;
            }
        }
    }

    vectorized! {
        pub(super) fn scale(dst: &mut [f32], factor: f32) {
            for dst in dst {
                *dst *= factor;
            }
        }
    }
}

mod cuda {
    //! The launches.

    use moefold_profiles::Dtype;

    use crate::buffer::disjoint;
    use crate::cuda::Cuda;
    use crate::cuda::flat::Flat;
    use crate::cuda::program::{Arg, Define, Entry, Listed, Needs, Program, Source, source};
    use crate::tensor::Tensor;

    const SOURCE: Source = source!("elementwise");

    /// Pieces that a thread takes (`DEPTH` in the source).
    const DEPTH: usize = 4;

    fn program(from: Dtype, to: Dtype, piece: Define) -> Program {
        SOURCE.with(&[Define::dtype("FROM", from), Define::dtype("TO", to), piece])
    }

    pub(super) fn add(gpu: &Cuda, a: &Tensor, b: &Tensor, sum: &Tensor) {
        disjoint("add", &[a, b], &[sum]);
        let flat = Flat::of(&[a, b, sum]);
        gpu.launch(
            "elementwise::add",
            &program(b.dtype(), sum.dtype(), flat.define()),
            "elementwise_add",
            flat.grid(DEPTH),
            &[a.into(), b.into(), sum.into(), flat.len(), flat.head()],
        );
    }

    pub(super) fn axpy(gpu: &Cuda, factor: f32, x: &Tensor, dst: &Tensor) {
        disjoint("axpy", &[x], &[dst]);
        let flat = Flat::of(&[x, dst]);
        gpu.launch(
            "elementwise::axpy",
            &program(x.dtype(), dst.dtype(), flat.define()),
            "elementwise_axpy",
            flat.grid(DEPTH),
            &[
                Arg::F32(factor),
                x.into(),
                dst.into(),
                flat.len(),
                flat.head(),
            ],
        );
    }

    pub(super) fn scale(gpu: &Cuda, dst: &Tensor, factor: f32) {
        let flat = Flat::of(&[dst]);
        gpu.launch(
            "elementwise::scale",
            &program(dst.dtype(), dst.dtype(), flat.define()),
            "elementwise_scale",
            flat.grid(DEPTH),
            &[dst.into(), Arg::F32(factor), flat.len(), flat.head()],
        );
    }

    pub(super) fn fill(gpu: &Cuda, dst: &Tensor, value: f32) {
        if value.to_bits() == 0 {
            return dst.fill_zero();
        }
        let flat = Flat::of(&[dst]);
        gpu.launch(
            "elementwise::fill",
            &program(dst.dtype(), dst.dtype(), flat.define()),
            "elementwise_fill",
            flat.grid(DEPTH),
            &[dst.into(), Arg::F32(value), flat.len(), flat.head()],
        );
    }

    pub(super) fn copy(gpu: &Cuda, x: &Tensor, dst: &Tensor) {
        disjoint("copy", &[x], &[dst]);
        if x.is_empty() {
            return;
        }
        if x.dtype() == dst.dtype() {
            return gpu.copy("elementwise::copy", x, dst);
        }
        let flat = Flat::of(&[x, dst]);
        gpu.launch(
            "elementwise::copy",
            &program(x.dtype(), dst.dtype(), flat.define()),
            "elementwise_convert",
            flat.grid(DEPTH),
            &[x.into(), dst.into(), flat.len(), flat.head()],
        );
    }

    /// What is launched, with its limits: for operands at the same place in 16 bytes.
    pub(crate) fn programs() -> Vec<Listed> {
        const NAMES: [&str; 5] = [
            "elementwise_add",
            "elementwise_axpy",
            "elementwise_scale",
            "elementwise_fill",
            "elementwise_convert",
        ];
        let mut programs = Vec::new();
        for from in [Dtype::F32, Dtype::Bf16] {
            for to in [Dtype::F32, Dtype::Bf16] {
                let narrow = (from, to) == (Dtype::Bf16, Dtype::Bf16);
                let wide = if narrow { 8 } else { 4 };
                for (piece, needs) in [(wide, Needs::Sm80), (1, Needs::Odd)] {
                    programs.push(Listed {
                        program: program(from, to, Define::int("PIECE", piece)),
                        needs,
                        entries: NAMES.map(|name| Entry::plain(name, 64, 0)).to_vec(),
                    });
                }
            }
        }
        programs
    }
}
