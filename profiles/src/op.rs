//! [`Op`]: what a rank computes, as a key of every cost table.
//!
//! The planner lowers a layer to these, the executor's trace names its spans by them, and `profile`
//! measures them; a price and a measurement are comparable because they carry the same key. An op
//! says its work (`flops`, `bytes`), never how long it takes: that is [`crate::cost`]'s business.
//! One op has one stem everywhere: `permute.rs`, `Op::Permute`, the `permute` rows of a table.

use serde::{Deserialize, Serialize};

use crate::dtype::Dtype;
use crate::units::{Bytes, Flops};

crate::named! {
    /// Which pass of training an op belongs to.
    pub enum Pass {
        /// Forward.
        Forward = "forward",
        /// Backward, where one kernel makes all gradients (attention, norms, memory-bound ops).
        Backward = "backward",
        /// Gradient with respect to the input of a matrix product.
        Dgrad = "dgrad",
        /// Gradient with respect to the weight of a matrix product.
        Wgrad = "wgrad",
    }
}

/// What an [`Op::Sweep`] does; memory alone bounds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SweepKind {
    /// Sets every element.
    Fill,
    /// Copies every element.
    Copy,
    /// Multiplies every element in place.
    Scale,
    /// Sums all elements, or their products with another tensor's.
    Sum,
    /// The largest element of each row of logits and the sum of exponentials, or that of exponentials alone.
    SumExp,
    /// Copies rows by an index.
    Gather,
    /// Copies consecutive rows in pieces.
    Chunks,
    /// Sorts the chosen expert of each slot into a map of rows.
    Sort,
    /// Drops of each expert the slots beyond its capacity.
    Limit,
    /// The factor that clips gradients.
    Clip,
    /// Rows behind a sigmoid gate, forward or backward.
    Gate,
    /// Merges what attention gives over some keys into what it gives over others.
    Merge,
    /// Adds to rows the bias of their expert.
    ExpertBias,
}

impl SweepKind {
    /// The same among all kinds of ops.
    fn kind(self) -> OpKind {
        match self {
            Self::Fill => OpKind::Fill,
            Self::Copy => OpKind::Copy,
            Self::Scale => OpKind::Scale,
            Self::Sum => OpKind::Sum,
            Self::SumExp => OpKind::SumExp,
            Self::Gather => OpKind::Gather,
            Self::Chunks => OpKind::Chunks,
            Self::Sort => OpKind::Sort,
            Self::Limit => OpKind::Limit,
            Self::Clip => OpKind::Clip,
            Self::Gate => OpKind::Gate,
            Self::Merge => OpKind::Merge,
            Self::ExpertBias => OpKind::ExpertBias,
        }
    }

    /// How often an element is read or written. A sort reads a slot's expert twice and writes three
    /// numbers of as many bytes. A limit is counted as where no expert has more than its capacity: a slot's
    /// expert, its row, and the first rows of the expert and the next, and what is left.
    fn touches(self) -> u64 {
        match self {
            Self::Fill | Self::Sum | Self::SumExp | Self::Clip => 1,
            Self::Copy | Self::Scale | Self::Gather | Self::Chunks | Self::ExpertBias => 2,
            Self::Gate | Self::Merge => 3,
            Self::Sort | Self::Limit => 5,
        }
    }
}

