//! Sums, scalings, fills and copies of whole tensors.
//!
//! Shapes must be equal in number of elements; dims may differ. "Into" is named by the parameter
//! `dst`. A device implementation: one elementwise launch each.

use moefold_profiles::{Dtype, Op};

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::tensor::Tensor;

/// The cost-table key of an elementwise op on `x`.
pub fn key(x: &Tensor) -> Op {
    Op::Add {
        len: x.len() as u64,
        dtype: x.dtype(),
    }
}

/// `a + b`, new, with the dims of `a`.
///
/// # Panics
/// When the lengths differ.
pub fn add(a: &Tensor, b: &Tensor) -> Tensor {
    expect_len("add", a, b);
    let sum = a
        .device()
        .empty(TensorClass::Activations, Dtype::F32, a.dims());
    match &a.device().0.backend {
        Backend::Cpu(cpu) => with("add", [a, b], [&sum], |[a, b], [sum]| {
            let (a, b) = (a.f32(), b.f32());
            cpu.rows(a.len(), 3 * a.len(), [(sum.f32(), 1)], |range, [sum]| {
                cpu::add(&a[range.clone()], &b[range], sum);
            });
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::add"),
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
    expect_len("axpy", dst, x);
    match &x.device().0.backend {
        Backend::Cpu(cpu) => with("axpy", [x], [dst], |[x], [dst]| {
            let x = x.f32();
            cpu.rows(x.len(), 3 * x.len(), [(dst.f32(), 1)], |range, [dst]| {
                cpu::axpy(factor, &x[range], dst);
            });
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::axpy"),
    }
}

/// `dst *= factor`.
pub fn scale(dst: &Tensor, factor: f32) {
    match &dst.device().0.backend {
        Backend::Cpu(cpu) => with("scale", [], [dst], |[], [dst]| {
            let dst = dst.f32();
            cpu.rows(dst.len(), 2 * dst.len(), [(dst, 1)], |_, [dst]| {
                cpu::scale(dst, factor);
            });
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::scale"),
    }
}

/// Sets every element.
pub fn fill(dst: &Tensor, value: f32) {
    match &dst.device().0.backend {
        Backend::Cpu(cpu) => with("fill", [], [dst], |[], [dst]| {
            let dst = dst.f32();
            cpu.rows(dst.len(), dst.len(), [(dst, 1)], |_, [dst]| dst.fill(value));
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::fill"),
    }
}

/// `dst = x`, converting where the dtypes of a device's floats differ. Nothing happens where both
/// are the same memory.
///
/// # Panics
/// When the lengths differ, or one is of integers and the other is not.
pub fn copy(x: &Tensor, dst: &Tensor) {
    expect_len("copy", dst, x);
    assert!(x.dtype() == dst.dtype(), "copy: {x:?} into {dst:?}");
    if x.same_memory(dst) {
        return;
    }
    match &x.device().0.backend {
        Backend::Cpu(_) => with("copy", [x], [dst], |[x], [dst]| {
            dst.words().copy_from_slice(x.words());
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::copy"),
    }
}

/// A copy of `x` in memory of its own.
pub fn duplicate(x: &Tensor, class: TensorClass) -> Tensor {
    let y = x.device().empty(class, x.dtype(), x.dims());
    copy(x, &y);
    y
}

/// Sum of all elements, in f64 in order, to the host.
pub fn sum(x: &Tensor) -> f64 {
    match &x.device().0.backend {
        Backend::Cpu(_) => with("sum", [x], [], |[x], []| {
            x.f32().iter().map(|&x| f64::from(x)).sum()
        }),
        Backend::Cuda(gpu) => gpu.unwritten("elementwise::sum"),
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

#[cfg(test)]
mod tests;
