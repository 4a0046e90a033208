//! The throughput benchmark: one fixed model trained on random tokens.
//!
//! A Qwen3-MoE of 37 million parameters: hidden 512, 4 layers, 8 query and 4 key/value heads of 64,
//! 16 experts of width 256, top-2, vocabulary 8192. A step has 4 sequences of 256 tokens, in f32: forward,
//! backward, clipping and AdamW, nothing left out. The same model and batch are what
//! other frameworks are compared with. Several ranks divide the batch (DP) and the experts (EP).

use std::collections::BTreeMap;

use moefold_planner::layout::Batch;
use moefold_planner::model::count::flops_per_token;
use moefold_planner::model::{Model, hf};
use moefold_planner::plan::LayoutRecord;
use moefold_profiles::statistics::median;
use moefold_profiles::trace::TimeByCategory;
use serde::Serialize;

use crate::data::Samples;
use crate::device::DeviceSpec;
use crate::error::Error;
use crate::lr::LearningRate;
use crate::moe::balance::Balancing;
use crate::optimizer::AdamOptions;
use crate::options::{Init, TrainOptions};
use crate::train;
use crate::unpriced::planned;

/// The model, as other frameworks read it.
pub const CONFIG: &str = r#"{
  "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 8192,
  "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
  "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
  "intermediate_size": 1024, "norm_topk_prob": true, "decoder_sparse_step": 1,
  "mlp_only_layers": [], "hidden_act": "silu", "max_position_embeddings": 4096,
  "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": false,
  "initializer_range": 0.02, "router_aux_loss_coef": 0.0, "attention_bias": false
}"#;

/// Tokens a sequence and sequences a step.
pub const BATCH: Batch = Batch {
    seq_len: 256,
    global_batch: 4,
};

/// Steps before the timed ones.
const WARMUP_STEPS: u64 = 3;

/// How to run it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BenchOptions {
    /// Rank threads: 1, 2 or 4.
    pub ranks: u32,
    /// What every rank computes on.
    pub device: DeviceSpec,
    /// Timed steps.
    pub steps: u64,
}

/// What it measured.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BenchResult {
    /// Kind of device, `cpu` or `cuda`.
    pub device: &'static str,
    /// Rank threads.
    pub ranks: u32,
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

/// The model of the benchmark.
pub fn model() -> Model {
    hf::parse("bench-qwen3-moe", CONFIG).expect("the embedded configuration is valid")
}

/// Trains the fixed model and says how fast it went.
pub fn tokens_per_s(options: &BenchOptions) -> Result<BenchResult, Error> {
    measure(&model(), options)
}

fn measure(model: &Model, options: &BenchOptions) -> Result<BenchResult, Error> {
    let ranks = options.ranks;
    if ranks == 0 || !BATCH.global_batch.is_multiple_of(u64::from(ranks)) {
        return Err(Error::Request(format!(
            "{ranks} ranks cannot share the benchmark's {} sequences; use 1, 2 or 4",
            BATCH.global_batch
        )));
    }
    let layout = LayoutRecord {
        tp: 1,
        cp: 1,
        dp: ranks,
        pp: 1,
        vpp: 1,
        ep: ranks,
        etp: 1,
        edp: 1,
        mbs: BATCH.global_batch as u32 / ranks,
        microbatches: 1,
    };
    let samples = Samples::random(model.vocab_size, &BATCH, 16)?;
    let train = TrainOptions {
        steps: WARMUP_STEPS + options.steps.max(1),
        lr: LearningRate::constant(1e-4),
        adam: AdamOptions::default(),
        balancing: Balancing::default(),
        mtp_loss_scaling_factor: crate::options::MTP_LOSS_SCALING_FACTOR,
        seed: 1,
        init: Init::Random,
        device: options.device,
        traced_steps: 0..0,
        save: None,
    };
    let plan = planned(model, layout);
    let trained = train::run(&plan, model, &BATCH, &train, &samples, &|_| ())?;
    let timed = &trained.steps[WARMUP_STEPS as usize..];
    let mut rates: Vec<f64> = timed.iter().map(|step| step.tokens_per_s).collect();
    rates.sort_by(f64::total_cmp);
    let tokens_per_s = median(rates.clone()).unwrap_or(0.0);
    let step_s = (BATCH.seq_len * BATCH.global_batch) as f64 / tokens_per_s;
    let summary = trained.summary;
    let scale = step_s / summary.step_s;
    Ok(BenchResult {
        device: options.device.name(),
        ranks,
        steps: timed.len() as u64,
        tokens_per_s,
        tokens_per_s_quartiles: [rates[rates.len() / 4], rates[(rates.len() - 1) * 3 / 4]],
        step_s,
        model_gflops: flops_per_token(model, BATCH.seq_len).0 * tokens_per_s / 1e9,
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
    use moefold_planner::model::count::params;

    #[test]
    fn golden_size_of_the_model() {
        // 2 * 8192*512 vocabulary matrices, a final norm of 512, and in each of 4 layers
        // 512*64*(8 + 2*4) + 8*64*512 of attention, norms of 2*512 + 2*64, a router of 16*512 and
        // 16 experts of 3*512*256.
        let layer = 512 * 64 * 16 + 512 * 512 + 2 * 512 + 2 * 64 + 16 * 512 + 16 * 3 * 512 * 256;
        assert_eq!(params(&model()).total(), 2 * 8192 * 512 + 512 + 4 * layer);
    }

    #[test]
    fn ranks_must_share_the_batch() {
        let options = BenchOptions {
            ranks: 3,
            device: DeviceSpec::CPU,
            steps: 1,
        };
        let text = tokens_per_s(&options).expect_err("refused").to_string();
        assert!(text.contains("use 1, 2 or 4"), "{text}");
    }

    #[test]
    fn differential_two_ranks_train_as_one_does() {
        // The same shape made small: an unoptimized build has to run it.
        let small = CONFIG
            .replace("512", "64")
            .replace("8192", "300")
            .replace(
                "\"moe_intermediate_size\": 256",
                "\"moe_intermediate_size\": 32",
            )
            .replace("\"head_dim\": 64", "\"head_dim\": 16");
        let model = hf::parse("small", &small).expect("valid");
        let run = |ranks| {
            let options = BenchOptions {
                ranks,
                device: DeviceSpec::Cpu {
                    threads_per_rank: Some(1),
                },
                steps: 1,
            };
            measure(&model, &options).expect("runs")
        };
        let (one, two) = (run(1), run(2));
        assert!((one.final_loss - two.final_loss).abs() < 1e-5 * one.final_loss);
        assert!(one.tokens_per_s > 0.0 && one.busy_s["grouped_gemm"] > 0.0);
        assert!((one.time_s.total().0 - one.step_s).abs() < 1e-6 * one.step_s);
    }
}
