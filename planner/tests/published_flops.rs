//! FLOPs per token against published throughput: TFLOPS per GPU divided by tokens per second per GPU.
//!
//! Model cards are `examples/model_verification_cards/*/card.yaml` of NVIDIA-NeMo/Megatron-Bridge at
//! 067f987; its performance summaries and NeMo's are named by release container.
//!
//! Publishers compute the first from the second with nearly this formula, so agreement shows that
//! the metric and the shapes are the same, and nothing about time.

use moefold_planner::model::count::{FlopRules, flops_per_token, flops_per_token_with};
use moefold_planner::model::{Ffn, Layer, Mixer, Model, presets};

fn model(name: &str) -> Model {
    presets::load(name).expect(name)
}

fn without_mtp(name: &str) -> Model {
    Model {
        mtp: Vec::new(),
        ..model(name)
    }
}

/// GFLOPs a token, for a published pair of TFLOPS and tokens per second per GPU.
fn published(tflops: f64, tokens_per_s: f64) -> f64 {
    tflops * 1e3 / tokens_per_s
}

fn check(source: &str, found: moefold_profiles::units::Flops, published: f64, percent: f64) {
    let found = found.0 / 1e9;
    let off = (found / published - 1.0).abs() * 100.0;
    assert!(
        off <= percent,
        "{source}: ours {found:.3} GFLOP/token, published {published:.3}, {off:.2}% apart"
    );
}

/// A published pair: source, preset, sequence length, TFLOPS and tokens per second per GPU, and how far
/// ours may be in percent. Figures are printed with three to seven digits, which is most of that.
type Row = (&'static str, &'static str, u64, f64, f64, f64);

