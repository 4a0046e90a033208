//! RMSNorm with its weight.

use moefold_kernels::{Tensor, rms_norm};
use moefold_profiles::trace::Category;

use crate::rank::Context;
use crate::store::Weight;

/// A norm over the last dimension.
#[derive(Debug)]
pub struct Norm {
    weight: Weight,
    eps: f32,
    category: Category,
}

/// What a norm gives; backward needs `rstd`.
#[derive(Debug)]
pub struct Normed {
    /// `y [rows, d]`.
    pub output: Tensor,
    /// Reciprocal root mean squares `[rows]`.
    pub rstd: Tensor,
}

impl Norm {
    /// A norm whose time counts as `category`.
    pub fn new(weight: Weight, eps: f64, category: Category) -> Self {
        Self {
            weight,
            eps: eps as f32,
            category,
        }
    }

    /// `x [rows, d] -> y [rows, d]`; backward needs `x` too.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> Normed {
        let (output, rstd) = cx.op(self.category, || {
            rms_norm::forward(x, &self.weight.value, self.eps)
        });
        Normed { output, rstd }
    }

    /// `dy -> dx`; adds to the weight's gradient.
    pub fn backward(&self, cx: &Context, dy: &Tensor, x: &Tensor, rstd: &Tensor) -> Tensor {
        cx.op(self.category, || {
            rms_norm::backward(dy, x, &self.weight.value, rstd, &self.weight.grad)
        })
    }
}
