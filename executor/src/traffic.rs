//! [`most`]: what a rank of a training run may have on its way to others.
//!
//! Rank 0 carries what ranks that are processes tell each other, and keeps it until all have collected it. What one
//! rank can have there is bounded by what it computes: more is no traffic of this run. The bound is a wide one, as it
//! is to end no run that trains: every part of it is counted over all ranks or a whole step, and four times.

use moefold_planner::layout::Batch;
use moefold_planner::model::{Ffn, Model, count};
use moefold_planner::plan::PlannedLayout;

use crate::model::global_tensors;
use crate::options::TrainOptions;
use crate::weights::saved_bytes;

/// Times that a part of the bound may be on its way at once: two passes take turns, and one rank may be one collective
/// ahead of another.
const AT_ONCE: u64 = 4;

/// What a rank tells of a step at the end, in JSON: times by category and by span.
const STEP_BYTES: u64 = 16 << 10;

/// What it tells of one layer in one microbatch of a traced step.
const SPANS_BYTES: u64 = 128 << 10;

/// What it tells of a tensor: where its part lies, in a checkpoint and at the end.
const TENSOR_BYTES: u64 = 16 << 10;

/// Bytes that a rank may have on its way, with what holds them.
pub(crate) fn most(
    plan: &PlannedLayout,
    model: &Model,
    batch: &Batch,
    options: &TrainOptions,
) -> u64 {
    let layout = &plan.layout;
    let ranks = u64::from(layout.tp * layout.cp * layout.pp * layout.dp);
    let layers = || model.layers.iter().chain(&model.mtp);
    let number = size_of::<f32>() as u64;
    let product = |factors: &[u64]| factors.iter().fold(1, |a: u64, &b| a.saturating_mul(b));

    // Whoever trains holds no more than all weights and as many gradients.
    let weights = saved_bytes(model);
    // A matrix of a layer has the residual stream on one side, so no row between two is as wide as all of a token's.
    let params = layers().map(|layer| count::layer(model, layer).active());
    let width = (params.max().unwrap_or(0) / model.hidden.max(1))
        .saturating_add(product(&[model.hidden, model.residual_streams]));
    let moes = layers().filter_map(|layer| match &layer.ffn {
        Some(Ffn::Moe(moe)) => Some(moe),
        _ => None,
    });
    let (topk, experts) = moes.fold((1, 0), |(topk, experts), moe| {
        (topk.max(moe.topk), experts.max(moe.experts))
    });
    let padded = plan
        .capacity
        .map_or(1.0, |capacity| capacity.factor.max(1.0));
    let tokens = product(&[layout.mbs.into(), batch.seq_len, ranks, topk]);
    let rows = (tokens as f64 * padded.ceil()) as u64;
    let rows = rows.saturating_add(product(&[experts, ranks]));
    let passes = product(&[rows, width, number]);
    // Between stages a step goes there and back.
    let stages = product(&[
        batch.global_batch,
        batch.seq_len,
        layout.vpp.into(),
        width,
        number,
    ]);
    let traced = options
        .traced_steps
        .end
        .saturating_sub(options.traced_steps.start);
    let told = [
        product(&[options.steps, STEP_BYTES]),
        product(&[
            traced,
            batch.global_batch,
            layers().count() as u64 + 2,
            SPANS_BYTES,
        ]),
        product(&[global_tensors(model).len() as u64, TENSOR_BYTES]),
    ];
    [weights, passes, stages]
        .map(|part| part.saturating_mul(AT_ONCE))
        .into_iter()
        .chain(told)
        .fold(0, u64::saturating_add)
}
