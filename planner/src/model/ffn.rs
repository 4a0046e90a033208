//! Feed-forward blocks: dense MLPs, and experts with their router.
//!
//! Shapes and traits only; what they cost is in [`super::count`] and in the planner's lowering.

use serde::{Deserialize, Serialize};

/// The feed-forward block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ffn {
    /// One MLP for every token.
    Dense(Mlp),
    /// Routed experts.
    Moe(Moe),
}

/// An MLP: gated (three matrices) or not (two).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Inner width.
    pub width: u64,
    /// Whether a gate multiplies the inner activation.
    pub gated: bool,
    /// Biases on its matrices.
    pub bias: bool,
    /// What bends the inner activation.
    pub activation: Activation,
}

/// The function of an MLP's inner activation.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x * sigmoid(x)`; with a gate, SwiGLU.
    Silu,
    /// `max(x, 0)^2` (Nemotron-H).
    Relu2,
    /// SwiGLU whose gate and inner activation are clipped to this limit (DeepSeek-V4).
    ClippedSilu(f64),
    /// `min(x, limit) * sigmoid(1.702 x)` times the clipped inner activation plus one (GPT-OSS).
    ClippedGelu(f64),
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moe {
    /// Routed experts.
    pub experts: u64,
    /// Experts a token is sent to.
    pub topk: u64,
    /// Each expert.
    pub expert: Mlp,
    /// An MLP that every token passes besides.
    pub shared: Option<SharedExpert>,
    /// How tokens are scored.
    pub router: Router,
}

/// The shared expert.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedExpert {
    /// Its MLP; several shared experts are one of their summed width.
    pub mlp: Mlp,
    /// Output multiplied by `sigmoid(x . w)`.
    pub gated_output: bool,
}

/// How a router scores and selects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent traits of real models, each present or not"
)]
pub struct Router {
    /// From logits to scores.
    pub score: Score,
    /// Selected scores are divided by their sum.
    pub normalize: bool,
    /// Factor on the selected scores.
    pub scale: f64,
    /// A bias on the logits (a parameter).
    pub bias: bool,
    /// A bias used for selection only (a buffer, not a parameter).
    pub correction_bias: bool,
    /// Group-limited selection.
    pub groups: Option<RouterGroups>,
    /// Coefficient of the load-balancing loss in the configuration; 0 where absent.
    pub aux_loss_coef: f64,
    /// The score multiplies the expert's input instead of its output (Llama 4).
    pub scales_input: bool,
}

/// From router logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Score {
    /// Softmax over all experts, then top-k.
    SoftmaxThenTopk,
    /// Top-k, then softmax over the chosen.
    TopkThenSoftmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Square root of softplus of each logit.
    SqrtSoftplus,
    /// Two sequential masked argmax (Phi-3.5-MoE).
    SparseMixer,
    /// A fixed table from token ids.
    Hash,
}

/// Group-limited routing: only experts of the best groups are eligible.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouterGroups {
    /// Groups the experts are divided into.
    pub groups: u64,
    /// Groups kept a token.
    pub topk: u64,
    /// Experts of a group whose scores add up to the group's score: 1 in DeepSeek-V2, 2 in V3.
    pub scored_by: u64,
}