/// One device operation with its shape on one rank. Sizes are element counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Op {
    /// `C[m,n] = A[m,k] B[k,n]`. For dgrad and wgrad the shape is that of the product done, so
    /// `m*n*k` is the same for the three passes of one linear layer.
    Gemm {
        /// Rows of the product.
        m: u64,
        /// Columns of the product.
        n: u64,
        /// Contracted size.
        k: u64,
        /// Which of the three products of a linear layer.
        pass: Pass,
        /// Type of the operands.
        dtype: Dtype,
    },
    /// One product per expert held by the rank: `groups` matrices `[k,n]`, `rows` rows in all.
    /// `n` and `k` are those of the forward product in every pass.
    GroupedGemm {
        /// Experts on the rank.
        groups: u64,
        /// Rows over all groups.
        rows: u64,
        /// Output width of the forward product.
        n: u64,
        /// Input width of the forward product.
        k: u64,
        /// Which of the three products.
        pass: Pass,
        /// Type of the operands.
        dtype: Dtype,
    },
    /// Scaled dot-product attention (forward, or the whole backward).
    Attention {
        /// Sequences.
        batch: u64,
        /// Query heads on the rank.
        heads: u64,
        /// Key/value heads on the rank.
        kv_heads: u64,
        /// Query positions a sequence.
        q_len: u64,
        /// Key positions a query sees at most.
        kv_len: u64,
        /// Width of queries and keys.
        qk_dim: u64,
        /// Width of values.
        v_dim: u64,
        /// Causal: about half of the `q_len x kv_len` scores exist.
        causal: bool,
        /// Forward or backward.
        pass: Pass,
        /// Type of q, k and v.
        dtype: Dtype,
    },
    /// RMSNorm or LayerNorm over `rows` vectors of `dim`.
    RmsNorm {
        /// Vectors.
        rows: u64,
        /// Width of each.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Rotary embedding of `rows` head vectors of `dim`.
    Rope {
        /// Head vectors (tokens times heads).
        rows: u64,
        /// Rotated width.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Keys and values of latent attention, from up-projected heads `[rows, heads, nope + v_dim]` and one
    /// rotated part `[rows, rope]` that all keys of a token have (backward: its gradient sums over heads).
    LatentKv {
        /// Tokens.
        rows: u64,
        /// Heads on the rank.
        heads: u64,
        /// Unrotated width of a key.
        nope: u64,
        /// Rotated width of a key.
        rope: u64,
        /// Width of a value.
        v_dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// `silu(gate) * up` over `rows` tokens, from `[rows, 2*dim]` to `[rows, dim]`.
    Swiglu {
        /// Tokens.
        rows: u64,
        /// Width of the result.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Scores, top-k and normalization of the router (its product with the weight is a `Gemm`).
    Router {
        /// Tokens.
        rows: u64,
        /// Experts scored.
        experts: u64,
        /// Experts chosen a token.
        topk: u64,
        /// Forward or backward.
        pass: Pass,
    },
    /// Copies `rows` rows of `dim` into expert order (backward: sums them back).
    Permute {
        /// Rows after permutation (tokens times top-k).
        rows: u64,
        /// Width.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Sums `rows` expert rows back into token order, weighted (backward: the reverse).
    Unpermute {
        /// Rows before the sum (tokens times top-k).
        rows: u64,
        /// Width.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Gathers `rows` embedding vectors of `dim` (backward: scatters their gradients).
    Embedding {
        /// Tokens.
        rows: u64,
        /// Width.
        dim: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
    /// Softmax cross entropy over `[rows, vocab]` logits of the rank, with its gradient in place.
    CrossEntropy {
        /// Tokens.
        rows: u64,
        /// Vocabulary entries on the rank.
        vocab: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the logits as the head writes them; the softmax is f32.
        dtype: Dtype,
    },
    /// Elementwise sum of two tensors of `len` (residual streams, gradient accumulation).
    Add {
        /// Elements.
        len: u64,
        /// Type.
        dtype: Dtype,
    },
    /// A pass over `len` elements that no other op names.
    Sweep {
        /// What it does.
        kind: SweepKind,
        /// Elements.
        len: u64,
        /// Type.
        dtype: Dtype,
    },
    /// AdamW on `len` parameters of one shard: reads gradient, two moments and master weight,
    /// writes moments, master and model weight.
    Adamw {
        /// Parameters.
        len: u64,
        /// Type of the model weight.
        dtype: Dtype,
        /// Type of the moments; f32 where a file does not say.
        #[serde(default = "f32_moments", skip_serializing_if = "are_f32")]
        moments: Dtype,
        /// Whether masters are what model weights lack of them, 16 bits, and not of f32.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        remainders: bool,
    },
    /// Sum of squares of `len` f32 gradients.
    GradNorm {
        /// Elements.
        len: u64,
    },
    /// A recurrent or linear-attention mixer (gated DeltaNet, lightning attention, Mamba-2):
    /// `heads` states of `state` elements, updated for each of `rows` tokens.
    LinearAttention {
        /// Tokens.
        rows: u64,
        /// State heads.
        heads: u64,
        /// Elements of one head's state (key width times value width).
        state: u64,
        /// Elements read and written a token.
        width: u64,
        /// Forward or backward.
        pass: Pass,
        /// Type of the activations.
        dtype: Dtype,
    },
}

crate::named! {
    /// The kinds of [`Op`], without shapes; their names are the stems.
    pub enum OpKind {
        /// A matrix product.
        Gemm = "gemm",
        /// One product per expert.
        GroupedGemm = "grouped_gemm",
        /// Scaled dot-product attention.
        Attention = "attention",
        /// A norm.
        RmsNorm = "rms_norm",
        /// Rotary embedding.
        Rope = "rope",
        /// Keys and values of latent attention.
        LatentKv = "latent_kv",
        /// The gated activation.
        Swiglu = "swiglu",
        /// Scores and choice of experts.
        Router = "router",
        /// Rows into expert order.
        Permute = "permute",
        /// Rows back into token order.
        Unpermute = "unpermute",
        /// Lookup of embedding vectors.
        Embedding = "embedding",
        /// The loss.
        CrossEntropy = "cross_entropy",
        /// Elementwise sum.
        Add = "add",
        /// The optimizer's update.
        Adamw = "adamw",
        /// Sum of squares of gradients.
        GradNorm = "grad_norm",
        /// A recurrent or linear-attention mixer.
        LinearAttention = "linear_attention",
        /// See [`SweepKind::Fill`].
        Fill = "fill",
        /// See [`SweepKind::Copy`].
        Copy = "copy",
        /// See [`SweepKind::Scale`].
        Scale = "scale",
        /// See [`SweepKind::Sum`].
        Sum = "sum",
        /// See [`SweepKind::SumExp`].
        SumExp = "sum_exp",
        /// See [`SweepKind::Gather`].
        Gather = "gather",
        /// See [`SweepKind::Chunks`].
        Chunks = "chunks",
        /// See [`SweepKind::Sort`].
        Sort = "sort",
        /// See [`SweepKind::Limit`].
        Limit = "limit",
        /// See [`SweepKind::Clip`].
        Clip = "clip",
        /// See [`SweepKind::Gate`].
        Gate = "gate",
        /// See [`SweepKind::Merge`].
        Merge = "merge",
        /// See [`SweepKind::ExpertBias`].
        ExpertBias = "expert_bias",
    }
}

/// More heads than attention has in all its sequences.
const MOST_HEADS: u64 = 1 << 20;

/// Elements beyond which nothing is that an op works on: sums of a few such numbers of elements, in bits, are numbers
/// still.
const MOST_ELEMENTS: u64 = 1 << 56;

/// Whether something may have these sizes.
pub(crate) fn is_shape(sizes: &[u64]) -> bool {
    let mut sizes = sizes.iter();
    let all = sizes.try_fold(1_u64, |all, &size| all.checked_mul(size.max(1)));
    all.is_some_and(|all| all <= MOST_ELEMENTS)
}

impl Op {
    /// What of a key from a file no op has, with what would do: sizes of nothing, but for rows and lengths, which an
    /// expert without tokens has, and such as no model has. Prices make keys of all sizes between those of a
    /// profile; arithmetic on them does not wrap either.
    pub(crate) fn wrong(&self) -> Option<(String, String, String)> {
        let written = serde_json::to_value(self).expect("plain data");
        let parts = written.as_object().expect("an op is written as an object");
        for (name, size) in parts {
            let Some(size) = size.as_u64() else { continue };
            let least = u64::from(!matches!(name.as_str(), "rows" | "len" | "groups"));
            let most = self.most(name);
            if !(least..=most).contains(&size) {
                let expected = format!("{least} to {most}");
                return Some((name.clone(), size.to_string(), expected));
            }
        }
        match *self {
            Self::Attention { batch, heads, .. } if batch * heads > MOST_HEADS => {
                let expected = format!("at most {MOST_HEADS} heads of all sequences");
                Some(("heads".to_owned(), (batch * heads).to_string(), expected))
            }
            Self::Attention {
                heads, kv_heads, ..
            } if kv_heads > heads => {
                let expected = format!("at most the {heads} heads of queries");
                Some(("kv_heads".to_owned(), kv_heads.to_string(), expected))
            }
            _ => None,
        }
    }

    /// The most that a size may be.
    fn most(&self, name: &str) -> u64 {
        let is_grouped = matches!(self, Self::GroupedGemm { .. });
        let is_latent = matches!(self, Self::LatentKv { .. });
        match name {
            "len" => 1 << 50,
            "rows" if is_grouped => 1 << 28,
            "n" | "k" if is_grouped => 1 << 21,
            "heads" if is_latent => 1 << 14,
            "batch" | "heads" | "kv_heads" | "experts" | "topk" => MOST_HEADS,
            "q_len" | "kv_len" => 1 << 24,
            "groups" | "qk_dim" | "v_dim" | "nope" | "rope" => 1 << 12,
            _ => 1 << 30,
        }
    }

    /// Which operation it is, whatever its shape.
    pub fn kind(&self) -> OpKind {
        match self {
            Self::Gemm { .. } => OpKind::Gemm,
            Self::GroupedGemm { .. } => OpKind::GroupedGemm,
            Self::Attention { .. } => OpKind::Attention,
            Self::RmsNorm { .. } => OpKind::RmsNorm,
            Self::Rope { .. } => OpKind::Rope,
            Self::LatentKv { .. } => OpKind::LatentKv,
            Self::Swiglu { .. } => OpKind::Swiglu,
            Self::Router { .. } => OpKind::Router,
            Self::Permute { .. } => OpKind::Permute,
            Self::Unpermute { .. } => OpKind::Unpermute,
            Self::Embedding { .. } => OpKind::Embedding,
            Self::CrossEntropy { .. } => OpKind::CrossEntropy,
            Self::Add { .. } => OpKind::Add,
            Self::Adamw { .. } => OpKind::Adamw,
            Self::GradNorm { .. } => OpKind::GradNorm,
            Self::LinearAttention { .. } => OpKind::LinearAttention,
            Self::Sweep { kind, .. } => kind.kind(),
        }
    }

    /// Whether multiprocessors bound it, and not memory: products and attention.
    pub fn is_bound_by_sms(&self) -> bool {
        matches!(
            self,
            Self::Gemm { .. } | Self::GroupedGemm { .. } | Self::Attention { .. }
        )
    }

    /// The name the op has in file names, tables and traces.
    pub fn stem(&self) -> &'static str {
        self.kind().name()
    }

    /// The pass, where the op has one.
    pub fn pass(&self) -> Option<Pass> {
        match *self {
            Self::Gemm { pass, .. }
            | Self::GroupedGemm { pass, .. }
            | Self::Attention { pass, .. }
            | Self::RmsNorm { pass, .. }
            | Self::Rope { pass, .. }
            | Self::LatentKv { pass, .. }
            | Self::Swiglu { pass, .. }
            | Self::Router { pass, .. }
            | Self::Permute { pass, .. }
            | Self::Unpermute { pass, .. }
            | Self::Embedding { pass, .. }
            | Self::CrossEntropy { pass, .. }
            | Self::LinearAttention { pass, .. } => Some(pass),
            Self::Add { .. } | Self::Sweep { .. } | Self::Adamw { .. } | Self::GradNorm { .. } => {
                None
            }
        }
    }

    /// Floating-point work done, a fused multiply-add counting two. Causal attention counts the
    /// half of the scores that exist; its backward does 2.5 times the forward, since flash
    /// attention recomputes the scores (FlashAttention-2, arXiv 2307.08691, section 3.1).
    pub fn flops(&self) -> Flops {
        Flops(match *self {
            Self::Gemm { m, n, k, .. } => 2.0 * m as f64 * n as f64 * k as f64,
            Self::GroupedGemm { rows, n, k, .. } => 2.0 * rows as f64 * n as f64 * k as f64,
            Self::Attention {
                batch,
                heads,
                q_len,
                kv_len,
                qk_dim,
                v_dim,
                causal,
                pass,
                ..
            } => {
                let scores = if causal { 0.5 } else { 1.0 } * q_len as f64 * kv_len as f64;
                let forward = 2.0 * (batch * heads) as f64 * scores * (qk_dim + v_dim) as f64;
                forward * if pass == Pass::Forward { 1.0 } else { 2.5 }
            }
            Self::LinearAttention {
                rows,
                heads,
                state,
                pass,
                ..
            } => {
                // Update and read of the state: two multiply-adds an element and token.
                let forward = 4.0 * rows as f64 * (heads * state) as f64;
                forward * if pass == Pass::Forward { 1.0 } else { 2.0 }
            }
            _ => 0.0,
        })
    }

    /// Memory traffic of an implementation that reads every input and writes every output once.
    #[expect(clippy::too_many_lines, reason = "one arm an op, each a formula")]
    pub fn bytes(&self) -> Bytes {
        let of = |dtype: Dtype, count: u64| dtype.bytes(count);
        match *self {
            Self::Gemm {
                m,
                n,
                k,
                pass,
                dtype,
            } => {
                // Weight gradients are accumulated in f32: read and written.
                let out = if pass == Pass::Wgrad {
                    Dtype::F32.bytes(2 * m * n)
                } else {
                    wide(dtype).bytes(m * n)
                };
                of(dtype, m * k + k * n) + out
            }
            Self::GroupedGemm {
                groups,
                rows,
                n,
                k,
                pass,
                dtype,
            } => match pass {
                Pass::Wgrad => of(dtype, rows * (n + k)) + Dtype::F32.bytes(2 * groups * n * k),
                Pass::Dgrad => of(dtype, rows * n + groups * n * k) + wide(dtype).bytes(rows * k),
                Pass::Forward | Pass::Backward => {
                    of(dtype, rows * k + groups * n * k) + wide(dtype).bytes(rows * n)
                }
            },
            Self::Attention {
                batch,
                heads,
                kv_heads,
                q_len,
                kv_len,
                qk_dim,
                v_dim,
                pass,
                dtype,
                ..
            } => {
                let q = batch * heads * q_len * qk_dim;
                let kv = batch * kv_heads * kv_len * (qk_dim + v_dim);
                let o = batch * heads * q_len * v_dim;
                let passes = if pass == Pass::Forward { 1 } else { 2 };
                of(dtype, passes * (q + kv + o))
            }
            Self::RmsNorm {
                rows,
                dim,
                pass,
                dtype,
            } => of(
                dtype,
                rows * dim * if pass == Pass::Forward { 2 } else { 3 },
            ),
            Self::Swiglu {
                rows,
                dim,
                pass,
                dtype,
            } => of(
                dtype,
                rows * dim * if pass == Pass::Forward { 3 } else { 5 },
            ),
            Self::Router { rows, experts, .. } => Dtype::F32.bytes(3 * rows * experts),
            Self::Rope {
                rows, dim, dtype, ..
            }
            | Self::Permute {
                rows, dim, dtype, ..
            }
            | Self::Unpermute {
                rows, dim, dtype, ..
            } => of(dtype, 2 * rows * dim),
            Self::LatentKv {
                rows,
                heads,
                nope,
                rope,
                v_dim,
                dtype,
                ..
            } => of(dtype, rows * (heads * (2 * (nope + v_dim) + rope) + rope)),
            Self::Embedding {
                rows,
                dim,
                pass,
                dtype,
            } => {
                of(dtype, rows * dim)
                    + if pass == Pass::Forward {
                        of(dtype, rows * dim)
                    } else {
                        Dtype::F32.bytes(2 * rows * dim)
                    }
            }
            Self::CrossEntropy {
                rows, vocab, dtype, ..
            } => {
                // Logits read, f32 softmax written (forward); softmax read, gradient written.
                of(dtype, rows * vocab) + Dtype::F32.bytes(rows * vocab)
            }
            Self::Add { len, dtype } => of(dtype, 3 * len),
            Self::Sweep { kind, len, dtype } => of(dtype, kind.touches() * len),
            // Gradient and master read, master written: 3 f32. Two moments read and written, a weight written. A
            // remainder is half of a master, and its weight is read too.
            Self::Adamw {
                len,
                dtype,
                moments,
                remainders,
            } => {
                let masters = if remainders {
                    Dtype::Bf16.bytes(2 * len) + of(dtype, len)
                } else {
                    Dtype::F32.bytes(2 * len)
                };
                Dtype::F32.bytes(len) + masters + of(moments, 4 * len) + of(dtype, len)
            }
            Self::GradNorm { len } => Dtype::F32.bytes(len),
            Self::LinearAttention {
                rows,
                width,
                pass,
                dtype,
                ..
            } => of(
                dtype,
                rows * width * if pass == Pass::Forward { 1 } else { 3 },
            ),
        }
    }

    /// Whether matrix units do the work, so that peak FLOP/s and not bandwidth is the first limit.
    pub fn is_matrix(&self) -> bool {
        matches!(
            self,
            Self::Gemm { .. } | Self::GroupedGemm { .. } | Self::Attention { .. }
        )
    }

    /// The dtype the op multiplies or moves.
    pub fn dtype(&self) -> Dtype {
        match *self {
            Self::Gemm { dtype, .. }
            | Self::GroupedGemm { dtype, .. }
            | Self::Attention { dtype, .. }
            | Self::RmsNorm { dtype, .. }
            | Self::Rope { dtype, .. }
            | Self::LatentKv { dtype, .. }
            | Self::Swiglu { dtype, .. }
            | Self::Permute { dtype, .. }
            | Self::Unpermute { dtype, .. }
            | Self::Embedding { dtype, .. }
            | Self::CrossEntropy { dtype, .. }
            | Self::Add { dtype, .. }
            | Self::Sweep { dtype, .. }
            | Self::Adamw { dtype, .. }
            | Self::LinearAttention { dtype, .. } => dtype,
            Self::Router { .. } | Self::GradNorm { .. } => Dtype::F32,
        }
    }
}

/// Products of narrow operands are written in bf16 at least.
fn wide(dtype: Dtype) -> Dtype {
    match dtype {
        Dtype::Fp8 | Dtype::Fp4 => Dtype::Bf16,
        other => other,
    }
}

fn f32_moments() -> Dtype {
    Dtype::F32
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde hands over a reference"
)]
fn are_f32(dtype: &Dtype) -> bool {
    *dtype == Dtype::F32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_attention_counts_the_causal_half() {
        let attention = |pass| Op::Attention {
            batch: 1,
            heads: 2,
            kv_heads: 1,
            q_len: 8,
            kv_len: 8,
            qk_dim: 4,
            v_dim: 4,
            causal: true,
            pass,
            dtype: Dtype::Bf16,
        };
        assert_eq!(
            attention(Pass::Forward).flops(),
            Flops(2.0 * 2.0 * 32.0 * 8.0)
        );
        assert_eq!(
            attention(Pass::Backward).flops().0,
            2.5 * attention(Pass::Forward).flops().0
        );
    }

    #[test]
    fn law_passes_of_a_linear_layer_do_the_same_work() {
        let forward = Op::Gemm {
            m: 5,
            n: 7,
            k: 11,
            pass: Pass::Forward,
            dtype: Dtype::Bf16,
        };
        let dgrad = Op::Gemm {
            m: 5,
            n: 11,
            k: 7,
            pass: Pass::Dgrad,
            dtype: Dtype::Bf16,
        };
        let wgrad = Op::Gemm {
            m: 7,
            n: 11,
            k: 5,
            pass: Pass::Wgrad,
            dtype: Dtype::Bf16,
        };
        assert_eq!(forward.flops(), dgrad.flops());
        assert_eq!(forward.flops(), wgrad.flops());
    }

    #[test]
    fn ops_round_trip_through_json() {
        let op = Op::Permute {
            rows: 3,
            dim: 4,
            pass: Pass::Backward,
            dtype: Dtype::F32,
        };
        let text = serde_json::to_string(&op).expect("an op serializes");
        assert_eq!(serde_json::from_str::<Op>(&text).expect("and parses"), op);
    }
}
