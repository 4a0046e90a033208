//! What works on elements: sums, copies, the optimizer.

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, bytes, case, moving};
use crate::adamw::{self, Adamw};
use crate::cases::{Source as _, rests, shard};
use crate::check::{Case, Written};
use crate::device::TensorClass;
use crate::tensor::Tensor;
use crate::{Factor, Scalars, elementwise, grad_norm, reduce, transfer};

const RULE: Adamw = Adamw {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.95,
    eps: 1e-8,
    weight_decay: 0.1,
    step: 3,
};

/// A copy of `words` f32.
pub(in crate::check) fn copy(words: usize) -> Case {
    let op = Op::Add {
        len: words as u64,
        dtype: Dtype::F32,
    };
    case("elementwise::copy", op, move |inputs| {
        let x = inputs.statistic(&[words], 1.0);
        let y = inputs
            .device
            .empty(TensorClass::Activations, Dtype::F32, &[words]);
        Box::new(move || {
            elementwise::copy(&x, &y);
            vec![Written::new("y", &y)]
        })
    })
}

fn add(len: usize, dtype: Dtype) -> Op {
    Op::Add {
        len: len as u64,
        dtype,
    }
}

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = elements(sizes, dtype);
    all.extend(collectives(sizes, dtype));
    all.extend(sums(sizes, dtype));
    all.extend(steps(sizes, dtype));
    all
}

fn elements(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h) = (sizes.tokens, sizes.hidden);
    vec![
        case("elementwise::add", add(t * h, dtype), move |inputs| {
            let (a, b) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            Box::new(move || vec![Written::new("sum", &elementwise::add(&a, &b))])
        }),
        case("elementwise::axpy", add(t * h, dtype), move |inputs| {
            let (x, y) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            Box::new(move || {
                elementwise::axpy(0.5, &x, &y);
                vec![Written::new("y", &y)]
            })
        }),
        case("elementwise::add_into", add(t * h, dtype), move |inputs| {
            let (x, y) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            Box::new(move || {
                elementwise::add_into(&y, &x);
                vec![Written::new("y", &y)]
            })
        }),
        moving(
            2 * bytes(dtype, t * h),
            case("elementwise::scale", add(t * h, dtype), move |inputs| {
                let y = inputs.tensor(&[t, h], 1.0);
                Box::new(move || {
                    elementwise::scale(&y, -0.5);
                    vec![Written::new("y", &y)]
                })
            }),
        ),
        moving(
            bytes(dtype, t * h),
            case("elementwise::fill", add(t * h, dtype), move |inputs| {
                let y = inputs.tensor(&[t, h], 1.0);
                Box::new(move || {
                    elementwise::fill(&y, 0.25);
                    vec![Written::new("y", &y)]
                })
            }),
        ),
        moving(
            2 * bytes(dtype, t * h),
            case("elementwise::duplicate", add(t * h, dtype), move |inputs| {
                let x = inputs.tensor(&[t, h], 1.0);
                Box::new(move || {
                    let y = elementwise::duplicate(&x, TensorClass::Transient);
                    vec![Written::new("y", &y)]
                })
            }),
        ),
        case(
            "transfer::start_to_host, start_to_device",
            add(t * h, dtype),
            move |inputs| {
                let (x, device) = (inputs.tensor(&[t, h], 1.0), inputs.device.clone());
                Box::new(move || {
                    let (parcels, leaving) = transfer::start_to_host(&device, vec![x.clone()]);
                    leaving.settle(&device);
                    let back = transfer::start_to_device(&device, parcels).settle(&device);
                    vec![Written::new("y", &back[0])]
                })
            },
        ),
        moving(bytes(dtype, t * h) + bytes(Dtype::F32, t * h), {
            case(
                "elementwise::copy to f32",
                add(t * h, dtype),
                move |inputs| {
                    let (x, y) = (inputs.tensor(&[t, h], 1.0), inputs.statistic(&[t, h], 0.0));
                    Box::new(move || {
                        elementwise::copy(&x, &y);
                        vec![Written::new("y", &y)]
                    })
                },
            )
        }),
    ]
}

/// What ranks of one device do to each other's tensors.
fn collectives(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h) = (sizes.tokens, sizes.hidden);
    let copies = Op::Permute {
        rows: t as u64,
        dim: h as u64,
        pass: Pass::Forward,
        dtype,
    };
    vec![
        case("reduce::sum_ordered", add(t * h, dtype), move |inputs| {
            let (a, b) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            let sum = inputs.tensor(&[t, h], 0.0);
            Box::new(move || {
                reduce::sum_ordered(&[&a, &b], &sum);
                vec![Written::new("sum", &sum)]
            })
        }),
        case("reduce::maximum", add(t * h, dtype), move |inputs| {
            let (a, b) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
            let most = inputs.tensor(&[t, h], 0.0);
            Box::new(move || {
                reduce::maximum(&[&a, &b], &most);
                vec![Written::new("most", &most)]
            })
        }),
        case("reduce::copy_all", copies, move |inputs| {
            let (src, dst) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 0.0));
            let cut = t / 3;
            Box::new(move || {
                let parts = |x: &Tensor, at| [x.rows(0..at), x.rows(at..t)];
                let [[first, rest], [front, back]] = [parts(&src, cut), parts(&dst, t - cut)];
                reduce::copy_all(&[(&first, &back), (&rest, &front)]);
                vec![Written::new("copies", &dst)]
            })
        }),
    ]
}