#[rustfmt::skip]
const CURRENT: &[Row] = &[
    ("Megatron-Bridge model card, DeepSeek-V3 on 1024 H100", "DeepSeek-V3", 4096, 276.03, 1061.206, 0.3),
    ("Megatron-Bridge docs/performance-summary-archive.md 26.06, DeepSeek-V3", "DeepSeek-V3", 4096, 1648.0, 6338.0, 0.3),
    ("arXiv 2603.07685, DeepSeek-V3 on GB300", "DeepSeek-V3", 4096, 1233.0, 4730.0, 0.3),
    ("Megatron-Bridge model card, Qwen3-30B-A3B", "Qwen3-30B-A3B", 4096, 1030.07, 44773.361, 0.01),
    ("Megatron-Bridge model card, Qwen3-235B-A22B", "Qwen3-235B-A22B", 4096, 1300.44, 8784.492, 0.01),
    ("arXiv 2603.07685, Qwen3-235B-A22B at 131072", "Qwen3-235B-A22B", 131_072, 1150.0, 1556.0, 0.7),
    ("Megatron-Bridge docs/performance-summary-archive.md 25.11, Llama3-8B", "Meta-Llama-3-8B", 8192, 1933.0, 37556.0, 0.05),
    ("Megatron-Bridge docs/performance-summary-archive.md 26.02, Llama3-70B", "Meta-Llama-3-70B", 8192, 3056.0, 6798.0, 0.1),
    ("Megatron-Bridge docs/performance-summary-archive.md 26.06, Llama3.1-405B", "Llama-3.1-405B", 8192, 2646.0, 1048.0, 0.1),
    ("Megatron-Bridge docs/performance-summary-archive.md 26.06, Nemotron-3-Nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8192, 885.0, 39749.0, 0.1),
    ("Megatron-Bridge model card, Nemotron-3-Nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8192, 937.77, 42094.107, 0.01),
    ("Megatron-Bridge model card, DeepSeek-V4-Flash", "DeepSeek-V4-Flash", 4096, 731.4, 8056.45, 0.01),
    ("NeMo Framework performance summary 25.02, Mixtral-8x22B at 65536", "Mixtral-8x22B-v0.1", 65_536, 824.0, 2232.0, 0.1),
];

#[test]
fn golden_current_convention() {
    for (source, name, seq_len, tflops, tokens_per_s, percent) in CURRENT {
        let found = flops_per_token(&model(name), *seq_len);
        check(source, found, published(*tflops, *tokens_per_s), *percent);
    }
    check(
        "Megatron-Bridge docs/performance-summary-archive.md 25.11, DeepSeek-V3 without MTP",
        flops_per_token(&without_mtp("DeepSeek-V3"), 4096),
        published(961.0, 3848.0),
        0.05,
    );
    check(
        "arXiv 2505.09343, DeepSeek-V3 at 385 causal TFLOPS",
        flops_per_token(&without_mtp("DeepSeek-V3"), 4096),
        249.7,
        0.1,
    );
}

/// The formula worked out apart from this program on the same configurations, to the digits given.
#[test]
fn golden_formula_values() {
    let rows: &[(&str, u64, &str)] = &[
        ("DeepSeek-V3", 4096, "259.99"),
        ("Kimi-K2-Instruct", 4096, "204.48"),
        ("Qwen3-235B-A22B", 4096, "148.03"),
        ("Qwen3-235B-A22B", 131_072, "734.7"),
        ("Qwen3-30B-A3B", 4096, "23.006"),
        ("gpt-oss-120b", 4096, "32.63"),
        ("Llama-3.1-8B", 8192, "51.47"),
        ("Llama-3.1-70B", 8192, "449.2"),
        ("Llama-3.1-405B", 8192, "2524"),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8192, "22.28"),
        ("Qwen2-57B-A14B", 4096, "84.7"),
    ];
    for (name, seq_len, expected) in rows {
        let decimals = expected.split('.').nth(1).map_or(0, str::len);
        let found = flops_per_token(&model(name), *seq_len).0 / 1e9;
        assert_eq!(
            &format!("{found:.decimals$}"),
            expected,
            "{name} at {seq_len}"
        );
    }
}

/// Before March 2025 Megatron, and NeMo with it, counted attention in full.
#[test]
fn golden_attention_in_full() {
    let full = FlopRules {
        causal: false,
        ..FlopRules::default()
    };
    let rows: &[(&str, &str, u64, f64)] = &[
        (
            "NeMo Framework performance summary 25.07, Llama3-8B",
            "Meta-Llama-3-8B",
            8192,
            published(1838.0, 31737.0),
        ),
        (
            "NeMo Framework performance summary 25.04, Mixtral-8x7B",
            "Mixtral-8x7B-v0.1",
            4096,
            published(1598.0, 19275.0),
        ),
    ];
    for (source, name, seq_len, published) in rows {
        let found = flops_per_token_with(&model(name), *seq_len, full);
        check(source, found, *published, 0.05);
    }
    check(
        "arXiv 2505.09343, DeepSeek-V3 at 432 non-causal TFLOPS",
        flops_per_token_with(&without_mtp("DeepSeek-V3"), 4096, full),
        280.2,
        0.15,
    );
}

/// GPT-OSS has been counted in three ways: its gated MLP as two matrices and every layer in full
/// until Megatron-Bridge 26.04.01; three matrices and windows since 26.06.
#[test]
fn golden_gpt_oss_in_its_three_conventions() {
    let model = model("gpt-oss-120b");
    let windows = FlopRules::default();
    let whole = FlopRules {
        windows: false,
        ..windows
    };
    check(
        "Megatron-Bridge docs/performance-summary-archive.md 26.06, GPT-OSS-120B",
        flops_per_token_with(&model, 4096, windows),
        published(943.0, 28947.0),
        0.2,
    );
    check(
        "Megatron-Bridge model card, GPT-OSS-120B with a vocabulary of 32K",
        flops_per_token_with(
            &model,
            4096,
            FlopRules {
                padded_vocab: Some(32_000),
                ..windows
            },
        ),
        published(58.42, 1966.285),
        0.05,
    );
    check(
        "Megatron-Bridge model card, GPT-OSS-20B with a vocabulary of 32K",
        flops_per_token_with(
            &presets::load("gpt-oss-20b").expect("a preset"),
            4096,
            FlopRules {
                padded_vocab: Some(32_000),
                ..windows
            },
        ),
        published(117.01, 5851.199),
        0.05,
    );
    let mut two_matrices = model;
    for layer in &mut two_matrices.layers {
        if let Some(Ffn::Moe(moe)) = &mut layer.ffn {
            moe.expert.gated = false;
        }
    }
    check(
        "Megatron-Bridge docs/performance-summary-archive.md 26.02, GPT-OSS-120B",
        flops_per_token_with(&two_matrices, 4096, whole),
        published(527.0, 19412.0),
        0.1,
    );
    check(
        "Megatron-Bridge docs/performance-summary-archive.md 25.11, GPT-OSS-120B at 8192",
        flops_per_token_with(&two_matrices, 8192, whole),
        published(565.0, 18347.0),
        0.1,
    );
}

#[test]
fn law_longer_sequences_cost_more_and_windows_less() {
    for name in presets::names() {
        let model = model(name);
        let whole = FlopRules {
            windows: false,
            ..FlopRules::default()
        };
        let is_indexed =
            |layer: &Layer| matches!(&layer.mixer, Some(Mixer::Mla(mla)) if mla.indexer.is_some());
        let is_indexed = model.layers.iter().any(is_indexed);
        let mut before = [0.0; 2];
        for seq_len in [1024, 4096, 16_384, 65_536] {
            let plain = flops_per_token_with(&model, seq_len, whole).0;
            let windowed = flops_per_token(&model, seq_len).0;
            assert!(plain > before[0], "{name} at {seq_len}");
            assert!(windowed >= before[1], "{name} at {seq_len}");
            // An indexer's own work counts with what it saves.
            assert!(
                windowed <= plain || is_indexed && seq_len < 16_384,
                "{name} at {seq_len}"
            );
            before = [plain, windowed];
        }
    }
}
