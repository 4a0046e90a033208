//! [`check_request`]: what refuses a request before any tuple of degrees is looked at; and
//! [`LeftOut`]: why a legal layout is not tried.

use super::shape::Question;
use crate::layout::{Illegal, Layout};
use crate::model::Model;
use crate::options::{PlanError, SearchOptions};
use crate::rules::{Rules, nearest_legal};

/// Tokens a context-parallel rank has of a sequence at least: Megatron-Core's guide advises against
/// fewer (arXiv 2603.07685, section 6.3). A pinned degree is taken as it is.
const CONTEXT_TOKENS: u64 = 4096;

/// Why a legal layout is not tried: common practice, which a pin overrides.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeftOut {
    /// Tensor parallelism across NVLink domains.
    #[error("{key} {degree} leaves the NVLink domain of {domain}; pin it to try")]
    Domain {
        reason: &'static str,
        key: &'static str,
        degree: u32,
        domain: u32,
    },
    /// Context parallelism of short sequences.
    #[error("cp {cp} leaves {chunk} tokens of a sequence a rank, fewer than 4096; pin it to try")]
    ShortSequence { cp: u32, chunk: u64 },
}

impl LeftOut {
    /// The short key it is counted under.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::Domain { reason, .. } => reason,
            Self::ShortSequence { .. } => "cp_short_sequence",
        }
    }

    /// Why a legal layout is left out, if it is.
    pub(crate) fn of(question: &Question<'_>, layout: &Layout) -> Option<Self> {
        let (options, pins) = (question.options, &question.options.pins);
        let domain = question.cluster.gpus_per_domain;
        for (reason, key, degree, pinned) in [
            ("tp_over_domain", "tp", layout.tp(), pins.tp),
            ("etp_over_domain", "etp", layout.etp(), pins.etp),
        ] {
            if degree > domain.max(1) && pinned.is_none() {
                return Some(Self::Domain {
                    reason,
                    key,
                    degree,
                    domain,
                });
            }
        }
        let (cp, chunk) = (layout.cp(), options.batch.seq_len / u64::from(layout.cp()));
        let short = cp > 1 && chunk < CONTEXT_TOKENS && pins.cp.is_none();
        short.then_some(Self::ShortSequence { cp, chunk })
    }
}

/// Refuses what no layout can serve: an empty batch, choices and pinned degrees that break a rule
/// whatever the rest is, routing of another model.
pub(crate) fn check_request(
    model: &Model,
    gpus: u32,
    options: &SearchOptions,
    rules: &Rules,
) -> Result<(), PlanError> {
    for (option, size) in [
        ("seq_len", options.batch.seq_len),
        ("global_batch", options.batch.global_batch),
    ] {
        if size == 0 {
            return Err(PlanError::Value {
                option,
                value: size.to_string(),
                expected: "at least 1".to_owned(),
            });
        }
    }
    let headroom = options.memory_headroom;
    if !(0.0..1.0).contains(&headroom) {
        return Err(PlanError::Value {
            option: "memory_headroom",
            value: (100.0 * headroom).to_string(),
            expected: "percent of a device's memory to leave free, from 0 to below 100".to_owned(),
        });
    }
    let broken = rules.contradictions(&options.pins, gpus);
    if !broken.is_empty() {
        let too_many = |illegal: &Illegal| matches!(illegal, Illegal::TooManyGpus { .. });
        let nearest = if broken.iter().any(too_many) {
            None
        } else {
            nearest_legal(rules, model, &options.pins, gpus)
        };
        // Where the pins themselves are legal, they are no advice.
        let nearest = nearest.filter(|nearest| *nearest != options.pins);
        return Err(PlanError::Layout { broken, nearest });
    }
    match &options.routing {
        Some(routing) => routing.check(model),
        None => Ok(()),
    }
}
