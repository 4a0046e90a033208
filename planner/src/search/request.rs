//! [`check_request`]: what refuses a request before any tuple of degrees is looked at.

use crate::layout::Illegal;
use crate::model::Model;
use crate::options::{PlanError, SearchOptions};
use crate::rules::{Rules, nearest_legal};

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
