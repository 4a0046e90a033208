//! [`Refusal`]: why a tuple of degrees is not priced, besides memory; and [`check_request`]: what
//! refuses a request before any tuple is looked at.

use super::shape::Question;
use crate::layout::{Illegal, Layout, PartialDegrees, Rules, nearest_legal};
use crate::model::Model;
use crate::options::{PlanError, SearchOptions};

/// Tokens a context-parallel rank has of a sequence at least: Megatron-Core's guide advises against
/// fewer (arXiv 2603.07685, section 6.3). A pinned degree is taken as it is.
const CONTEXT_TOKENS: u64 = 4096;

/// Why a tuple of degrees is not priced.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// It is not legal.
    #[error("{0}")]
    Illegal(Illegal),
    /// The stack does not run it.
    #[error("the chosen stack runs {key} up to {limit}, not {degree}")]
    Stack {
        reason: &'static str,
        key: &'static str,
        degree: u32,
        limit: u32,
    },
    /// It is legal and nobody runs it: tensor parallelism across NVLink domains.
    #[error("{key} {degree} leaves the NVLink domain of {domain}; pin it to try")]
    Domain {
        reason: &'static str,
        key: &'static str,
        degree: u32,
        domain: u32,
    },
    /// Likewise context parallelism of short sequences.
    #[error("cp {cp} leaves {chunk} tokens of a sequence a rank, fewer than 4096; pin it to try")]
    ShortSequence { cp: u32, chunk: u64 },
    /// Megatron-Core exchanges messages of two interleaved ranks only while they compute.
    #[error(
        "virtual stages over pp 2 need p2p overlap (Megatron-Core), which --overlap leaves out; \
         found vpp {vpp}, expected vpp 1, pp above 2, or p2p in --overlap"
    )]
    InterleavedPair { vpp: u32 },
    /// The given stages do not go with the degrees.
    #[error("the pipeline layout has {given} stages, pp x vpp is {stages}")]
    Stages { given: usize, stages: u32 },
}

impl Refusal {
    /// The short key it is counted under.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Illegal(illegal) => illegal.reason(),
            Self::Stack { reason, .. } | Self::Domain { reason, .. } => reason,
            Self::ShortSequence { .. } => "cp_short_sequence",
            Self::InterleavedPair { .. } => "vpp_pair_without_p2p",
            Self::Stages { .. } => "pipeline_layout",
        }
    }
}

/// What refuses a legal layout: the stack, common practice, given stages.
pub(crate) fn unable(question: &Question<'_>, layout: &Layout) -> Option<Refusal> {
    let (options, pins) = (question.options, &question.options.pins);
    for (reason, key, degree, limit) in [
        ("stack_cp", "cp", layout.cp(), question.stack.max_cp),
        ("stack_pp", "pp", layout.pp(), question.stack.max_pp),
    ] {
        if let Some(limit) = limit.filter(|&limit| degree > limit) {
            return Some(Refusal::Stack {
                reason,
                key,
                degree,
                limit,
            });
        }
    }
    if layout.vpp() > 1 && layout.pp() == 2 && !question.overlap.p2p {
        return Some(Refusal::InterleavedPair { vpp: layout.vpp() });
    }
    let domain = question.cluster.gpus_per_domain;
    for (reason, key, degree, pinned) in [
        ("tp_over_domain", "tp", layout.tp(), pins.tp),
        ("etp_over_domain", "etp", layout.etp(), pins.etp),
    ] {
        if degree > domain.max(1) && pinned.is_none() {
            return Some(Refusal::Domain {
                reason,
                key,
                degree,
                domain,
            });
        }
    }
    let (cp, chunk) = (layout.cp(), options.batch.seq_len / u64::from(layout.cp()));
    if cp > 1 && chunk < CONTEXT_TOKENS && pins.cp.is_none() {
        return Some(Refusal::ShortSequence { cp, chunk });
    }
    let given = options.stages.as_ref()?.stages().len();
    (given != layout.stages() as usize).then(|| Refusal::Stages {
        given,
        stages: layout.stages(),
    })
}

/// Refuses what no layout can serve: an empty batch, pinned degrees that contradict the ranks or (all
/// pinned) the model, stages or routing of another model.
pub(crate) fn check_request(
    model: &Model,
    gpus: u32,
    options: &SearchOptions,
) -> Result<(), PlanError> {
    let (batch, pins) = (&options.batch, &options.pins);
    for (flag, size) in [
        ("--seq-len", batch.seq_len),
        ("--global-batch", batch.global_batch),
    ] {
        if size == 0 {
            return Err(PlanError::value(flag, "0", "at least 1"));
        }
    }
    let mut broken = pins.contradictions(gpus);
    let mut nearest = None;
    if let Some(degrees) = pins.complete(gpus)
        && let Err(all) = Rules::new(model, batch).layout(&degrees)
    {
        broken.extend(all);
        broken.sort_unstable();
        broken.dedup();
        let too_many = |illegal: &Illegal| matches!(illegal, Illegal::TooManyGpus { .. });
        if !broken.iter().any(too_many) {
            nearest = nearest_legal(&degrees, model, batch)
                .map(|layout| PartialDegrees::exactly(&layout.degrees()));
        }
    }
    if !broken.is_empty() {
        return Err(PlanError::Layout { broken, nearest });
    }
    if let Some(stages) = &options.stages {
        stages.check(model)?;
    }
    match &options.routing {
        Some(routing) => routing.check(model),
        None => Ok(()),
    }
}
