//! What works on rows: norms, the head's loss, embeddings, and moves of rows and columns.

use moefold_profiles::{Dtype, Op, Pass};

use super::{Sizes, bytes, called, case, keyed, moving};
use crate::cases::{self as operands, Source as _};
use crate::check::{Case, Written};
use crate::rms_norm::{self, Over};
use crate::tensor::Tensor;
use crate::{cross_entropy, elementwise, rows};

pub(super) fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let mut all = norms(sizes, dtype);
    all.extend(head(sizes, dtype));
    all.extend(lookup(sizes, dtype));
    all.extend(moves(sizes, dtype));
    all
}

fn norms(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let norm = |pass, rows: usize, dim: usize| Op::RmsNorm {
        rows: rows as u64,
        dim: dim as u64,
        pass,
        dtype,
    };
    let heads = sizes.tokens * sizes.heads;
    let shapes = [
        ("hidden", sizes.tokens, sizes.hidden),
        ("head", heads, sizes.qk_dim),
    ];
    let mut all = Vec::new();
    for (name, rows, dim) in shapes {
        for (function, pass) in [("forward", Pass::Forward), ("backward", Pass::Backward)] {
            let name = format!("rms_norm::{function} {name}");
            all.push(keyed(name, norm(pass, rows, dim)));
        }
    }
    all.push(divided_norm(
        sizes,
        norm(Pass::Backward, sizes.tokens, sizes.hidden),
    ));
    all
}

/// Both passes over rows of which this is half, with sums as another half like it gives them.
fn divided_norm(sizes: &Sizes, op: Op) -> Case {
    let (t, h) = (sizes.tokens, sizes.hidden);
    case("rms_norm::backward_over halves", op, move |inputs| {
        let [x, dy] = [(); 2].map(|()| inputs.tensor(&[t, h], 1.0));
        let (w, dw) = (inputs.tensor(&[h], 1.0), inputs.statistic(&[h], 1.0));
        Box::new(move || {
            let both = |sums: &Tensor| {
                elementwise::scale(sums, 2.0);
            };
            let over = |sums| Over {
                width: 2 * h,
                sums: Some(sums),
            };
            let squares = rms_norm::squares(&x, &w);
            both(&squares);
            let (y, rstd) = rms_norm::forward_over(&over(&squares), &x, &w, 1e-6);
            let products = rms_norm::products(&dy, &x, &w);
            both(&products);
            let dx = rms_norm::backward_over(&over(&products), &dy, &x, &w, &rstd, &dw);
            vec![
                Written::new("y", &y),
                Written::new("dx", &dx),
                Written::new("dw", &dw),
            ]
        })
    })
}

fn head(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, vocab) = (sizes.tokens, sizes.vocab);
    let cross = |pass| Op::CrossEntropy {
        rows: t as u64,
        vocab: vocab as u64,
        pass,
        dtype,
    };
    vec![
        keyed("cross_entropy::forward", cross(Pass::Forward)),
        keyed("cross_entropy::finish", cross(Pass::Backward)),
        moving(
            bytes(dtype, t * vocab),
            case(
                "cross_entropy::row_statistics",
                cross(Pass::Forward),
                move |inputs| {
                    let logits = inputs.tensor(&[t, vocab], 4.0);
                    Box::new(move || {
                        let own = cross_entropy::row_statistics(&logits);
                        vec![
                            Written::new("top", &own.top),
                            Written::new("sum_exp", &own.sum_exp),
                        ]
                    })
                },
            ),
        ),
        moving(
            24 * t,
            case(
                "cross_entropy::rebase",
                cross(Pass::Forward),
                move |inputs| {
                    let logits = inputs.tensor(&[t, vocab], 4.0);
                    // The largest logit is in another rank's part, and so are targets.
                    let top = inputs.statistic(&[t], 1.0);
                    elementwise::fill(&top, 5.0);
                    let targets = inputs.ids(&[t], 2 * vocab);
                    let own = cross_entropy::row_statistics(&logits);
                    Box::new(move || {
                        let (sum_exp, target) =
                            cross_entropy::rebase(&logits, &own, &top, &targets, vocab / 2);
                        vec![
                            Written::new("sum_exp", &sum_exp),
                            Written::new("target", &target),
                        ]
                    })
                },
            ),
        ),
    ]
}

fn lookup(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h, vocab) = (sizes.tokens, sizes.hidden, sizes.vocab);
    let embed = |pass| Op::Embedding {
        rows: t as u64,
        dim: h as u64,
        pass,
        dtype,
    };
    let functions = [("forward", Pass::Forward), ("backward", Pass::Backward)];
    let case_of = |(function, pass)| {
        called(
            format!("embedding::{function}"),
            embed(pass),
            move |inputs| operands::lookup(inputs, [t, vocab, h], pass),
        )
    };
    functions.map(case_of).into()
}

fn moves(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    let (t, h, rows) = (sizes.tokens, sizes.hidden, sizes.tokens * sizes.topk);
    let op = |rows: usize| Op::Permute {
        rows: rows as u64,
        dim: h as u64,
        pass: Pass::Forward,
        dtype,
    };
    // Chunks out of order, one of them empty, as ranks send them.
    let chunks = [t / 2..t, 0..0, 0..t / 5, t / 5..t / 2];
    let chunks: rows::Chunks = chunks.into_iter().collect();
    let scattered = chunks.clone();
    // The queries of a fused projection.
    let (before, columns) = (sizes.kv_heads * sizes.qk_dim, sizes.heads * sizes.qk_dim);
    let (width, taken) = (2 * before + columns, before..before + columns);
    let (put, given) = (taken.clone(), taken.clone());
    let moved = 2 * bytes(dtype, t * columns);
    vec![
        case("rows::gather", op(rows), move |inputs| {
            let x = inputs.tensor(&[t, h], 1.0);
            let index = inputs.ids(&[rows], t);
            Box::new(move || vec![Written::new("y", &rows::gather(&x, &index))])
        }),
        case("rows::gather_chunks", op(t), move |inputs| {
            let (x, chunks) = (inputs.tensor(&[t, h], 1.0), chunks.clone());
            Box::new(move || vec![Written::new("y", &rows::gather_chunks(&x, &chunks))])
        }),
        case("rows::scatter_chunks", op(t), move |inputs| {
            let (y, chunks) = (inputs.tensor(&[t, h], 1.0), scattered.clone());
            Box::new(move || vec![Written::new("x", &rows::scatter_chunks(&y, &chunks))])
        }),
        moving(
            moved,
            case("rows::gather_columns", op(t), move |inputs| {
                let (x, columns) = (inputs.tensor(&[t, width], 1.0), taken.clone());
                Box::new(move || {
                    vec![Written::new(
                        "y",
                        &rows::gather_columns(&x, columns.clone()),
                    )]
                })
            }),
        ),
        moving(
            moved,
            case("rows::gather_columns_into", op(t), move |inputs| {
                let (x, columns) = (inputs.tensor(&[t, width], 1.0), given.clone());
                let y = inputs.tensor(&[t, columns.len()], 1.0);
                Box::new(move || {
                    rows::gather_columns_into(&x, columns.clone(), &y);
                    vec![Written::new("y", &y)]
                })
            }),
        ),
        moving(
            moved,
            case("rows::scatter_columns", op(t), move |inputs| {
                let (x, range) = (inputs.tensor(&[t, width], 1.0), put.clone());
                let y = inputs.tensor(&[t, columns], 1.0);
                Box::new(move || {
                    rows::scatter_columns(&y, &x, range.clone());
                    vec![Written::new("x", &x)]
                })
            }),
        ),
    ]
}
