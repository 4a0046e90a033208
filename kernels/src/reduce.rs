//! What collectives between ranks of one device are made of: ordered sums, maxima, and copies of many ranges.
//!
//! A sum is taken in the order of its sources, in f32 whatever is stored, so that every rank that sums the
//! same parts gets the same bits, and gets them again. Storage may differ between what is read and what is
//! written (bf16 gradients summed into f32 ones); converting is to nearest, ties to even.
//!
//! A device implementation: one launch, every source read once and the result written once, which is the
//! floor in bytes: `R` reads and a write an element, or one and one of a copy. A GPU moves 16 bytes of the
//! wider type at a time where all addresses and lengths allow.

use moefold_profiles::Op;

use crate::buffer::with;
use crate::device::{Backend, TensorClass};
use crate::elementwise;
use crate::tensor::Tensor;

/// `dst = srcs[0] + srcs[1] + ..`, in that order. `dst` may be one of the sources.
///
/// # Panics
/// When there is no source, or one has another length than dst.
pub fn sum_ordered(srcs: &[&Tensor], dst: &Tensor) {
    let _op = dst.device().begin(|| Op::Add {
        len: (dst.len() * srcs.len().saturating_sub(1)) as u64,
        dtype: dst.dtype(),
    });
    reduce(How::Sum, srcs, dst);
}

/// `dst = max(srcs[0], srcs[1], ..)`, element by element; the number where the other is NaN. `dst` may be
/// one of the sources.
///
/// # Panics
/// When there is no source, or one has another length than dst.
pub fn maximum(srcs: &[&Tensor], dst: &Tensor) {
    reduce(How::Max, srcs, dst);
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Sum,
    Max,
}

impl How {
    fn op(self) -> &'static str {
        match self {
            Self::Sum => "reduce::sum_ordered",
            Self::Max => "reduce::maximum",
        }
    }
}

fn reduce(how: How, srcs: &[&Tensor], dst: &Tensor) {
    let op = how.op();
    assert!(!srcs.is_empty(), "{op}: no sources for {dst:?}");
    for src in srcs {
        expect_len(op, src, dst);
    }
    match &dst.device().0.backend {
        Backend::Cpu(cpu) => {
            // The loop below writes `dst` before it has read all sources.
            let own = srcs.iter().find(|src| src.same_memory(dst));
            let own = own.map(|own| elementwise::duplicate(own, TensorClass::Transient));
            for (rank, &src) in srcs.iter().enumerate() {
                let src = match &own {
                    Some(own) if src.same_memory(dst) => own,
                    _ => src,
                };
                with(op, [src], [dst], |[src], [dst]| {
                    let src = src.f32();
                    cpu.rows(
                        src.len(),
                        2 * src.len(),
                        [(dst.f32(), 1)],
                        |range, [dst]| {
                            if rank == 0 {
                                dst.copy_from_slice(&src[range]);
                            } else if how == How::Sum {
                                cpu::add(&src[range], dst);
                            } else {
                                cpu::max(&src[range], dst);
                            }
                        },
                    );
                });
            }
        }
        Backend::Cuda(gpu) => cuda::reduce(gpu, how, srcs, dst),
    }
}

/// Copies the first of each pair over the second, converting where their types differ. All firsts have one
/// type and so have all seconds; no range that is written is any other of the pairs.
///
/// # Panics
/// When the lengths of a pair differ.
pub fn copy_all(pairs: &[(&Tensor, &Tensor)]) {
    const OP: &str = "reduce::copy_all";
    for (src, dst) in pairs {
        expect_len(OP, src, dst);
    }
    let Some((_, first)) = pairs.first() else {
        return;
    };
    match &first.device().0.backend {
        Backend::Cpu(_) => {
            for (src, dst) in pairs {
                with(OP, [src], [dst], |[src], [dst]| {
                    dst.words().copy_from_slice(src.words());
                });
            }
        }
        Backend::Cuda(gpu) => cuda::copy_all(gpu, pairs),
    }
}

#[track_caller]
fn expect_len(op: &str, src: &Tensor, dst: &Tensor) {
    assert!(
        src.len() == dst.len(),
        "{op}: {src:?} into {dst:?}, expected as many elements"
    );
}

mod cpu {
    use crate::simd::vectorized;

    vectorized! {
        pub(super) fn add(src: &[f32], dst: &mut [f32]) {
            for (dst, &src) in dst.iter_mut().zip(src) {
                *dst += src;
            }
        }
    }

    vectorized! {
        pub(super) fn max(src: &[f32], dst: &mut [f32]) {
            for (dst, &src) in dst.iter_mut().zip(src) {
                *dst = dst.max(src);
            }
        }
    }
}

pub(crate) mod cuda;