/// Sums over all elements, to the host and on the device.
fn sums(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h) = (sizes.tokens, sizes.hidden);
    let len = sizes.hidden * sizes.width;
    vec![
        moving(
            bytes(dtype, t * h),
            case("elementwise::sum", add(t * h, dtype), move |inputs| {
                let x = inputs.tensor(&[t, h], 1.0);
                Box::new(move || {
                    let sum = elementwise::sum(&x);
                    vec![Written::host("sum", move || vec![sum])]
                })
            }),
        ),
        moving(
            4 * bytes(dtype, t * h),
            case("scalars::sums", add(t * h, dtype), move |inputs| {
                let (x, y) = (inputs.tensor(&[t, h], 1.0), inputs.tensor(&[t, h], 1.0));
                // Apart from zero, so that what is off can be held against it.
                elementwise::axpy(0.5, &x, &y);
                let sums = Scalars::zeros(inputs.device, TensorClass::Transient, 3);
                Box::new(move || {
                    sums.clear();
                    sums.add_sum(0, 2.0, &x);
                    sums.add_squares(1, 0.5, &x);
                    sums.add_products(2, -1.0, &x, &y);
                    let sums = sums.read();
                    vec![Written::host("sums", move || sums.clone())]
                })
            }),
        ),
        case(
            "grad_norm::sum_squares",
            Op::GradNorm { len: len as u64 },
            move |inputs| {
                let g = inputs.statistic(&[len], 1.0);
                Box::new(move || {
                    let sum = grad_norm::sum_squares(&g);
                    vec![Written::host("sum of squares", move || vec![sum])]
                })
            },
        ),
    ]
}

fn steps(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let len = sizes.hidden * sizes.width;
    let of = |dtype, moments| Op::Adamw {
        len: len as u64,
        dtype,
        moments,
        remainders: false,
    };
    let step = of(Dtype::F32, Dtype::F32);
    let into = |name, moments| {
        case(name, of(dtype, moments), move |inputs| {
            let [w, g, m, v] = shard(inputs, len, moments);
            let model = inputs.tensor(&[len], 0.0);
            Box::new(move || {
                adamw::step_into(&w, &g, &m, &v, Some(&model), &RULE, 0.5);
                vec![
                    Written::new("model", &model),
                    Written::new("weights", &w),
                    Written::new("m", &m),
                    Written::new("v", &v),
                ]
            })
        })
    };
    let rest = Op::Adamw {
        len: len as u64,
        dtype: Dtype::Bf16,
        moments: Dtype::F32,
        remainders: true,
    };
    vec![
        case("adamw::step, remainders", rest, move |inputs| {
            let [_, g, m, v] = shard(inputs, len, Dtype::F32);
            let device = inputs.device;
            let model = device.empty(TensorClass::Weights, Dtype::Bf16, &[len]);
            let rest = rests(device, len);
            adamw::put_masters(
                Some(&model),
                Some(&rest),
                &inputs.values(len, 1.0, Dtype::F32),
            );
            Box::new(move || {
                adamw::step_into(&rest, &g, &m, &v, Some(&model), &RULE, 0.5);
                let (upper, lower) = (model.clone(), rest.clone());
                let masters = move || {
                    let masters = adamw::masters_of(&upper, &lower);
                    masters.into_iter().map(f64::from).collect()
                };
                vec![
                    Written::host("weights", masters),
                    Written::new("model", &model),
                    Written::new("m", &m),
                    Written::new("v", &v),
                ]
            })
        }),
        into("adamw::step, bf16 moments", Dtype::Bf16),
        case("adamw::step", step, move |inputs| {
            let [w, g, m, v] = shard(inputs, len, Dtype::F32);
            Box::new(move || {
                adamw::step(&w, &g, &m, &v, &RULE, 0.5);
                vec![
                    Written::new("weights", &w),
                    Written::new("m", &m),
                    Written::new("v", &v),
                ]
            })
        }),
        into("adamw::step_into", Dtype::F32),
        case("adamw::step_by", step, move |inputs| {
            let [w, g, m, v] = shard(inputs, len, Dtype::F32);
            let squares = Scalars::zeros(inputs.device, TensorClass::Transient, 1);
            Box::new(move || {
                squares.clear();
                squares.add_squares(0, 1.0, &g);
                let factor = Factor::clipped(&squares, 0, 1.0, Some(0.5));
                adamw::step_by(&w, &g, &m, &v, None, &RULE, &factor);
                vec![
                    Written::new("weights", &w),
                    Written::new("m", &m),
                    Written::new("v", &v),
                ]
            })
        }),
    ]
}
