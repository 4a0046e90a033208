//! The cases: every op of a training step at the sizes of a model.

use moefold_profiles::{Dtype, Op};

use crate::cases::{self as operands, Call, Load};
use crate::check::{Case, Inputs, Work, Written};

mod attention;
mod grouped;
mod pointwise;
mod products;
mod routing;
mod rows;

pub use grouped::loads;
pub use products::dense_peer;

pub(super) use pointwise::copy;
pub(super) use products::dense;

/// Sizes of one layer's work on one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sizes {
    /// What they are of.
    pub name: &'static str,
    /// Tokens of a microbatch, in `seqs` sequences.
    pub tokens: usize,
    /// Sequences.
    pub seqs: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Width of a query and a key.
    pub qk_dim: usize,
    /// Width of a value.
    pub v_dim: usize,
    /// Experts on the device.
    pub experts: usize,
    /// Experts a token.
    pub topk: usize,
    /// Width of an expert.
    pub width: usize,
    /// Vocabulary entries on the device.
    pub vocab: usize,
}

impl Sizes {
    /// Whether every row is of whole 16 bytes in bf16, as the kernels of tiles and bulk copies want.
    pub fn is_wide(&self) -> bool {
        [self.hidden, self.width, self.qk_dim, self.v_dim]
            .iter()
            .all(|columns| columns.is_multiple_of(8))
    }

    /// Sizes at the edges of tiles and below one access: for correctness. The odd ones are no
    /// multiple of 16 bytes, so that they go to the portable kernels on any architecture.
    pub fn small() -> Vec<Self> {
        vec![
            Self {
                name: "odd",
                tokens: 69,
                seqs: 3,
                hidden: 70,
                heads: 3,
                kv_heads: 1,
                qk_dim: 60,
                v_dim: 44,
                experts: 5,
                topk: 2,
                width: 35,
                vocab: 101,
            },
            Self {
                name: "ragged",
                tokens: 130,
                seqs: 2,
                hidden: 72,
                heads: 4,
                kv_heads: 2,
                qk_dim: 64,
                v_dim: 64,
                experts: 6,
                topk: 2,
                width: 40,
                vocab: 130,
            },
            Self {
                name: "wide heads",
                tokens: 67,
                seqs: 1,
                hidden: 128,
                heads: 2,
                kv_heads: 2,
                qk_dim: 192,
                v_dim: 128,
                experts: 3,
                topk: 1,
                width: 64,
                vocab: 33,
            },
        ]
    }

    /// One layer of published models on one GPU: for correctness at size, and for times.
    pub fn real() -> Vec<Self> {
        vec![
            // Qwen3-30B-A3B, experts over 8 ranks: tokens of 8 ranks reach 16 experts.
            Self {
                name: "qwen3-30b-a3b",
                tokens: 4096,
                seqs: 1,
                hidden: 2048,
                heads: 32,
                kv_heads: 4,
                qk_dim: 128,
                v_dim: 128,
                experts: 16,
                topk: 8,
                width: 768,
                vocab: 151_936,
            },
            Self {
                name: "mixtral-8x7b",
                tokens: 4096,
                seqs: 1,
                hidden: 4096,
                heads: 32,
                kv_heads: 8,
                qk_dim: 128,
                v_dim: 128,
                experts: 8,
                topk: 2,
                width: 14_336,
                vocab: 32_000,
            },
            // DeepSeek-V3 attention under TP 4, experts over 32 ranks.
            Self {
                name: "deepseek-v3",
                tokens: 4096,
                seqs: 1,
                hidden: 7168,
                heads: 32,
                kv_heads: 32,
                qk_dim: 192,
                v_dim: 128,
                experts: 8,
                topk: 8,
                width: 2048,
                vocab: 32_320,
            },
        ]
    }
}

fn case(
    name: impl Into<String>,
    op: Op,
    prepare: impl Fn(&mut Inputs<'_>) -> Work + 'static,
) -> Case {
    Case {
        name: name.into(),
        op,
        bytes: None,
        by_library: false,
        prepare: Box::new(prepare),
    }
}

/// A case of a call, all that it writes compared.
fn called(
    name: impl Into<String>,
    op: Op,
    prepare: impl Fn(&mut Inputs<'_>) -> Call + 'static,
) -> Case {
    case(name, op, move |inputs| {
        let call = prepare(inputs);
        Box::new(move || Written::all(&call))
    })
}

/// A case of an op as its key alone says it.
fn keyed(name: impl Into<String>, op: Op) -> Case {
    called(name, op, move |inputs| {
        operands::call(inputs, &op, Load::Even)
    })
}

/// A case that moves `bytes`, where its op counts those of another function.
fn moving(bytes: usize, case: Case) -> Case {
    Case {
        bytes: Some(bytes as u64),
        ..case
    }
}

/// Bytes of elements.
fn bytes(dtype: Dtype, elements: usize) -> usize {
    dtype.bytes(elements as u64).0 as usize
}

/// Every op at these sizes; `dtype` is what the device stores, for the counts of bytes.
pub fn cases(sizes: &Sizes, dtype: Dtype) -> Vec<Case> {
    [
        products::cases(sizes, dtype),
        grouped::cases(sizes, dtype),
        routing::cases(sizes, dtype),
        attention::cases(sizes, dtype),
        rows::cases(sizes, dtype),
        pointwise::cases(sizes, dtype),
    ]
    .into_iter()
    .flatten()
    .collect()
}
