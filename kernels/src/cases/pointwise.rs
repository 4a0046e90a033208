//! What works on elements: sums, the optimizer.

use moefold_profiles::Dtype;

use super::{Call, Source};
use crate::adamw::{self, Adamw};
use crate::device::{Device, TensorClass};
use crate::elementwise;
use crate::scalars::Scalars;
use crate::tensor::Tensor;

/// Small factors: what is added to over and over stays where it is.
const SMALL: f64 = 1e-6;

/// `b += a / 10^6`.
pub(super) fn sum(source: &mut dyn Source, len: usize) -> Call {
    let (a, b) = (source.tensor(&[len], 1.0), source.tensor(&[len], 1.0));
    Call::new(move |out| {
        elementwise::axpy(SMALL as f32, &a, &b);
        out("sum", &b);
    })
}

/// One shard of the optimizer: weights, a gradient and both moments, of which the second is zero, and the
/// first where it is narrow.
pub(crate) fn shard(source: &mut dyn Source, len: usize, moments: Dtype) -> [Tensor; 4] {
    let [w, g] = [1.0, 0.1].map(|scale| source.statistic(&[len], scale));
    let m = (moments == Dtype::F32).then(|| source.statistic(&[len], 0.1));
    let zeros = || {
        source
            .device()
            .zeros(TensorClass::Transient, moments, &[len])
    };
    [w, g, m.unwrap_or_else(zeros), zeros()]
}

/// Remainders of masters, all zero.
pub(crate) fn rests(device: &Device, len: usize) -> Tensor {
    device.zeros(TensorClass::Transient, Dtype::Bf16, &[len])
}

/// A step of the optimizer. Narrow weights have masters, which the step rounds.
pub(super) fn step(
    source: &mut dyn Source,
    len: usize,
    [dtype, moments]: [Dtype; 2],
    remainders: bool,
) -> Call {
    let [w, g, m, v] = shard(source, len, moments);
    let model = (dtype != Dtype::F32).then(|| source.tensor(&[len], 0.0));
    let w = if remainders {
        rests(source.device(), len)
    } else {
        w
    };
    let rule = Adamw {
        lr: SMALL,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        step: 10,
    };
    Call::new(move |out| {
        adamw::step_into(&w, &g, &m, &v, model.as_ref(), &rule, 1.0);
        out("weights", &w);
    })
}

/// The sum of squares, left on the device.
pub(super) fn squares(source: &mut dyn Source, len: usize) -> Call {
    let x = source.statistic(&[len], 1.0);
    let sum = Scalars::zeros(source.device(), TensorClass::Transient, 1);
    Call::new(move |_| sum.add_squares(0, SMALL, &x))
}
