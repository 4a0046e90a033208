//! The throughput benchmark: a model trained on random tokens under some layout.
//!
//! A step is forward, backward, clipping and AdamW, nothing left out, in f32. What other frameworks do with the
//! same configuration and batch is to be compared with it.

use std::collections::BTreeMap;

use moefold_planner::layout::Batch;
use moefold_planner::model::Model;
use moefold_planner::model::count::{flops_per_token, params};
use moefold_planner::plan::{LayoutRecord, PlannedLayout};
use moefold_profiles::statistics::quantile;
use moefold_profiles::trace::TimeByCategory;
use serde::Serialize;

use crate::data::Samples;
use crate::device::DeviceSpec;
use crate::error::Error;
use crate::options::TrainOptions;
use crate::train;

/// Steps before the timed ones.
const WARMUP_STEPS: u64 = 3;

/// How to run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BenchOptions {
    /// Sequences of a step, and their length.
    pub batch: Batch,
    /// What every rank computes on.
    pub device: DeviceSpec,
    /// Timed steps.
    pub steps: u64,
}

/// What it measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchResult {
    /// Name of the model.
    pub model: String,
    /// Its parameters.
    pub params: u64,
    /// Tokens a sequence.
    pub seq_len: u64,
    /// Sequences a step.
    pub global_batch: u64,
    /// Kind of device, `cpu` or `cuda`.
    pub device: &'static str,
    /// Rank threads.
    pub ranks: u32,
    /// How they divide the model and the sequences.
    pub layout: LayoutRecord,
    /// Timed steps.
    pub steps: u64,
    /// Tokens a second at the median step.
    pub tokens_per_s: f64,
    /// The same at the quarter of slowest and of fastest steps.
    pub tokens_per_s_quartiles: [f64; 2],
    /// Median seconds of a step.
    pub step_s: f64,
    /// Model GFLOP/s at the median step, attention counted causal.
    pub model_gflops: f64,
    /// Seconds of the median step by category.
    pub time_s: TimeByCategory,
    /// Seconds of the median step by op or collective.
    pub busy_s: BTreeMap<String, f64>,
    /// Peak bytes of the worst rank.
    pub peak_bytes: u64,
    /// Loss of the last step: equal runs have equal bits.
    pub final_loss: f64,
}

/// Trains a model under a layout and says how fast it went. Refuses what [`train::run`] refuses.
pub fn measure(
    model: &Model,
    plan: &PlannedLayout,
    options: &BenchOptions,
) -> Result<BenchResult, Error> {
    let batch = &options.batch;
    let samples = Samples::random(model.vocab_size, batch, 16)?;
    let train = TrainOptions::unpractised(WARMUP_STEPS + options.steps.max(1), options.device);
    let trained = train::run(plan, model, batch, &train, &samples, &|_| ())?;
    let timed = &trained.steps[WARMUP_STEPS as usize..];
    let rates: Vec<f64> = timed.iter().map(|step| step.tokens_per_s).collect();
    let [slow, tokens_per_s, fast] =
        [0.25, 0.5, 0.75].map(|q| quantile(rates.clone(), q).unwrap_or(0.0));
    let step_s = (batch.seq_len * batch.global_batch) as f64 / tokens_per_s;
    let summary = trained.summary;
    let scale = step_s / summary.step_s;
    Ok(BenchResult {
        model: model.name.clone(),
        params: params(model).total(),
        seq_len: batch.seq_len,
        global_batch: batch.global_batch,
        device: options.device.name(),
        ranks: plan.layout.tp * plan.layout.cp * plan.layout.dp * plan.layout.pp,
        layout: plan.layout,
        steps: timed.len() as u64,
        tokens_per_s,
        tokens_per_s_quartiles: [slow, fast],
        step_s,
        model_gflops: flops_per_token(model, batch.seq_len).0 * tokens_per_s / 1e9,
        time_s: summary.time_s.scaled(scale),
        busy_s: summary
            .busy_s
            .into_iter()
            .map(|(name, seconds)| (name, seconds * scale))
            .collect(),
        peak_bytes: timed.last().map_or(0, |step| step.peak_bytes.0),
        final_loss: summary.final_loss,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unpriced::planned;

    #[test]
    fn differential_two_ranks_train_as_one_does() {
        let model = Model::resolve("tiny-mixtral").expect("a preset");
        // What an unoptimized build can run.
        let options = BenchOptions {
            batch: Batch {
                seq_len: 16,
                global_batch: 4,
            },
            device: DeviceSpec::Cpu {
                threads_per_rank: Some(1),
            },
            steps: 1,
        };
        let run = |ranks| {
            let layout = LayoutRecord {
                tp: 1,
                cp: 1,
                dp: ranks,
                pp: 1,
                vpp: 1,
                ep: ranks,
                etp: 1,
                edp: 1,
                mbs: 4 / ranks,
                microbatches: 1,
            };
            measure(&model, &planned(&model, layout), &options).expect("runs")
        };
        let (one, two) = (run(1), run(2));
        assert!((one.final_loss - two.final_loss).abs() < 1e-5 * one.final_loss);
        assert!(one.tokens_per_s > 0.0 && one.busy_s["grouped_gemm"] > 0.0);
        assert!((one.time_s.total().0 - one.step_s).abs() < 1e-6 * one.step_s);
        assert_eq!((one.ranks, two.ranks), (1, 2));
    }
}
