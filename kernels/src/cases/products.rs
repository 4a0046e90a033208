//! Dense products.

use moefold_profiles::{Dtype, Pass};

use super::{Call, Source};
use crate::gemm::{self, Trans};
use crate::tensor::Tensor;

/// The two factors of a linear layer's product `[m, n, k]`: x and w forward, dy and w for dgrad, dy and
/// x for wgrad.
pub(crate) fn factors(source: &mut dyn Source, [m, n, k]: [usize; 3], pass: Pass) -> [Tensor; 2] {
    match pass {
        Pass::Forward => [source.tensor(&[m, k], 1.0), source.tensor(&[n, k], 0.02)],
        Pass::Dgrad | Pass::Backward => [source.tensor(&[m, k], 1.0), source.tensor(&[k, n], 0.02)],
        Pass::Wgrad => [source.tensor(&[k, m], 1.0), source.tensor(&[k, n], 1.0)],
    }
}

/// The product into a tensor that is there; of wgrad the f32 gradient, which is added to. One of f32 on a
/// device of bf16 is a router's, the gradients of whose logits alone are f32.
pub(super) fn product(
    source: &mut dyn Source,
    [m, n, k]: [usize; 3],
    pass: Pass,
    dtype: Dtype,
) -> Call {
    let [mut a, b] = factors(source, [m, n, k], pass);
    if a.dtype() != dtype {
        a = source.statistic(a.dims(), 1.0);
    }
    let c = match pass {
        Pass::Wgrad => source.statistic(&[m, n], 1.0),
        _ => source.tensor(&[m, n], 1.0),
    };
    let (of_a, of_b, added) = match pass {
        Pass::Forward => (Trans::No, Trans::Yes, 0.0),
        Pass::Dgrad | Pass::Backward => (Trans::No, Trans::No, 0.0),
        Pass::Wgrad => (Trans::Yes, Trans::No, 1.0),
    };
    Call::new(move |out| {
        gemm::gemm(&a, of_a, &b, of_b, &c, added);
        out("c", &c);
    })
}
