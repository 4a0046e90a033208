//! [`Illegal`]: a rule of parallel layouts that some degrees break.
//!
//! Each variant carries the two numbers that do not go together; its message adds the nearest
//! values that would. The rules are those Megatron-Core checks when it builds process groups and
//! validates arguments (`megatron/core/parallel_state.py`, `megatron/training/arguments.py`,
//! main of August 2026). Refusing a layout is a result, not an error of the program.

use std::fmt;

/// The most ranks a job may have: far above any machine, and small enough that listing them all is
/// harmless.
pub const MAX_GPUS: u32 = 1 << 20;

/// The most microbatches a step may have.
pub const MAX_MICROBATCHES: u32 = 1 << 20;

/// A rule that some degrees break, with both numbers and the nearest legal values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, thiserror::Error)]
#[expect(
    missing_docs,
    reason = "the fields are the quantities their variant's sentence names"
)]
pub enum Illegal {
    /// A degree or size of zero.
    #[error("{key} is 0, and must be at least 1")]
    Zero { key: &'static str },
    /// More ranks than this program lists.
    #[error("{gpus} GPUs are more than the {MAX_GPUS} this program plans for")]
    TooManyGpus { gpus: u32 },
    /// The attention grid does not tile the ranks.
    #[error("{gpus} GPUs are not divisible by tp x cp x pp = {tp} x {cp} x {pp} = {}; nearest: {} GPUs, or a product of {}",
        product(&[*tp, *cp, *pp]), multiples(*gpus, product(&[*tp, *cp, *pp])), divisors((*gpus).into(), product(&[*tp, *cp, *pp])))]
    AttentionGrid {
        gpus: u32,
        tp: u32,
        cp: u32,
        pp: u32,
    },
    /// The expert grid does not tile the ranks.
    #[error("{gpus} GPUs are not divisible by etp x ep x pp = {etp} x {ep} x {pp} = {}; nearest: {} GPUs, or a product of {}",
        product(&[*etp, *ep, *pp]), multiples(*gpus, product(&[*etp, *ep, *pp])), divisors((*gpus).into(), product(&[*etp, *ep, *pp])))]
    ExpertGrid {
        gpus: u32,
        etp: u32,
        ep: u32,
        pp: u32,
    },
    /// The pipeline groups of the two grids differ under an order that does not put pp last.
    #[error(
        "with pp before dp in the rank order, pp = {pp} needs edp = dp, and here edp = {edp} and dp = {dp}; nearest: pp = 1, ep x etp = tp x cp, or the order tp-cp-ep-dp-pp"
    )]
    PipelineGroups { pp: u32, dp: u32, edp: u32 },
    /// A data-parallel degree was given that the others contradict.
    #[error(
        "{key} = {given} was asked for, but the other degrees give {key} = {found}; nearest: leave {key} out, or {key}={found}"
    )]
    Replicas {
        key: &'static str,
        given: u32,
        found: u32,
    },
    /// Experts cannot be spread evenly over EP.
    #[error("{experts} experts are not divisible by ep = {ep}; nearest: ep = {}", divisors(*experts, (*ep).into()))]
    Experts { experts: u64, ep: u32 },
    /// An expert's width cannot be split by ETP.
    #[error("expert width {width} is not divisible by etp = {etp}; nearest: etp = {}", divisors(*width, (*etp).into()))]
    ExpertWidth { width: u64, etp: u32 },
    /// Expert parallelism on a model without experts.
    #[error("the model has no experts, so {key} = {degree} splits nothing; nearest: {key} = 1")]
    NoExperts { key: &'static str, degree: u32 },
    /// Attention (or state) heads cannot be split by TP.
    #[error("{heads} heads are not divisible by tp = {tp}; nearest: tp = {}", divisors(*heads, (*tp).into()))]
    Heads { heads: u64, tp: u32 },
    /// Key/value heads can neither be split nor replicated evenly.
    #[error("{kv_heads} key/value heads are neither a multiple nor a divisor of tp = {tp}; nearest: tp = {}",
        Nearest::around((*tp).into(), |tp| tp % kv_heads == 0 || kv_heads % tp == 0))]
    KvHeads { kv_heads: u64, tp: u32 },
    /// The residual width cannot be split by TP.
    #[error("hidden size {hidden} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*hidden, (*tp).into()))]
    Hidden { hidden: u64, tp: u32 },
    /// A dense MLP cannot be split by TP.
    #[error("dense MLP width {width} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*width, (*tp).into()))]
    DenseWidth { width: u64, tp: u32 },
    /// The shared expert cannot be split by TP.
    #[error("shared expert width {width} is not divisible by tp = {tp}; nearest: tp = {}", divisors(*width, (*tp).into()))]
    SharedWidth { width: u64, tp: u32 },
    /// The sequence cannot be cut into the 2 CP chunks of the causal zig-zag.
    #[error("sequence length {seq_len} is not divisible by 2 x cp = {}; nearest: cp = {}, or a sequence length of {}",
        2 * u64::from(*cp), Nearest::around((*cp).into(), |cp| cp == 1 || seq_len % (2 * cp) == 0), multiples(*seq_len, 2 * u64::from(*cp)))]
    SequenceOverCp { seq_len: u64, cp: u32 },
    /// Sequence parallelism cannot cut a context-parallel shard.
    #[error("sequence length {seq_len} over cp = {cp} is not divisible by tp = {tp}, which sequence parallelism needs; nearest: tp = {}, or a sequence length of {}",
        divisors(seq_len / u64::from(*cp), (*tp).into()), multiples(*seq_len, sequence_unit(*cp, *tp)))]
    SequenceOverTp { seq_len: u64, cp: u32, tp: u32 },
    /// The batch cannot be dealt to the replicas in whole microbatches.
    #[error("global batch {global_batch} is not divisible by mbs x dp = {mbs} x {dp} = {}; nearest: a global batch of {}, or mbs x dp = {}",
        product(&[*mbs, *dp]), multiples(*global_batch, product(&[*mbs, *dp])), divisors(*global_batch, product(&[*mbs, *dp])))]
    GlobalBatch {
        global_batch: u64,
        mbs: u32,
        dp: u32,
    },
    /// More microbatches than this program schedules.
    #[error(
        "a step of {microbatches} microbatches is more than the {MAX_MICROBATCHES} this program schedules; nearest: a smaller global batch, or a larger mbs or dp"
    )]
    Microbatches { microbatches: u64 },
    /// Virtual stages without a pipeline.
    #[error("vpp = {vpp} needs a pipeline, and pp = 1; nearest: vpp = 1, or pp = 2")]
    InterleavedAlone { vpp: u32 },
    /// The interleaved schedule works in groups of PP microbatches.
    #[error("vpp = {vpp} interleaves groups of pp = {pp} microbatches, and a step has {microbatches}; nearest: {} microbatches, or vpp = 1",
        multiples(*microbatches, (*pp).into()))]
    InterleavedGroups {
        vpp: u32,
        microbatches: u32,
        pp: u32,
    },
    /// More stages than layers.
    #[error("{layers} layers cannot fill pp x vpp = {pp} x {vpp} = {} stages; nearest: pp x vpp = {layers} or less",
        product(&[*pp, *vpp]))]
    EmptyStages { layers: u64, pp: u32, vpp: u32 },
}

