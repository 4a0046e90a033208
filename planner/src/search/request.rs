//! [`check_request`]: what refuses a request before any tuple of degrees is looked at.

use super::asked::Asked;
use super::judged;
use super::watch::{Aim, Looks, Phase, aimed};
use crate::layout::{Illegal, MAX_GPUS, PartialDegrees};
use crate::options::PlanError;
use crate::rules::{Rules, TOGETHER, nearest_legal, space};

/// Refuses what no layout can serve: an empty batch, choices and pinned degrees that break a rule
/// whatever the rest is, routing of another model.
pub(crate) fn check_request(asked: &Asked<'_>, rules: &Rules) -> Result<(), PlanError> {
    let (model, gpus, options) = (asked.model, asked.gpus, asked.options);
    for (option, size) in [
        ("seq_len", options.batch.seq_len),
        ("global_batch", options.batch.global_batch),
        (
            "num_distributed_optimizer_instances",
            options.instances.into(),
        ),
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
        // Where no degrees would do, or the pins themselves are legal, there is no advice.
        let is_too_much =
            |rule: &Illegal| matches!(rule, Illegal::TooManyGpus { .. } | Illegal::Huge { .. });
        let nearest = (!broken.iter().any(is_too_much))
            .then(|| nearest(asked, rules))
            .flatten()
            .filter(|nearest| *nearest != options.pins);
        return Err(PlanError::Layout { broken, nearest });
    }
    match &options.routing {
        Some(routing) => routing.check(model),
        None => Ok(()),
    }
}

/// The legal degrees nearest to those that are pinned; none where the search is stopped.
pub(super) fn nearest(asked: &Asked<'_>, rules: &Rules) -> Option<PartialDegrees> {
    let watch = aimed(Aim::Nearest, asked.watch);
    let looks = Looks::new(&watch, Phase::Judging, 0);
    nearest_legal(rules, asked.model, &asked.options.pins, asked.gpus, || {
        let go_on = looks.look();
        looks.seen(TOGETHER);
        go_on
    })
}

/// Other numbers of GPUs that are tried at most on either side, and candidates that are judged.
const TRIED: usize = 1 << 9;
const JUDGED: usize = 1 << 18;

/// The nearest numbers of GPUs on which some layout is legal that agrees with the pins, one below and one above, as far as they
/// are found before enough is judged or the search is stopped.
pub(super) fn nearest_gpus(asked: &Asked<'_>, rules: &Rules) -> Vec<u32> {
    let watch = aimed(Aim::Nearest, asked.watch);
    let looks = Looks::new(&watch, Phase::Judging, 0);
    let rules = &rules.of_degrees();
    let mut broken = Vec::new();
    let space = |gpus: u32| {
        let each = judged::pins(asked.options, gpus).into_iter();
        each.flat_map(move |pins| space(asked.model, gpus, rules.batch(), &pins))
    };
    let mut nearest = |each: &mut dyn Iterator<Item = u32>| {
        let mut judged = 0;
        for gpus in each.take(TRIED) {
            for degrees in space(gpus) {
                let stops = judged % TOGETHER == 0 && looks.look().is_break();
                if stops || judged == JUDGED {
                    return None;
                }
                judged += 1;
                if rules.judge(&degrees, true, &mut broken).is_some() {
                    return Some(gpus);
                }
            }
        }
        None
    };
    let most = asked.cluster.num_gpus.unwrap_or(MAX_GPUS).min(MAX_GPUS);
    let below = nearest(&mut (1..asked.gpus).rev());
    let above = nearest(&mut (asked.gpus.saturating_add(1)..=most));
    below.into_iter().chain(above).collect()
}
