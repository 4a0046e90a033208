//! [`Refusal`]: why a tuple of degrees is not priced, besides memory.

use super::shape::Question;
use crate::layout::{Illegal, Layout};

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
