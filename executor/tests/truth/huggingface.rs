//! One rank against Hugging Face transformers: losses, gradient norms and updated weights.

use crate::common::{Fixture, assert_close, degrees};

/// Relative, of losses, norms and tensor norms.
const TOLERANCE: f64 = 1e-4;

fn check(name: &'static str, mbs: u32) {
    let fixture = Fixture::load(name);
    let steps = fixture.golden.steps.len() as u64;
    let trained = fixture.train(&degrees(1, 1, 1, 1, mbs), steps, &fixture.options());
    for (step, (found, golden)) in trained.steps.iter().zip(&fixture.golden.steps).enumerate() {
        let what = |value: &str| format!("{name}, mbs {mbs}, step {step}, {value}");
        assert_close(found.loss, golden.loss, TOLERANCE, &what("loss"));
        assert_eq!(found.mtp_losses.len(), golden.mtp_losses.len());
        for (found, golden) in found.mtp_losses.iter().zip(&golden.mtp_losses) {
            assert_close(*found, *golden, TOLERANCE, &what("mtp_losses"));
        }
        assert_close(
            found.grad_norm,
            golden.grad_norm,
            TOLERANCE,
            &what("grad_norm"),
        );
    }
    assert_eq!(
        trained.weights.keys().collect::<Vec<_>>(),
        fixture.golden.r#final.keys().collect::<Vec<_>>()
    );
    for (tensor, &(sum, norm)) in &fixture.golden.r#final {
        let values = trained.weights[tensor].iter().map(|&v| f64::from(v));
        let found_norm = values.clone().map(|v| v * v).sum::<f64>().sqrt();
        assert_close(
            found_norm,
            norm,
            TOLERANCE,
            &format!("{name}: norm of {tensor}"),
        );
        // A sum may cancel; what its terms can be wrong by together is set by the norm.
        let error = (values.sum::<f64>() - sum).abs();
        assert!(
            error <= TOLERANCE * norm,
            "{name}: sum of {tensor} is off by {error:e}"
        );
    }
}

#[test]
fn oracle_mixtral() {
    check("mixtral", 24);
    check("mixtral", 4);
}

#[test]
fn oracle_qwen3_moe() {
    check("qwen3_moe", 24);
    check("qwen3_moe", 4);
}

#[test]
fn oracle_qwen3_moe_with_raw_probabilities() {
    check("qwen3_moe_raw", 12);
}

#[test]
fn oracle_dense_qwen3_with_tied_embeddings() {
    check("qwen3_tied", 12);
}

#[test]
fn oracle_qwen2_moe_with_shared_experts_behind_gates() {
    check("qwen2_moe", 24);
    check("qwen2_moe", 4);
}

#[test]
fn oracle_olmoe_with_norms_over_whole_projections() {
    check("olmoe", 12);
}

#[test]
fn oracle_glm4_moe_with_sigmoid_scores_in_groups() {
    check("glm4_moe", 24);
    check("glm4_moe", 4);
}

#[test]
fn oracle_mistral() {
    check("mistral", 12);
}

#[test]
fn oracle_llama_with_biases_of_attention() {
    check("llama", 12);
}

#[test]
fn oracle_llama_with_frequencies_stretched_as_in_3_1() {
    check("llama3", 12);
}

#[test]
fn oracle_gpt_oss_with_sinks_windows_and_biases() {
    check("gpt_oss", 24);
    check("gpt_oss", 4);
}

#[test]
fn oracle_sliding_windows_of_layers_that_have_them() {
    for name in ["mixtral_windows", "qwen2_moe_windows", "qwen3_windows"] {
        check(name, 12);
    }
}

#[test]
fn oracle_deepseek_v3_with_latent_attention_and_compressed_queries() {
    check("deepseek_v3", 24);
    check("deepseek_v3", 4);
}

#[test]
fn oracle_deepseek_v2_with_queries_projected_at_once() {
    check("deepseek_v2", 12);
}

#[test]
fn oracle_latent_attention_that_rotates_halves() {
    check("deepseek_v3_halves", 12);
}

#[test]
fn oracle_two_depths_of_multi_token_prediction() {
    check("deepseek_v3_mtp", 24);
    check("deepseek_v3_mtp", 4);
}
