//! The three products of a linear layer, `y = x Wᵀ` with `W` `[out, in]` as checkpoints store it.

use moefold_kernels::gemm::{self, Trans, gemm, gemm_bias};
use moefold_kernels::{Dtype, Tensor, TensorClass};
use moefold_profiles::trace::Category;

use crate::rank::Context;
use crate::store::Weight;

/// `x [T, in] -> [T, out]`, of the dtype of `x`.
pub fn forward(cx: &Context, category: Category, x: &Tensor, w: &Tensor) -> Tensor {
    forward_biased(cx, category, x, w, None)
}

/// [`forward_biased`] into a tensor of another class or dtype.
pub fn forward_as(
    cx: &Context,
    category: Category,
    (class, dtype): (TensorClass, Dtype),
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Weight>,
) -> Tensor {
    let y = cx.device.empty(class, dtype, &[x.dims()[0], w.dims()[0]]);
    cx.op(category, || match bias {
        None => gemm(x, Trans::No, w, Trans::Yes, &y, 0.0),
        Some(bias) => gemm_bias(x, Trans::No, w, Trans::Yes, &bias.value, &y, 0.0),
    });
    y
}

/// [`forward`] with a bias of the outputs `[out]`, where there is one.
pub fn forward_biased(
    cx: &Context,
    category: Category,
    x: &Tensor,
    w: &Tensor,
    bias: Option<&Weight>,
) -> Tensor {
    let kind = (TensorClass::Activations, x.dtype());
    forward_as(cx, category, kind, x, w, bias)
}

/// Adds the gradient of a bias, the sum over the rows of `dy [T, out]`, where there is one.
pub fn bias_grad(cx: &Context, category: Category, dy: &Tensor, bias: Option<&Weight>) {
    if let Some(bias) = bias {
        let (dy, grad) = (dy.clone(), bias.grad.clone());
        cx.of_weights(category, move || gemm::bias_grad(&dy, &grad));
    }
}

/// Gradient of the input: `dy [T, out] -> [T, in]`.
pub fn dgrad(cx: &Context, category: Category, dy: &Tensor, w: &Tensor) -> Tensor {
    let dims = [dy.dims()[0], w.dims()[1]];
    let dx = cx.device.empty(TensorClass::Transient, dy.dtype(), &dims);
    cx.op(category, || {
        gemm(dy, Trans::No, w, Trans::No, &dx, 0.0);
    });
    dx
}

/// Adds the gradient of the input to `dx [T, in]`.
pub fn dgrad_onto(cx: &Context, category: Category, dy: &Tensor, w: &Tensor, dx: &Tensor) {
    cx.op(category, || {
        gemm(dy, Trans::No, w, Trans::No, dx, 1.0);
    });
}

/// Adds the gradient of the weight, `dyᵀ x`, to `dw [out, in]`.
pub fn wgrad(cx: &Context, category: Category, dy: &Tensor, x: &Tensor, dw: &Tensor) {
    let (dy, x, dw) = (dy.clone(), x.clone(), dw.clone());
    cx.of_weights(category, move || {
        gemm(&dy, Trans::Yes, &x, Trans::No, &dw, 1.0);
    });
}