impl Illegal {
    /// A short stable key, for counting refusals.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Zero { .. } => "zero",
            Self::TooManyGpus { .. } => "too_many_gpus",
            Self::AttentionGrid { .. } => "attention_grid",
            Self::ExpertGrid { .. } => "expert_grid",
            Self::PipelineGroups { .. } => "pipeline_groups",
            Self::Replicas { .. } => "replicas",
            Self::Experts { .. } => "experts_over_ep",
            Self::ExpertWidth { .. } => "expert_width_over_etp",
            Self::NoExperts { .. } => "no_experts",
            Self::Heads { .. } => "heads_over_tp",
            Self::KvHeads { .. } => "kv_heads_over_tp",
            Self::Hidden { .. } => "hidden_over_tp",
            Self::DenseWidth { .. } => "dense_width_over_tp",
            Self::SharedWidth { .. } => "shared_width_over_tp",
            Self::SequenceOverCp { .. } => "sequence_over_cp",
            Self::SequenceOverTp { .. } => "sequence_over_tp",
            Self::GlobalBatch { .. } => "global_batch",
            Self::Microbatches { .. } => "microbatches",
            Self::InterleavedAlone { .. } => "vpp_without_pp",
            Self::InterleavedGroups { .. } => "vpp_microbatches",
            Self::EmptyStages { .. } => "empty_stages",
        }
    }
}

/// A product that stays at the top instead of wrapping: such a product divides nothing real.
pub(super) fn product(factors: &[u32]) -> u64 {
    factors
        .iter()
        .fold(1, |product: u64, &f| product.saturating_mul(f.into()))
}

/// What a sequence must be a multiple of to be cut by the zig-zag of CP and then by TP.
fn sequence_unit(cp: u32, tp: u32) -> u64 {
    let halves = if cp > 1 && !tp.is_multiple_of(2) {
        2
    } else {
        1
    };
    product(&[halves, cp, tp])
}

/// The legal values on either side of a value that is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Nearest {
    pub(super) below: Option<u64>,
    pub(super) above: Option<u64>,
}

impl Nearest {
    /// How far to look; beyond that a suggestion would help nobody.
    const REACH: u64 = 1 << 16;

    /// The nearest values of at least 1 that are legal.
    pub(super) fn around(value: u64, legal: impl Fn(u64) -> bool) -> Self {
        let lowest = value.saturating_sub(Self::REACH).max(1);
        let highest = value.saturating_add(Self::REACH);
        Self {
            below: (lowest..value).rev().find(|&v| legal(v)),
            above: (value.saturating_add(1)..=highest).find(|&v| legal(v)),
        }
    }
}

/// The divisors of `whole` nearest to `part`.
pub(super) fn divisors(whole: u64, part: u64) -> Nearest {
    let inside = Nearest::around(part.min(whole.saturating_add(1)), |v| {
        whole.is_multiple_of(v)
    });
    Nearest {
        below: inside.below,
        above: inside.above.filter(|&v| v <= whole),
    }
}

/// The positive multiples of `unit` nearest to `value`.
pub(super) fn multiples(value: impl Into<u64>, unit: u64) -> Nearest {
    let below = value.into() / unit.max(1) * unit;
    Nearest {
        below: Some(below).filter(|&v| v > 0),
        above: below.checked_add(unit),
    }
}

impl fmt::Display for Nearest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.below, self.above) {
            (Some(below), Some(above)) => write!(f, "{below} or {above}"),
            (Some(only), None) | (None, Some(only)) => write!(f, "{only}"),
            (None, None) => write!(f, "1"),
        }
    }
}
