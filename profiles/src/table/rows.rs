//! One type a shipped table: a row with its units.

use crate::collective::CollectiveKind;
use crate::dtype::Dtype;
use crate::op::Pass;

/// Rate of a dense matrix product.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemmRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Operands.
    pub dtype: Dtype,
    /// Rows, columns and contraction of the product.
    pub shape: [u64; 3],
    /// TFLOP/s.
    pub tflops: f64,
}

/// Which scores of the score matrix exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mask {
    /// The lower half.
    Causal,
    /// All.
    Full,
}

/// The fastest product found on a GPU by searching shapes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CeilingRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Operands.
    pub dtype: Dtype,
    /// TFLOP/s.
    pub tflops: f64,
}

/// Rate of attention at one sequence length, with enough heads to fill the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Forward, backward, or nothing for both together.
    pub pass: Option<Pass>,
    /// Mask.
    pub mask: Mask,
    /// Head width.
    pub head_dim: u64,
    /// Who measured.
    pub source: &'static str,
    /// Positions.
    pub seq_len: u64,
    /// TFLOP/s over the scores that exist.
    pub tflops: f64,
}

/// Rate of causal attention with a number of heads, one sequence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadsRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Forward or backward.
    pub pass: Pass,
    /// Positions.
    pub seq_len: u64,
    /// Query heads and key/value heads.
    pub heads: [u64; 2],
    /// Widths of queries and of values.
    pub dims: [u64; 2],
    /// Who measured.
    pub source: &'static str,
    /// TFLOP/s over the scores that exist.
    pub tflops: f64,
}

/// Rate of the product of all experts of a rank, as training runs it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Operands.
    pub dtype: Dtype,
    /// Which of the three products.
    pub pass: Pass,
    /// Experts.
    pub groups: u64,
    /// Rows of each.
    pub rows_per_group: u64,
    /// Output and input width of the forward product.
    pub widths: [u64; 2],
    /// TFLOP/s.
    pub tflops: f64,
}

/// Rate of a whole fused MoE forward, which the priced parts must add up to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FusedMoeRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Operands.
    pub dtype: Dtype,
    /// Hidden size, expert width, experts, top-k, ranks the experts are spread over.
    pub model: [u64; 5],
    /// Tokens.
    pub tokens: u64,
    /// TFLOP/s.
    pub tflops: f64,
}

/// One collective inside an NVLink domain, by size.
#[derive(Debug, Clone, PartialEq)]
pub struct CollectiveRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// Kind.
    pub kind: CollectiveKind,
    /// Ranks.
    pub ranks: u32,
    /// Least latency of any size, microseconds.
    pub latency_us_min: f64,
    /// Bytes of the full buffer and bus bandwidth in GB/s, ascending.
    pub busbw: Vec<(u64, f64)>,
}

/// One size of a collective across nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InterNodeRow {
    /// Cluster preset.
    pub cluster: &'static str,
    /// Kind.
    pub kind: CollectiveKind,
    /// Ranks, and how many of them share a domain.
    pub ranks: [u32; 2],
    /// Bytes of the full buffer.
    pub bytes: u64,
    /// Bus bandwidth, GB/s.
    pub busbw: f64,
}

/// A measured dispatch and combine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DispatchRow {
    /// GPU preset.
    pub gpu: &'static str,
    /// What moved the tokens: `all_to_all` (NCCL), `hybridep`, `deepep`, `trtllm`.
    pub kernel: &'static str,
    /// Ranks, and how many of them share a domain.
    pub ranks: [u32; 2],
    /// Tokens of a rank.
    pub tokens: u64,
    /// Width.
    pub hidden: u64,
    /// Experts chosen a token.
    pub topk: u64,
    /// Experts.
    pub experts: u64,
    /// Type of what is dispatched; what is combined is bf16.
    pub dispatch_dtype: Dtype,
    /// Dispatch, microseconds.
    pub dispatch_us: f64,
    /// Combine, microseconds.
    pub combine_us: f64,
}
