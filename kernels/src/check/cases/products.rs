//! Dense products: of linear layers and of the router.

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, bytes, case, moving};
use crate::cases::{Source as _, factors};
use crate::check::{Case, Written};
use crate::gemm::{self, Trans, View};

fn key(m: usize, n: usize, k: usize, pass: Pass, dtype: Dtype) -> Op {
    let [m, n, k] = [m, n, k].map(|size| size as u64);
    Op::Gemm {
        m,
        n,
        k,
        pass,
        dtype,
    }
}

/// The dense product of as much work as the experts' first product: what the grouped one is held
/// against.
pub fn dense_peer(sizes: &Sizes, dtype: Dtype) -> Case {
    let rows = sizes.tokens * sizes.topk;
    dense(
        "dense peer of fc1",
        rows,
        2 * sizes.width,
        sizes.hidden,
        dtype,
    )
}

/// `y = x W^T`.
pub(in crate::check) fn dense(name: &str, m: usize, n: usize, k: usize, dtype: Dtype) -> Case {
    let op = key(m, n, k, Pass::Forward, dtype);
    case(format!("gemm::forward {name}"), op, move |inputs| {
        let [x, w] = factors(inputs, [m, n, k], Pass::Forward);
        Box::new(move || vec![Written::new("y", &gemm::forward(&x, &w))])
    })
}

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (m, k) = (sizes.tokens, sizes.hidden);
    let n = (sizes.heads + sizes.kv_heads) * sizes.qk_dim + sizes.kv_heads * sizes.v_dim;
    vec![
        dense("qkv", m, n, k, dtype),
        case(
            "gemm::dgrad qkv",
            key(m, k, n, Pass::Dgrad, dtype),
            move |inputs| {
                let [dy, w] = factors(inputs, [m, k, n], Pass::Dgrad);
                Box::new(move || vec![Written::new("dx", &gemm::dgrad(&dy, &w))])
            },
        ),
        case(
            "gemm::wgrad qkv",
            key(n, k, m, Pass::Wgrad, dtype),
            move |inputs| {
                let [dy, x] = factors(inputs, [n, k, m], Pass::Wgrad);
                let dw = inputs.statistic(&[n, k], 1.0);
                Box::new(move || {
                    gemm::wgrad(&dy, &x, &dw);
                    vec![Written::new("dw", &dw)]
                })
            },
        ),
        case(
            "gemm::gemm router logits",
            key(m, sizes.experts, k, Pass::Forward, dtype),
            {
                let experts = sizes.experts;
                move |inputs| {
                    let [x, w] = factors(inputs, [m, experts, k], Pass::Forward);
                    let logits = inputs.statistic(&[m, experts], 0.0);
                    Box::new(move || {
                        gemm::gemm(&x, Trans::No, &w, Trans::Yes, &logits, 0.0);
                        vec![Written::new("logits", &logits)]
                    })
                }
            },
        ),
        case(
            "gemm::wgrad qkv, gradients as stored",
            key(n, k, m, Pass::Wgrad, dtype),
            move |inputs| {
                let [dy, x] = factors(inputs, [n, k, m], Pass::Wgrad);
                let dw = inputs.tensor(&[n, k], 1.0);
                Box::new(move || {
                    gemm::wgrad(&dy, &x, &dw);
                    vec![Written::new("dw", &dw)]
                })
            },
        ),
        case(
            "gemm::forward_bias qkv",
            key(m, n, k, Pass::Forward, dtype),
            move |inputs| {
                let [x, w] = factors(inputs, [m, n, k], Pass::Forward);
                let bias = inputs.tensor(&[n], 1.0);
                Box::new(move || vec![Written::new("y", &gemm::forward_bias(&x, &w, &bias))])
            },
        ),
        moving(
            bytes(dtype, m * n),
            case(
                "gemm::bias_grad qkv",
                Op::GradNorm {
                    len: (m * n) as u64,
                },
                move |inputs| {
                    let (dy, db) = (inputs.tensor(&[m, n], 1.0), inputs.statistic(&[n], 1.0));
                    Box::new(move || {
                        gemm::bias_grad(&dy, &db);
                        vec![Written::new("db", &db)]
                    })
                },
            ),
        ),
        queries_of_a_fused_projection(sizes, dtype),
        router_dgrad(sizes, dtype),
        router_wgrad(sizes, dtype),
    ]
}

/// Some columns of what several projections wrote, with a bias: `x = y_q W + b`, added.
fn queries_of_a_fused_projection(sizes: &Sizes, dtype: Dtype) -> Case {
    let (m, n) = (sizes.tokens, sizes.hidden);
    let (before, k) = (sizes.kv_heads * sizes.qk_dim, sizes.heads * sizes.qk_dim);
    let op = key(m, n, k, Pass::Forward, dtype);
    case("gemm::gemm_bias columns", op, move |inputs| {
        let y = inputs.tensor(&[m, before + k + before], 1.0);
        let (w, bias) = (inputs.tensor(&[k, n], 0.02), inputs.tensor(&[n], 1.0));
        let x = inputs.tensor(&[m, n], 1.0);
        Box::new(move || {
            let queries = View::columns(&y, before..before + k);
            gemm::gemm_bias(queries, Trans::No, &w, Trans::No, &bias, &x, 1.0);
            vec![Written::new("x", &x)]
        })
    })
}

fn router_dgrad(sizes: &Sizes, dtype: Dtype) -> Case {
    let (m, n, k) = (sizes.tokens, sizes.hidden, sizes.experts);
    let op = key(m, n, k, Pass::Dgrad, dtype);
    case("gemm::gemm router dgrad", op, move |inputs| {
        let dlogits = inputs.statistic(&[m, k], 1.0);
        let (w, dx) = (inputs.tensor(&[k, n], 0.02), inputs.tensor(&[m, n], 0.0));
        Box::new(move || {
            gemm::gemm(&dlogits, Trans::No, &w, Trans::No, &dx, 0.0);
            vec![Written::new("dx", &dx)]
        })
    })
}

fn router_wgrad(sizes: &Sizes, dtype: Dtype) -> Case {
    let (m, n, k) = (sizes.experts, sizes.hidden, sizes.tokens);
    let op = key(m, n, k, Pass::Wgrad, dtype);
    case("gemm::gemm router wgrad", op, move |inputs| {
        let dlogits = inputs.statistic(&[k, m], 1.0);
        let (x, dw) = (inputs.tensor(&[k, n], 1.0), inputs.statistic(&[m, n], 1.0));
        Box::new(move || {
            gemm::gemm(&dlogits, Trans::Yes, &x, Trans::No, &dw, 1.0);
            vec![Written::new("dw", &dw)]
        })
    })
}
