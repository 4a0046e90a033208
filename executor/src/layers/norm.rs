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

impl Norm {
    /// A norm whose time counts as `category`.
    pub fn new(weight: Weight, eps: f64, category: Category) -> Self {
        Self {
            weight,
            eps: eps as f32,
            category,
        }
    }

    /// `x [rows, d] -> (y [rows, d], rstd [rows])`; backward needs `x` and `rstd`.
    pub fn forward(&self, cx: &Context, x: &Tensor) -> (Tensor, Tensor) {
        cx.op(self.category, || {
            rms_norm::forward(x, &self.weight.value, self.eps)
        })
    }

    /// `dy -> dx`; adds to the weight's gradient.
    pub fn backward(&self, cx: &Context, dy: &Tensor, x: &Tensor, rstd: &Tensor) -> Tensor {
        cx.op(self.category, || {
            rms_norm::backward(dy, x, &self.weight.value, rstd, &self.weight.grad)
        })
    }
}
